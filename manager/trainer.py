"""What a user's training loop holds: `Manager` keeps the loop going while other replica groups come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lightkeeper.errors import UsageError
from lightkeeper.manager import local
from lightkeeper.manager.averages import EXTRA
from lightkeeper.manager.client import EpochKeys
from lightkeeper.manager.declarations import Declarations
from lightkeeper.manager.entries import entry_in
from lightkeeper.manager.extras import Values
from lightkeeper.manager.fingerprint import fingerprint, settings_hash, signature
from lightkeeper.manager.fold import chosen_reducer
from lightkeeper.manager.groups import GroupFailed
from lightkeeper.manager.joining import WAIT_S
from lightkeeper.manager.rank import JobStopped, Microbatches
from lightkeeper.manager.reducer import NotTraining
from lightkeeper.manager.step import LoopError, Step
from lightkeeper.manager.within import form_within
from lightkeeper.words import say

REASON_CHARS_MAX = 200


class Manager(Declarations):
    """One rank's part in the protocol.

    Args:
        model: module or modules whose parameters are trained; alike in all groups, with the same initial values.
        optimizer: optimizer or optimizers over them.
        seed: of the random state before each microbatch and in the apply phase.
        extras: name to shape, or to (shape, dtype), of the named extras; see `extra`.
        exclude: patterns ("*.amax_history") of the names of the model's buffers that its forward pass changes, so that
            they differ between groups: they are neither copied to a joiner nor compared. BatchNorm's are known.
        average_buffers: patterns of those that all groups shall have alike: each step moves them by the mean
            of what its microbatches changed ("*.running_mean", "*.running_var", "*.num_batches_tracked").
        place: which part of every microbatch this rank computes, for a group of several ranks: ``(index, count)``, or
            the device mesh (a slice of one) whose ranks split a microbatch; by default each rank has a part of its own.
            Tensor-parallel ranks of one part say the same: ``place=mesh["dp"]``.
        sync: when the ranks of a group sum up their gradients: after ``every`` microbatch, or after the ``last`` known
            one of a step. The runtime switches `fully_shard` and DistributedDataParallel accordingly, and nobody else.
        settings: what the group is told; read from ``LIGHTKEEPER_*`` where not given.

    Raises:
        UsageError: for settings, or a place, that cannot be right.
        ToldError: if the group's manager cannot be started.
    """

    # ------------------------------------------------------------ the loop

    def steps(self, until: int, microbatches: Microbatches) -> Iterator[Step]:
        """The steps of the run, up to and without step `until`.

        Args:
            until: number of steps of the run.
            microbatches: how many microbatches a step has over all groups; a number, or a pure function of the step.

        Raises:
            LoopError: if the loop's body breaks a rule.
            JobStopped: if the job stops before its end.

        A group for which the job had no use until its end is given no step at all.
        """
        if until < 1:
            raise UsageError(f"until {until}: a run has at least one step")
        self._until = until
        self._microbatches = microbatches
        if self._reducer is None:
            self._start()
        while self.page.step < until and not self._left and not self.ends and not self.finished:
            step = self.begin()
            yield step
            self._end_body()
        self.finish()

    def begin(self, microbatches: Microbatches | None = None) -> Step:
        """Begins the next step (for a loop without `steps`).

        Args:
            microbatches: as for `steps`; needed before the first step only.
        """
        if microbatches is not None:
            self._microbatches = microbatches
        self._end_body()
        if self._reducer is None:
            self._start()
            if self.finished:
                raise SystemExit(0)  # parked to the end: there is no step to give
        assert self._reducer is not None
        if self._follows or self._applies:
            step = self._begin_replay()
        else:
            index = self.page.step
            self._begin_at(index)
            self._enter("compute", index)
            self._start_step()
            step = self._step = Step(self, index, self._total(index), self._share, lead=self.leads)
        for watcher in self._watchers:
            watcher.begins(step.index)
        return step

    def finish(self) -> None:
        """Ends the run: an empty reduce with all members proves that its last step is final.

        Raises:
            JobStopped: if that cannot be shown.
        """
        self._end_body()
        if self.finished or self._reducer is None:
            return
        assert self._reducer is not None
        index = self.page.step
        if self._follows and self._closed_as_joiner():
            return
        if self._left:
            self._epochs.retire(1 << 62, self.settings.timeouts.form_timeout_s, wait=True)
            self._end_watchers()
            self._record.left(f"before step {index}")
            say(f"lightkeeper: this group leaves before step {index}, as asked; the others go on to step {self._until}")
            self._close()
            return
        self._until = index
        self._close_run(index)

    def cancel(self) -> None:
        """Ends the run before the step at hand, of which nothing is computed or applied; `steps` gives no further one.

        All groups must come to it alike, by what a *before* extra says: that their data has ended, say.

        Raises:
            LoopError: if there is no such step: it is none of this epoch's members', or was begun.
            JobStopped: if it cannot be shown that the last step is final.
        """
        step = self._step
        if step is None or not step.live or step.entered or step.voted:
            raise LoopError(
                "cancel() is for a live step, before its first microbatch: what cancels it must be known to all groups "
                "by then, by an extra that was declared with `before`"
            )
        self._step, self._until, self._cancels = None, step.index, True
        self._close_run(step.index)

    def _close_run(self, index: int) -> None:
        """An empty reduce with all members."""
        assert self._reducer is not None
        self._reducer.begin(index, 0)
        digest = fingerprint(nn.ParameterList(p for _, p in self._parameters), self.optimizer)
        while True:
            for watcher in self._watchers:
                watcher.closing()
            self._enter("closing", index)
            try:
                self._close_epoch(digest)
                vote = self._vote_for("closed")
            except GroupFailed as error:
                vote = self._failed_vote(error)
            answer = self._call(vote)
            if answer is None:
                break
            if self._recover(answer) == "committed":
                break  # closed while recovering
        self._record.finished(self.page.step, self._registry.fingerprint())
        self._end_watchers()
        self._close()

    def _end_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.closed()

    def leave(self, reason: str) -> None:
        """Asks for this group to leave at a step boundary; `steps` ends then, and the others go on.

        Any rank may call it, also from another thread; SIGTERM does the same. Not from a signal's handler.

        Args:
            reason: one line for the person on call.
        """
        self._client.send(local.AskLeave(reason=reason[:REASON_CHARS_MAX] or "asked to leave"))

    # ------------------------------------------------------------ what a step asks

    def entered(self, step: Step, k: int, last: bool) -> None:
        """A microbatch starts."""
        assert self._reducer is not None
        self._record.computes(k)
        self._pace.begins(step.index, time.monotonic())
        self._enter("compute", step.index, self._record.computed)
        self._sync.microbatch(last)
        self._reducer.microbatch(k, last)
        if self._averages is not None:
            self._averages.microbatch(self._contribute_buffers)

    def contribute(self, name: str, value: torch.Tensor | float) -> None:
        """See `Step.contribute`."""
        assert self._reducer is not None
        self._reducer.contribute(name, value)

    def _contribute_buffers(self, changes: torch.Tensor) -> None:
        self.contribute(EXTRA, changes)

    def agree(self, name: str, value: torch.Tensor | float) -> None:
        """See `Step.agree`."""
        assert self._reducer is not None
        self._reducer.agree(name, value)

    def before(self) -> Mapping[str, torch.Tensor]:
        """See `Step.before`."""
        values = self._before.values
        if values is not None:
            return values
        assert self._outcome is not None  # it is replayed, so its entry is here
        return Values({name: self._outcome.reduced[name] for name in self._before.names})

    def versions(self) -> list[int]:
        """Version counters of the parameters: any change in place raises one."""
        return [parameter._version for _, parameter in self._parameters]

    def changed_since(self, versions: Sequence[int]) -> str | None:
        """Name of a parameter that was changed since `versions` were read, or None."""
        for (name, parameter), version in zip(self._parameters, versions, strict=True):
            if parameter._version != version:
                return name
        return None

    def reduce(self, step: Step) -> tuple[int, ...] | None:
        """Reduces and votes; returns further microbatches to compute, or None once the group has committed."""
        assert self._reducer is not None
        if not step.live:
            return None  # voted on already: the entry in the buffers is applied
        assert self._plan is not None
        if self._sync.behind:
            raise LoopError(
                f"step {step.index}: with sync='last' the last microbatch of a share must be said to be it: "
                "step.enter(k, last=True)"
            )
        if self._averages is not None:
            self._averages.computed(self._contribute_buffers)
        self._pace.ends(time.monotonic())
        self.page.microbatch_us = self._pace.microbatch_us
        self._enter("reduce", step.index)
        self._record.reduces()
        try:
            outcome = self._reducer.reduce(self._ready, self.settings.timeouts.reduce_timeout_s)
            if outcome.problem is not None:
                raise LoopError(f"step {step.index}: the entry is wrong and is not committed: {outcome.problem}")
            if not outcome.total.alike:
                self._record.settings_differ(step.index)
            self._outcome = outcome
            self._reduced_as = entry_in(self._plan, step.index) if outcome.kind == "reduced" else None
            vote = self._vote_for(outcome.kind)
        except NotTraining:
            raise
        except GroupFailed as error:
            if error.local:
                raise
            vote = self._failed_vote(error)
        answer = self._call(vote)
        if answer is None:
            return None
        if answer.verdict == "again":
            self._reduced_as = None  # the buffers are about to hold another try: not an entry of this name
            self._attempt += 1
            self._reducer.retry()
            return ()
        outcome_of = self._recover(answer)
        return None if outcome_of == "committed" else self._open_share()

    def deals(self, further: tuple[int, ...]) -> None:
        """Further microbatches of the step are to be computed here."""
        for watcher in self._watchers if further else ():
            watcher.dealt()

    def commit(self, step: Step) -> Mapping[str, torch.Tensor]:
        """Puts the entry into `p.grad`; returns the user's extras."""
        assert self._reducer is not None and self._outcome is not None
        assert self._reduced_as is not None
        self._entries.settle()  # the state is about to change
        self._reducer.commit()
        self._entries.committed(self._reduced_as)
        self._record.commits(self._outcome)
        self._pace.waited(self._record.waited_s)
        self.page.wait_us = self._pace.wait_us
        for watcher in self._watchers:
            watcher.committed(step.index, self._outcome.reduced)
        self._enter("apply", step.index)
        if self._averages is not None:
            self._averages.commit(self._outcome.reduced.pop(EXTRA), step.total * self.place.count)
        return self._outcome.reduced

    # ------------------------------------------------------------ the start and the end

    def _start(self) -> None:
        """Joins the job: waits until the first epoch is activated."""
        first = self.page.step
        self._enter("join", first)
        keys = EpochKeys(self._client, local.OWN_KEYS, "within/")
        self._within = form_within(
            self.place, keys, self.rank, self.settings.ranks, self._host, self.settings.timeouts.start_budget_s
        )
        self._within.show(self.page.waiting)
        self._reducer = chosen_reducer()(
            self._parameters,
            self._layout,
            int(self.settings.bucket_mb * (1 << 20)),
            note=self._record.overlap,
            settings=lambda: settings_hash(self.optimizer),
            within=self._within,
            overlap=self._sync.at_hooks,
        )
        self._entries.serve(self._reducer)
        self._sync.settle()
        digest = self._registry.fingerprint()
        ready = local.Ready(signature=self.signature(), total=self._total(first), fingerprint=digest, step=first)
        answer = self._ask(ready)
        if answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict == "recover":
            self._recover(answer)
        elif answer.verdict == "stop" and answer.ok:
            what = "this group leaves" if answer.asked else "the job ends, and had no use for this group"
            say(f"lightkeeper: {what}: {answer.reason}")
            self._record.left("before it was a member" if answer.asked else "it was parked")
            self._close()
        else:
            self._stop(answer)

    def signature(self) -> dict[str, str]:
        """What must be alike in all groups, by name; from the first step on."""
        found = signature(self.model, self.optimizer)
        found.update({f"extra {name}": kind for name, kind in self._layout.describe().items()})
        found["microbatches of step 0"] = str(self._total(0))
        found["until"] = str(self._until)
        found["seed"] = str(self.seed)
        found["ranks"] = str(self.settings.ranks)
        found["place"] = f"{self.place.index} of {self.place.count}"
        found["sync"] = self._sync.when
        found["bucket_mb"] = str(self.settings.bucket_mb)
        found["reduction"] = type(self._reducer).__name__
        found["deal"] = self.settings.deal
        found["registered"] = ", ".join(self._registry.shared)
        found["torch"] = str(torch.__version__)
        found.update(self._alike)
        return found

    def _closed_as_joiner(self) -> bool:
        """A joiner that has applied every entry waits for the members' word that the last one is final.

        Returns:
            False if it was named in a recovery instead, and closes the run with the others.
        """
        self._enter("follow", self.page.step)
        while self._follows:
            answer = self._ask(self._joiner_vote("idle"))
            if answer.verdict == "stop" and answer.ok:
                self._record.finished(self.page.step, self._registry.fingerprint())
                self._close()
                return True
            if answer.verdict == "go":
                time.sleep(WAIT_S / 5)
            else:
                self._begin_at(self.page.step)
                self._after_waiting(answer)
        return False

    def _end_body(self) -> None:
        """The loop's body has ended: the step is applied."""
        step, self._step = self._step, None
        if step is None:
            return
        step.leave()
        assert self._reduced_as is not None
        self._sync.settle()
        every = self.settings.fingerprint_every
        digest = self._registry.fingerprint() if every and (step.index + 1) % every == 0 else None
        self._record.applied(step, self._reduced_as, digest)
        self.page.enter("replay" if self._follows else "compute", step.index + 1)
        for watcher in self._watchers:
            watcher.applied(step.index)
        self._entries.ready()
        if self._copy_at_end:
            self._copy_at_end = False
            self._copy()

    def _close(self) -> None:
        self.finished = True
        self.page.enter("ended", self.page.step)
        assert self._reducer is not None
        self._reducer.close()
        self._entries.close()
        if self._within is not None:
            self._within.close()
        self._signals.end()
        self._client.close()


__all__ = ["JobStopped", "LoopError", "Manager", "Step"]
