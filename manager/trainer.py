"""What a user's training loop holds: `Manager` keeps the loop going while other replica groups come and go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import exits, local
from lightkeeper.manager.client import ManagerClient
from lightkeeper.manager.entries import EntryHolder, entry_in, entry_of
from lightkeeper.manager.epochs import Epochs
from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.faults import VARIABLE, Injector, parse_faults
from lightkeeper.manager.fingerprint import Modules, Optimizers, fingerprint, signature
from lightkeeper.manager.groups import EpochGroup, GroupFailed
from lightkeeper.manager.joining import WAIT_S, Joiner
from lightkeeper.manager.progress import ProgressPage
from lightkeeper.manager.record import StepRecord
from lightkeeper.manager.reducer import NotTraining, Outcome, Reducer
from lightkeeper.manager.settings import Settings, read_settings
from lightkeeper.manager.spawn import find_or_start_manager
from lightkeeper.manager.state.registry import UNNAMED, StateRegistry
from lightkeeper.manager.step import LoopError, Step
from lightkeeper.manager.transfer.client import TransferFailed
from lightkeeper.manager.usererrors import report_exceptions
from lightkeeper.wire import own_address_towards
from lightkeeper.words import say

Microbatches = int | Callable[[int], int]


class JobStopped(ToldError):
    """The job stops here; the message says why."""

    exit_code = exits.STOPPED


class Manager:
    """One rank's part in the protocol.

    Args:
        model: module or modules whose parameters are trained; alike in all groups, with the same initial values.
        optimizer: optimizer or optimizers over them.
        seed: of the random state before each microbatch and in the apply phase.
        extras: name to shape, or to (shape, dtype), of the named extras; see `extra`.
        settings: what the group is told; read from ``LIGHTKEEPER_*`` where not given.

    Raises:
        UsageError: for settings that cannot be right.
        ToldError: if the group's manager cannot be started.
    """

    def __init__(
        self,
        model: Modules,
        optimizer: Optimizers,
        *,
        seed: int = 0,
        extras: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = read_settings() if settings is None else settings
        if not self.settings.token:
            raise UsageError(
                "no job token: set LIGHTKEEPER_TOKEN or LIGHTKEEPER_TOKEN_FILE, the same for lighthouse and groups"
            )
        self.seed, self.rank = seed, int(os.environ.get("RANK", "0"))
        self.model, self.optimizer = model, optimizer
        self._parameters = _named_parameters(model)
        self._layout = ExtrasLayout()
        for name, given in (extras or {}).items():
            self.extra(name, *_shape_and_dtype(given))
        self._manager = find_or_start_manager(self.settings, self.rank)
        self.page = ProgressPage(self._manager.socket.parent / f"progress-{self.rank}")
        host = self.settings.host or own_address_towards([self.settings.lighthouse])
        self._registry = StateRegistry()
        _register(self._registry, "model", model)
        _register(self._registry, "optimizer", optimizer)
        token, form_timeout_s = self.settings.token, self.settings.form_timeout_s
        history_bytes = int(self.settings.history_mb * (1 << 20))
        self._entries = EntryHolder(token, host, form_timeout_s, self._turned_away, self._registry, history_bytes)
        self._joiner = Joiner(token, self._registry, self.settings.outage_budget_s, self._say)
        register = local.Register(
            token=self.settings.token, rank=self.rank, pid=os.getpid(), transfer=self._entries.address,
            progress=str(self.page.path),
        )  # fmt: skip
        self._client = ManagerClient(self._manager.socket, register, self.page, self._manager.how_it_ended)
        registered = self._client.registered
        self._record = StepRecord(self.settings, registered.incarnation, self.rank)
        faults = tuple(f for f in parse_faults(os.environ.get(VARIABLE, "")) if f.group == self.settings.group)
        self._injector = Injector(faults, f"rank {self.settings.group}/{self.rank}", registered.pid, self._record.write)
        backend = "nccl" if self._parameters[0][1].is_cuda else "gloo"
        self._epochs = Epochs(self._client, self.rank, backend, host, self.settings.form_timeout_s)
        self._client.listen(_Pushes(self._epochs, self._entries))
        report_exceptions(self._client.send, lambda: self.page.step, quiet=(JobStopped,))
        self._reducer: Reducer | None = None
        self._plan: local.Plan | None = None
        self._microbatches: Microbatches = 0
        self._until: int | None = None
        self._share: tuple[int, ...] = ()
        self._ready = 0
        self._attempt = 0
        self._group: EpochGroup | None = None
        self._step: Step | None = None
        self._outcome: Outcome | None = None
        self._reduced_as: Entry | None = None
        self._left = False
        self._follows = False
        self._copy_at_end = False
        self.finished = False

    # ------------------------------------------------------------ declarations

    def extra(self, name: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> None:
        """Declares a named extra of every entry, before the first step.

        Args:
            name: its name in `step.contribute` and `step.reduced`.
            shape: its shape; () is a number.
            dtype: float32 or float64 (summed in float64), or int64 (exact while the sum is below 2**53).

        Raises:
            ValueError: for a name declared twice, another dtype or too many elements.
            RuntimeError: after the first step began.
        """
        self._layout.declare(name, tuple(shape), dtype)

    def register(self, name: str, obj: Any, scope: Literal["shared", "group"] = "shared") -> None:
        """Adds to the state that a returning group is given; before the first step, alike in all groups.

        Model and optimizer are registered already. Schedulers, scalers and whatever else the loop changes must be.

        Args:
            name: letters, digits, "_" and "-".
            obj: a module, an optimizer, a tensor, or anything with ``state_dict`` and ``load_state_dict``.
            scope: ``group`` for what differs between groups: it is never copied.

        Raises:
            UsageError: for a name that is taken, or a part that cannot be copied exactly, with its path.
        """
        if self._reducer is not None:
            raise UsageError(f"{name} is registered after the first step began: register it before")
        self._registry.register(name, obj, scope)

    # ------------------------------------------------------------ the loop

    def steps(self, until: int, microbatches: Microbatches) -> Iterator[Step]:
        """The steps of the run, up to and without step `until`.

        Args:
            until: number of steps of the run.
            microbatches: how many microbatches a step has over all groups; a number, or a pure function of the step.

        Raises:
            LoopError: if the loop's body breaks a rule.
            JobStopped: if the job stops before its end.
        """
        if until < 1:
            raise UsageError(f"until {until}: a run has at least one step")
        self._until = until
        while self.page.step < until and not self._left:
            step = self.begin(microbatches)
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
        assert self._reducer is not None
        if self._follows:
            return self._begin_replay()
        index = self.page.step
        self._begin_at(index)
        self._step = Step(self, index, self._total(index), self._share, lead=self._slot == 0)
        self._enter("compute", index)
        return self._step

    def _begin_at(self, index: int) -> None:
        assert self._reducer is not None
        self._reducer.begin(index, self._total(index))
        self._attempt, self._outcome = 0, None
        self._record.begin()

    @property
    def _slot(self) -> int | None:
        return None if self._plan is None else self._plan.slot

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
            self._epochs.retire(1 << 62, self.settings.form_timeout_s, wait=True)
            self._record.left(f"before step {index}")
            self._close()
            return
        self._until = index
        self._reducer.begin(index, 0)
        digest = fingerprint(nn.ParameterList(p for _, p in self._parameters), self.optimizer)
        while True:
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
        self._record.finished(self.page.step, fingerprint(self.model, self.optimizer))
        self._close()

    def _close_epoch(self, digest: str) -> None:
        """The closing reduce; it also shows whether all members hold the same parameters and optimizer state.

        If they do not, it says so and evicts nobody: the loop is not reproducible bit by bit here, or changes state
        differently in some group.

        Raises:
            GroupFailed: as any reduce.
        """
        assert self._group is not None
        parts = torch.tensor([int(digest[i : i + 4], 16) for i in range(0, len(digest), 4)], dtype=torch.float64)
        sums = torch.cat([parts, parts * parts]).to(self._parameters[0][1].device)
        self._group.all_reduce(sums).wait(self.settings.reduce_timeout_s)
        total, squares = sums.cpu().chunk(2)  # exact: the parts have 16 bits; only equal ones make these two equal
        if not torch.equal(total * total, squares * self._group.size):
            self._record.diverged(self.page.step, digest)

    # ------------------------------------------------------------ what a step asks

    def entered(self, step: Step, k: int, last: bool) -> None:
        """A microbatch starts."""
        assert self._reducer is not None
        self._record.computes(k)
        self._enter("compute", step.index, self._record.computed)
        self._reducer.microbatch(k, last)

    def contribute(self, name: str, value: torch.Tensor | float) -> None:
        """See `Step.contribute`."""
        assert self._reducer is not None
        self._reducer.contribute(name, value)

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
            self._follow(step.index)
            return None
        assert self._plan is not None
        self._enter("reduce", step.index)
        self._record.reduces()
        try:
            outcome = self._reducer.reduce(self._ready, self.settings.reduce_timeout_s)
            if outcome.problem is not None:
                raise LoopError(f"step {step.index}: the entry is wrong and is not committed: {outcome.problem}")
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
            self._attempt += 1
            self._reducer.retry()
            return ()
        outcome_of = self._recover(answer)
        return None if outcome_of == "committed" else self._open_share()

    def commit(self, step: Step) -> Mapping[str, torch.Tensor]:
        """Puts the entry into `p.grad`; returns the user's extras."""
        assert self._reducer is not None and self._outcome is not None
        assert self._reduced_as is not None
        self._entries.settle()  # the state is about to change
        self._reducer.commit()
        self._entries.committed(self._reduced_as)
        self._record.commits(self._outcome)
        self._enter("apply", step.index)
        return self._outcome.reduced

    # ------------------------------------------------------------ inside: joining

    def _start(self) -> None:
        """Joins the job: waits until the first epoch is activated."""
        self._reducer = Reducer(
            self._parameters,
            self._layout,
            int(self.settings.bucket_mb * (1 << 20)),
            note=self._record.overlap,
        )
        self._entries.serve(self._reducer)
        self._enter("join", 0)
        digest = fingerprint(self.model, self.optimizer)
        answer = self._ask(local.Ready(signature=self._signature(), total=self._total(0), fingerprint=digest))
        if answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict == "recover":
            self._recover(answer)
        else:
            self._stop(answer)

    def _signature(self) -> dict[str, str]:
        found = signature(self.model, self.optimizer)
        found.update({f"extra {name}": kind for name, kind in self._layout.describe().items()})
        found["microbatches of step 0"] = str(self._total(0))
        found["until"] = str(self._until)
        found["seed"] = str(self.seed)
        found["ranks"] = str(self.settings.ranks)
        found["bucket_mb"] = str(self.settings.bucket_mb)
        found["torch"] = str(torch.__version__)
        return found

    def _total(self, index: int) -> int:
        if self._until is not None and index >= self._until:
            return 0
        total = self._microbatches(index) if callable(self._microbatches) else self._microbatches
        if total < 1:
            raise UsageError(f"microbatches of step {index}: {total}; a step has at least one")
        return total

    # ------------------------------------------------------------ inside: votes and answers

    def _vote_for(self, outcome: str) -> local.Vote:
        assert self._plan is not None
        index = self.page.step
        activates = self._outcome.ready if self._outcome is not None and outcome == "reduced" else 0
        following = 0 if outcome == "closed" else self._total(index + 1)
        return local.Vote(
            epoch=self._plan.epoch, step=index, outcome=outcome, attempt=self._attempt, next_total=following,
            activates=activates,
        )  # fmt: skip

    def _failed_vote(self, error: GroupFailed | TransferFailed) -> local.Vote:
        assert self._plan is not None and self._reducer is not None
        members = self._plan.members
        suspects = tuple(members[slot] for slot in getattr(error, "suspects", ()) if slot < len(members))
        self._record.failed()
        return local.Vote(
            epoch=self._plan.epoch,
            step=self.page.step,
            outcome="failed",
            attempt=self._attempt,
            error=str(error),
            suspects=suspects,
        )

    def _call(self, vote: local.Vote) -> local.Answer | None:
        """Votes; None if the group has committed (or the run is closed), else what to do."""
        self._enter("vote", self.page.step)
        answer = self._ask(vote)
        if answer.verdict in ("go", "leave"):
            self._share, self._ready, self._copy_at_end = answer.share, answer.ready, answer.copy
            self._left = answer.verdict == "leave"
            if self._plan is not None and answer.epoch != self._plan.epoch and not self._left:
                self._switch(answer.epoch)
            return None
        if answer.verdict == "stop":
            if answer.ok and vote.step == self._until:
                return None
            self._stop(answer)
        return answer

    def _ask(self, message: local.Ready | local.Vote) -> local.Answer:
        """The group's answer; while it stands it may have to copy its state for a joiner first."""
        answer = self._client.call(message)
        while answer.verdict == "copy":
            self._copy(standing=True)
            answer = self._client.next_answer()
        return answer

    def _copy(self, standing: bool = False) -> None:
        start = time.monotonic()
        if self._entries.copy() and standing:
            self._entries.settle()
        self._record.copied(self.page.step, time.monotonic() - start)

    def _stop(self, answer: local.Answer) -> None:
        if answer.ok:
            say(f"lightkeeper: the job ends: {answer.reason}")
            raise SystemExit(0)
        raise JobStopped(f"the job stops: {answer.reason}")

    def _recover(self, answer: local.Answer) -> str:
        """Follows plans until one holds: "committed" (an entry was adopted) or "again" (reduce anew)."""
        assert self._reducer is not None
        while True:
            assert answer.plan is not None
            plan = answer.plan
            self._plan = plan
            self._enter("recover", self.page.step)
            self._reducer.retry()
            self._attempt, self._ready = 0, 0  # what was prepared on the epoch that failed is void
            try:
                self._group = self._epochs.take(plan.epoch)
                self._reducer.attach(self._group)
                self._epochs.drop(plan.epoch)
                if plan.adopt is None:
                    self._share = plan.share
                    return "again"
                self._adopt(plan.adopt)
                vote = self._vote_for("adopted")
            except (GroupFailed, TransferFailed) as error:
                vote = self._failed_vote(error)
            next_answer = self._call(vote)
            if next_answer is None:
                return "committed"
            answer = next_answer

    def _adopt(self, adopt: local.Adopt) -> None:
        """Takes the entry that this group missed: from its own buckets if they hold it whole, else from the donor."""
        assert self._reducer is not None
        name, fetched = entry_of(adopt), 0
        if self._reduced_as == name:
            self._outcome = self._reducer.adopt()  # reduced here, though the group did not commit it
        else:
            self._reduced_as = None
            self._outcome = self._entries.fetch(adopt, self._reducer)
            self._reduced_as = name
            fetched = sum(buffer.nbytes for buffer in self._reducer.pending_buffers())
        self._record.adopts(adopt, fetched)

    def _open_share(self) -> tuple[int, ...]:
        return tuple(k for k in self._share if k not in self._record.microbatches)

    def _switch(self, epoch: int) -> None:
        """A planned epoch came into force by the entry just reduced."""
        assert self._reducer is not None
        self._plan = self._epochs.plan(epoch)
        self._group = self._epochs.take(epoch)
        self._reducer.attach(self._group)
        self._epochs.retire(epoch, self.settings.form_timeout_s)

    # ------------------------------------------------------------ inside: a joiner

    def _heal(self, answer: local.Answer) -> None:
        """Takes the members' state, until it follows them or is named in a recovery."""
        while answer.verdict == "heal":
            assert answer.source is not None
            self._enter("heal", self.page.step)
            try:
                fetched = self._joiner.fetch(answer.source)
            except TransferFailed as error:
                answer = self._ask(local.Vote(epoch=0, step=self.page.step, outcome="lost", error=str(error)))
                continue
            self._entries.healed(fetched.name)
            self._record.healed(fetched)
            self.page.enter("replay", fetched.name.step + 1)
            answer = self._ask(self._joiner_vote("healed"))
        self._follows = answer.verdict == "go"
        if answer.verdict == "recover":
            self._reducer_at(self.page.step)
            self._recover(answer)
        elif not self._follows:
            self._stop(answer)

    def _reducer_at(self, index: int) -> None:
        assert self._reducer is not None
        self._reducer.begin(index, self._total(index))

    def _joiner_vote(self, outcome: str, activates: int = 0) -> local.Vote:
        name = self._entries.newest
        entry = None if name == UNNAMED else _triple(name)
        step = name.step + 1
        return local.Vote(
            epoch=0, step=step, outcome=outcome, next_total=self._total(step), activates=activates, entry=entry
        )

    def _closed_as_joiner(self) -> bool:
        """A joiner that has applied every entry waits for the members' word that the last one is final.

        Returns:
            False if it was named in a recovery instead, and closes the run with the others.
        """
        self._enter("follow", self.page.step)
        while self._follows:
            answer = self._ask(self._joiner_vote("idle"))
            if answer.verdict == "stop" and answer.ok:
                self._record.finished(self.page.step, fingerprint(self.model, self.optimizer))
                self._close()
                return True
            if answer.verdict == "go":
                time.sleep(WAIT_S / 5)
            else:
                self._reducer_at(self.page.step)
                self._after_waiting(answer)
        return False

    def _begin_replay(self) -> Step:
        """Waits for the next entry; the step that applies it has no share here. Or the group is a member by now."""
        assert self._reducer is not None
        while self._follows:
            index = self.page.step
            self._begin_at(index)
            try:
                found = self._joiner.next_entry(self._entries.newest, self._reducer, wait_s=0.0)
                if found is None:
                    self._enter("follow", index)  # it has caught up
                    found = self._joiner.next_entry(self._entries.newest, self._reducer, WAIT_S)
            except TransferFailed as error:
                vote = local.Vote(epoch=0, step=index, outcome="lost", error=str(error))
                self._after_waiting(self._ask(vote))
                continue
            if found is not None:
                self._reduced_as, self._outcome = found
                self._step = Step(self, index, self._total(index), (), lead=False, live=False)
                return self._step
            self._after_waiting(self._ask(self._joiner_vote("idle")))
        index = self.page.step
        self._step = Step(self, index, self._total(index), self._open_share(), lead=self._slot == 0)
        self._enter("compute", index)
        return self._step

    def _after_waiting(self, answer: local.Answer) -> None:
        """What the group does when no entry came: goes on waiting, heals anew, or is named in a recovery."""
        if answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict == "recover":
            self._follows = False
            self._recover(answer)
        elif answer.verdict != "go":
            self._stop(answer)

    def _follow(self, index: int) -> None:
        """The entry in the buffers is applied; it may be the one that makes this group a member."""
        assert self._outcome is not None and self._reduced_as is not None
        if self._outcome.problem is not None:
            raise LoopError(f"step {index}: the entry is wrong and is not applied: {self._outcome.problem}")
        name = self._reduced_as
        vote = local.Vote(
            epoch=0, step=index + 1, outcome="followed", next_total=self._total(index + 1),
            activates=self._outcome.ready, entry=_triple(name),
        )  # fmt: skip
        answer = self._ask(vote)
        if answer.verdict != "go":
            self._stop(answer)
        if answer.epoch:
            self._follows = False
            self._share, self._ready = (), 0
            self._switch(answer.epoch)
            self._record.rejoined(index + 1)

    # ------------------------------------------------------------ inside: bookkeeping

    def _enter(self, phase: str, index: int, microbatches: int = 0) -> None:
        self.page.enter(phase, index, microbatches)
        self._injector.reached(phase, index)

    def _end_body(self) -> None:
        """The loop's body has ended: the step is applied."""
        step, self._step = self._step, None
        if step is None:
            return
        step.leave()
        assert self._reduced_as is not None
        every = self.settings.fingerprint_every
        digest = fingerprint(self.model, self.optimizer) if every and (step.index + 1) % every == 0 else None
        self._record.applied(step, self._reduced_as, digest)
        self.page.enter("replay" if self._follows else "compute", step.index + 1)
        if self._copy_at_end:
            self._copy_at_end = False
            self._copy()

    def _close(self) -> None:
        self.finished = True
        self.page.enter("ended", self.page.step)
        assert self._reducer is not None
        self._reducer.close()
        self._entries.close()
        self._client.close()

    def _turned_away(self, line: str) -> None:
        self._record.turned_away(line)

    def _say(self, line: str) -> None:
        say(f"lightkeeper: {line}")


def _named_parameters(model: Modules) -> list[tuple[str, nn.Parameter]]:
    modules = (
        {"": model}
        if isinstance(model, nn.Module)
        else dict(model)
        if isinstance(model, Mapping)
        else dict(enumerate(model))
    )
    named = []
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                named.append((f"{prefix}.{name}" if prefix != "" else name, parameter))
    if not named:
        raise UsageError("the model has no parameter that is trained")
    return named


class _Pushes:
    """What the manager pushes: to the process groups, and to what is held for joiners."""

    def __init__(self, epochs: Epochs, entries: EntryHolder) -> None:
        self.abort, self.build = epochs.abort, epochs.build
        self.touch, self.release = entries.touch, entries.release


def _register(registry: StateRegistry, name: str, given: Any) -> None:
    """Registers one object, or several under numbered or given names."""
    if isinstance(given, Mapping):
        for key, obj in given.items():
            registry.register(f"{name}-{key}", obj)
    elif isinstance(given, Sequence):
        for number, obj in enumerate(given):
            registry.register(f"{name}-{number}", obj)
    else:
        registry.register(name, given)


def _triple(name: Entry) -> tuple[int, int, str]:
    return name.epoch.number, name.epoch.term.number, name.epoch.term.lighthouse


def _shape_and_dtype(given: Any) -> tuple[Any, ...]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], torch.dtype):
        return given
    return (given,)
