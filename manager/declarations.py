"""What a training loop declares: before its first step what is in an entry and in the state, later what is no step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from lightkeeper.errors import UsageError
from lightkeeper.manager.before import Part
from lightkeeper.manager.follower import Follower
from lightkeeper.manager.progress import EXPECTED


class Declarations(Follower):
    """See `Manager`."""

    def extra(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float64,
        *,
        before: Part | None = None,
        agreed: bool = False,
    ) -> None:
        """Declares a named extra of every entry, before the first step.

        Args:
            name: its name in `step.contribute` (or `step.before`, `step.agree`) and in `step.reduced`.
            shape: its shape; () is a number.
            dtype: float32 or float64 (summed in float64), or int64 (exact while the sum is below 2**53).
            before: makes it one that is reduced when the step starts: what a microbatch (of several ranks: this rank's
                place in it) adds to it, a function of step and microbatch that gives the same in every group. Its sum
                over all microbatches is `step.before[name]`.
            agreed: makes it the lowest slot's value, as given to `step.agree`.

        Raises:
            ValueError: for a name declared twice, another dtype or too many elements.
            RuntimeError: after the first step began.
        """
        if before is not None and agreed:
            raise UsageError(f"extra {name!r} is either reduced before the step or agreed on, not both")
        if before is not None:
            self._before.declare(name, tuple(shape), dtype, before)
        else:
            self._layout.declare(name, tuple(shape), dtype, "agreed" if agreed else "sum")

    def register(
        self, name: str, obj: Any, scope: Literal["shared", "group"] = "shared", exclude: Sequence[str] = ()
    ) -> None:
        """Adds to the state that a returning group is given; before the first step, alike in all groups.

        Model and optimizer are registered already. Schedulers, scalers and whatever else the loop changes must be.

        Args:
            name: letters, digits, "_" and "-".
            obj: a module, an optimizer, a tensor, or anything with ``state_dict`` and ``load_state_dict``.
            scope: ``group`` for what differs between groups: it is never copied.
            exclude: for a module, as for `Manager`.

        Raises:
            UsageError: for a name that is taken, or a part that cannot be copied exactly, with its path.
        """
        if self._reducer is not None:
            raise UsageError(f"{name} is registered after the first step began: register it before")
        if isinstance(obj, torch.amp.GradScaler):  # else it has no scale in a group that has computed nothing yet
            obj.scale(torch.zeros((), device=self._parameters[0][1].device))
        self._registry.register(name, obj, scope, exclude)

    def alike(self, name: str, value: str | float) -> None:
        """Names, before the first step, what only the loop knows and must be the same in all groups.

        A group that comes with another `value`, compared as text, is refused by the `name`.
        """
        self._alike[name] = str(value)

    def resume(self, step: int) -> None:
        """Says that the state here was loaded from a checkpoint; before the first step, on every rank.

        Steps are counted on from there: what `until`, the number of microbatches, random state and data order are told
        is the index in the whole run, so a run that is resumed is the same run. A group that joins while the job runs
        takes the members' state whatever it has loaded. Where a job begins, the groups that are furthest on begin it
        and the others take their state.

        Args:
            step: how many steps the state has behind it: the index of the next one.

        Raises:
            UsageError: for no such number, or after the first step began.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"resume({step!r}): the number of steps that the state has behind it, 0 or more")
        if self._reducer is not None:
            raise UsageError(f"resume({step}) after the first step began: call it before")
        self._entries.starts(step)
        self.page.enter(self.page.phase, step)

    def _bounded(self, what: str, seconds: float) -> float:
        """What may be declared of it: no run ends for a number that is too high, at its first evaluation perhaps."""
        try:
            self.settings.timeouts.check_declared(seconds)
        except UsageError as error:
            bound_s = self.settings.timeouts.reduce_timeout_s
            if not seconds >= bound_s:
                raise
            self._say(f"expect({what!r}): {error}; it is taken for {bound_s:g} s")
            return bound_s
        return seconds

    @contextlib.contextmanager
    def expect(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """``with manager.expect("evaluation", seconds=600):`` says that what the training thread does there is no part
        of a step, and how long it may take before the rank is held to be stuck.

        `lightkeeper status` shows it as the group's phase, and so does the event of a group that is lost there. A step
        that begins or ends inside shows itself again.

        Args:
            what: "checkpoint", "compile", "evaluation" or "profile".
            seconds: by which it has certainly ended; None: as long as such a phase usually takes, many times over, and
                the first time as long as a first step may.

        Raises:
            UsageError: for anything else, or seconds that are none. More than the others would stand for it
                (`docs/timeouts.md`) is said in a line, and taken for that.
        """
        if what not in EXPECTED:
            raise UsageError(f"expect({what!r}): give {', '.join(map(repr, EXPECTED[:-1]))} or {EXPECTED[-1]!r}")
        if seconds is not None:
            seconds = self._bounded(what, seconds)
        page = self.page
        before = page.phase, page.step, page.microbatches, page.expected_s
        self._enter(what, page.step, expected_s=seconds or 0.0)
        try:
            yield
        finally:
            if (page.phase, page.step) == (what, before[1]):  # else a step went on meanwhile: what it does now counts
                page.enter(*before)
