"""One step of the user's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from lightkeeper.errors import ToldError
from lightkeeper.manager.randomness import seed_apply, seed_microbatch

if TYPE_CHECKING:
    from lightkeeper.manager.trainer import Manager


class LoopError(ToldError):
    """The loop around the step breaks a rule that the job's sameness rests on; fatal for this group."""


class Step:
    """A step in progress.

    Iterate over `microbatches()`; or, for a loop that is not ours, call `share()` and `reduce()` until `reduce()`
    returns True, then `commit()`.

    Attributes:
        index: index of the step, counted from 0.
        total: number of microbatches of the step over all groups; divide the loss by it.
        live: False while a step is replayed or followed.
        lead: True in one live group only (the lowest slot): log, evaluate and save under it. True on every rank of that
            group, which may all have to take part in a sharded save; print and write plain files under
            ``step.lead and manager.rank == 0``.
    """

    def __init__(
        self, manager: Manager, index: int, total: int, share: tuple[int, ...], lead: bool, live: bool = True
    ) -> None:
        self.index, self.total, self.live, self.lead = index, total, live, lead
        self._manager = manager
        self._open: tuple[int, ...] = share
        self._reduced: Mapping[str, torch.Tensor] | None = None
        self._entered = False
        self._voted = False
        self._committed = False
        self._versions = manager.versions()

    # ------------------------------------------------------------ the loop

    def microbatches(self) -> Iterator[int]:
        """My share, one index after another; it grows if a peer is lost during the step.

        Before each one the random state is set from (seed, step, microbatch, place), and when the iteration ends from
        (seed, step). Leaving it by exhaustion means: reduced, voted, committed.
        """
        while True:
            share = self.share()
            for position, k in enumerate(share):
                self.enter(k, last=position == len(share) - 1)
                yield k
            if self.reduce():
                break
        self.commit()

    @property
    def entered(self) -> bool:
        """Whether a microbatch was begun here."""
        return self._entered

    @property
    def voted(self) -> bool:
        """Whether the group has committed, so that nothing is left to compute."""
        return self._voted

    def share(self) -> tuple[int, ...]:
        """Microbatches that are still to be computed here, now; empty if there are none."""
        return self._open

    def enter(self, k: int, last: bool = False) -> None:
        """Microbatch `k` starts: sets the random state. `microbatches()` calls it.

        Args:
            k: index of the microbatch, one of `share()`.
            last: whether no other of `share()` follows, so that reduction may overlap its backward.
        """
        if k not in self._open:
            raise LoopError(f"step {self.index}: microbatch {k} is not in this group's share {list(self._open)}")
        self._entered = True
        self._manager.entered(self, k, last)
        seed_microbatch(self._manager.seed, self.index, k, self._manager.place.index)

    def reduce(self) -> bool:
        """Reduces what was computed and votes.

        Returns:
            True if the group has committed; False if `share()` has changed (perhaps to nothing) and `reduce` must be
            called again after it was computed.

        Raises:
            LoopError: if a parameter was changed since the step began (an optimizer stepped too early).
            JobStopped: if the job stops here.
        """
        self._check_untouched()
        further = self._manager.reduce(self)
        if further is None:
            self._voted = True
            self._open = ()
            return True
        self._open = further
        self._manager.deals(further)
        return False

    def commit(self) -> None:
        """Puts the entry into `p.grad` and sets the random state of the apply phase; then step the optimizer."""
        if not self._voted:
            raise LoopError(f"step {self.index}: commit() before reduce() returned True")
        self._check_untouched()
        self._reduced = self._manager.commit(self)
        self._committed = True
        seed_apply(self._manager.seed, self.index)

    # ------------------------------------------------------------ extras

    @property
    def before(self) -> Mapping[str, torch.Tensor]:
        """The extras that were declared with `before`: summed over all microbatches of the step, before the first of
        them is computed; the same bits in every group.
        """
        return self._manager.before()

    def agree(self, name: str, value: torch.Tensor | float) -> None:
        """Gives this group's value of an extra that was declared as agreed; `reduced` has the lowest slot's (rank 0's).

        Every group calls it in every step, before the inner loop or in it: its value is part of the entry, and which
        group has the lowest slot may change until the entry is reduced. Where the step is replayed it has no effect.

        Raises:
            KeyError: for a name that was not declared.
            ValueError: for another kind or shape, or a fraction for an int64 extra.
        """
        if self._voted:
            raise LoopError(f"step {self.index}: agree({name!r}) after the step was reduced; its entry holds the value")
        self._manager.agree(name, value)

    def contribute(self, name: str, value: torch.Tensor | float) -> None:
        """Adds to a declared extra; the sum over all places of all groups stands in `reduced` after the inner loop.

        Raises:
            KeyError: for a name that was not declared.
            ValueError: for another shape, or a fraction for an int64 extra.
        """
        if self._voted:
            raise LoopError(f"step {self.index}: contribute({name!r}) after the step was reduced")
        self._manager.contribute(name, value)

    @property
    def reduced(self) -> Mapping[str, torch.Tensor]:
        """The declared extras, by name; the same bits in every group."""
        if self._reduced is None:
            raise LoopError(
                f"step {self.index}: `reduced` is known once the loop over step.microbatches() has run to its end; was "
                "it left early (break, return), or not run?"
            )
        return self._reduced

    # ------------------------------------------------------------ rules

    def leave(self) -> None:
        """The loop's body has ended; the manager calls it before the next step.

        Raises:
            LoopError: if the inner loop was left by `break`, or never run.
        """
        if not self._committed:
            how = (
                "was left before it was exhausted (break, return or an early `continue`)"
                if self._entered
                else "was not run"
            )
            raise LoopError(f"step {self.index}: the loop over step.microbatches() {how}; every step must exhaust it")

    def _check_untouched(self) -> None:
        changed = self._manager.changed_since(self._versions)
        if changed is not None:
            raise LoopError(
                f"step {self.index}: parameter {changed} was changed before the step was committed; is the optimizer "
                "stepped inside the loop over step.microbatches(), or fused into backward? Step it after that loop"
            )
