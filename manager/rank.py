"""One rank's part in the protocol: its votes, the group's answers, and what follows from them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.events.schema import Event
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import exits, local, owngroups
from lightkeeper.manager.addresses import own_host
from lightkeeper.manager.averages import EXTRA, AveragedBuffers
from lightkeeper.manager.before import BeforeExtras
from lightkeeper.manager.client import ManagerClient
from lightkeeper.manager.entries import EntryHolder, entry_of
from lightkeeper.manager.epochs import Epochs
from lightkeeper.manager.evidence.handler import RankEvidence, set_buffer_size
from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.faults import VARIABLE, Injector, parse_faults
from lightkeeper.manager.fingerprint import Modules, Optimizers
from lightkeeper.manager.given import all_modules, check_optimizers, register, shape_and_dtype, trained_parameters
from lightkeeper.manager.groups import EpochGroup, GroupFailed, Over
from lightkeeper.manager.joining import Joiner
from lightkeeper.manager.pace import Pace
from lightkeeper.manager.progress import ANSWER, NOBODY, OTHERS, PEERS, ProgressPage
from lightkeeper.manager.pushes import PushesTo
from lightkeeper.manager.randomness import seed_microbatch
from lightkeeper.manager.record import StepRecord
from lightkeeper.manager.reducer import Outcome, Reducer
from lightkeeper.manager.settings import Settings, read_settings
from lightkeeper.manager.shown import ShownGroup
from lightkeeper.manager.signals import NOTICE, LeaveSignal
from lightkeeper.manager.spawn import find_or_start_manager, rank_and_settings
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.step import Step
from lightkeeper.manager.sync import GradientSync, Sync
from lightkeeper.manager.transfer.client import TransferFailed
from lightkeeper.manager.usererrors import report_exceptions, tell_in_one_line
from lightkeeper.manager.watch import Watcher, feared_share, probable_share
from lightkeeper.manager.within import NotTogether, Within, place_of
from lightkeeper.words import say

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Microbatches = int | Callable[[int], int]


class JobStopped(ToldError):
    """The job stops here; the message says why."""

    exit_code = exits.STOPPED


class Rank:
    """The rank of a member, between its reducer, its manager and its process groups; arguments as of `Manager`."""

    def __init__(
        self,
        model: Modules,
        optimizer: Optimizers,
        *,
        seed: int = 0,
        extras: Mapping[str, Any] | None = None,
        exclude: Sequence[str] = (),
        average_buffers: Sequence[str] = (),
        place: tuple[int, int] | DeviceMesh | None = None,
        sync: Sync = "every",
        settings: Settings | None = None,
    ) -> None:
        tell_in_one_line()
        set_buffer_size(os.environ)
        self.rank, self.settings = rank_and_settings(read_settings() if settings is None else settings)
        if not self.settings.token:
            raise UsageError(
                "no job token: set LIGHTKEEPER_TOKEN or LIGHTKEEPER_TOKEN_FILE, the same for lighthouse and groups"
            )
        self.seed = seed
        self.model, self.optimizer = model, optimizer
        self.place = place_of(place, self.rank, self.settings.ranks)
        self._sync = GradientSync(all_modules(model), sync)
        self._parameters = trained_parameters(model)
        owngroups.settle(self.settings.timeouts, self._parameters[0][1].is_cuda)
        check_optimizers(optimizer, self._parameters)
        self._layout = ExtrasLayout()
        self._before = BeforeExtras(self._layout)
        for name, given in (extras or {}).items():
            self._layout.declare(name, *shape_and_dtype(given))
        self._manager = find_or_start_manager(self.settings)
        self.page = ProgressPage(self._manager.socket.parent / f"progress-{self.rank}")
        host = self._host = own_host(self.settings.host, self.settings.lighthouse)
        self._registry = StateRegistry()
        self._register_state(exclude, average_buffers)
        token, form_timeout_s = self.settings.token, self.settings.timeouts.form_timeout_s
        history_bytes = int(self.settings.history_mb * (1 << 20))
        self._entries = EntryHolder(token, host, form_timeout_s, self._turned_away, self._registry, history_bytes)
        self._joiner = Joiner(token, self._registry, self.settings.outage_budget_s, self._say)
        self._client = self._registered()
        registered = self._client.registered
        self._pace = Pace()
        self._record = StepRecord(self.settings, registered.incarnation, self.rank)
        me = (self.settings.group, self.rank)
        faults = tuple(f for f in parse_faults(os.environ.get(VARIABLE, "")) if (f.group, f.rank) == me)
        self._injector = Injector(faults, f"rank {self.settings.group}/{self.rank}", registered.pid, self._record.write)
        backend = "nccl" if self._parameters[0][1].is_cuda else "gloo"
        self._epochs = Epochs(self._client, self.rank, backend, host, form_timeout_s)
        self._plan: local.Plan | None = None
        self._watchers: list[Watcher] = []
        self._suspects: tuple[str, ...] | None = None  # None: nobody is suspected; empty: somebody
        kept = self._manager.socket.parent if self.settings.run_folder else None
        self._evidence = RankEvidence(kept, self.rank, self._epochs.members)
        self._client.listen(PushesTo(self._epochs, self._entries, self._joiner, self._aborted, self._evidence))
        self._signals = LeaveSignal(self._signalled)
        report_exceptions(self._client.send, lambda: self.page.step, quiet=(JobStopped,))
        self._alike: dict[str, str] = {}
        self._within: Within | None = None
        self._reducer: Reducer | None = None
        self._microbatches: Microbatches = 0
        self._until: int | None = None
        self._share: tuple[int, ...] = ()
        self._ready = self._attempt = 0
        self._group: EpochGroup | None = None
        self._step: Step | None = None
        self._outcome: Outcome | None = None
        self._reduced_as: Entry | None = None
        self._left = self._follows = self._applies = self._copy_at_end = self.finished = False
        self._cancels = False  # the run ends before the step at hand, which others may not know yet
        self.ends = False  # the run ends after the step at hand, as all groups know by its entry

    __init__.__qualname__ = "Manager.__init__"  # Python names it so for a misspelt argument: nobody calls Rank

    def _register_state(self, exclude: Sequence[str], average_buffers: Sequence[str]) -> None:
        """What a returning group is given in any case."""
        self._averages = AveragedBuffers(all_modules(self.model), average_buffers) if average_buffers else None
        elsewhere = () if self._averages is None else tuple(self._averages.names)
        register(self._registry, "model", self.model, (*exclude, *elsewhere))
        register(self._registry, "optimizer", self.optimizer)
        if self._averages is not None:
            self._layout.declare(EXTRA, (self._averages.numel,))
            self._registry.register("averaged-buffers", self._averages)

    def _registered(self) -> ManagerClient:
        """The connection to this group's manager, which knows of this rank then."""
        register = local.Register(
            token=self.settings.token, rank=self.rank, pid=os.getpid(), transfer=self._entries.address,
            progress=str(self.page.path),
        )  # fmt: skip
        return ManagerClient(self._manager.socket, register, self.page, self._manager.how_it_ended)

    # ------------------------------------------------------------ votes and answers

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
        echo = isinstance(error, NotTogether)
        if not suspects and not echo and isinstance(error, GroupFailed) and error.aborted is None and not error.waited:
            suspects = (self.settings.group,)  # it failed here, and nobody's connection broke
        self._record.failed()
        self._fear(suspects)
        return local.Vote(
            epoch=self._plan.epoch,
            step=self.page.step,
            outcome="failed",
            attempt=self._attempt,
            error=str(error),
            suspects=suspects,
            echo=echo,
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
        self.page.waits(ANSWER)
        answer = self._client.call(message)
        while answer.verdict == "copy":
            self.page.waits(NOBODY)
            self._copy(standing=True)
            self.page.waits(ANSWER)
            answer = self._client.next_answer()
        self.page.waits(NOBODY)
        if answer.keep:
            self._enter("checkpoint", self.page.step, expected_s=self.settings.timeouts.stop_deadline_s)
            for watcher in self._watchers:
                watcher.keeps(answer.reason)
        return answer

    def _copy(self, standing: bool = False) -> None:
        start = time.monotonic()
        if self._entries.copy() and standing:
            self._entries.settle()
        self._record.copied(self.page.step, time.monotonic() - start)

    def _stop(self, answer: local.Answer) -> None:
        if answer.ok:
            say(f"lightkeeper: the job ends: {answer.reason}")
            self.page.enter("ended", self.page.step)  # an interpreter may take its time over its end
            raise SystemExit(0)
        raise JobStopped(f"the job stops: {answer.reason}")

    # ------------------------------------------------------------ recovery and planned changes

    def _recover(self, answer: local.Answer) -> str:
        """Follows plans until one holds: "committed" (an entry was adopted) or "again" (reduce anew)."""
        assert self._reducer is not None
        while True:
            assert answer.plan is not None
            plan = answer.plan
            self._plan = plan
            if self._step is not None:
                self._step.lead = plan.leads  # the one that led may be the one that was lost
            self._enter("recover", self.page.step)
            self._reducer.retry()
            self._attempt, self._ready = 0, 0  # what was prepared on the epoch that failed is void
            self._suspects = None
            try:
                self._together(self._take_up)
                if plan.adopt is None:
                    return "again"
                self._adopt(plan.adopt)
                vote = self._vote_for("adopted")
            except (GroupFailed, TransferFailed) as error:
                vote = self._failed_vote(error)
            next_answer = self._call(vote)
            if next_answer is None:
                return "committed"
            answer = next_answer

    def _take_up(self) -> None:
        """Takes the plan's epoch up: its group, and what a step that is done in it needs first."""
        assert self._plan is not None and self._reducer is not None
        self._group = self._taken(self._plan.epoch)
        self._reducer.attach(self._group)
        self._epochs.drop(self._plan.epoch)
        if self._plan.adopt is None:
            self._share = self._plan.share
            self._reduce_before()

    def _taken(self, epoch: int) -> EpochGroup:
        """An epoch's group, once its members have connected."""
        with self.page.waiting(PEERS):
            group = self._epochs.take(epoch)
        return ShownGroup(group, self.page.waiting, OTHERS)

    def _together(self, do: Callable[[], None]) -> None:
        """Does what all ranks of this group must have done before one of them goes on in the plan's epoch.

        Raises:
            GroupFailed: here, or in another rank; or another rank knows a newer epoch.
        """
        assert self._plan is not None and self._within is not None and self._reducer is not None
        if self.page.step == self._until and not self._cancels:
            do()  # the run is being closed: nothing is computed any more
            return
        failure: GroupFailed | None = None
        try:
            do()
        except GroupFailed as error:
            failure = error
        together = self._within.together(self._plan.epoch, failure is None)
        if failure is not None:
            raise failure
        if not together:
            raise NotTogether(f"another rank of this group does not go on in epoch {self._plan.epoch}")
        if self._before.reduced(self.page.step, self._plan.epoch):
            self._before.add_up(self._within)
            self._reducer.keep(self._before.values or {})

    def _start_step(self) -> None:
        """Has the before extras of the step at hand, in whatever epoch that becomes."""
        assert self._plan is not None
        if not self._before.due(self.page.step, self._plan.epoch):
            return
        try:
            self._together(self._reduce_before)
        except GroupFailed as error:
            if error.local:
                raise
            answer = self._call(self._failed_vote(error))
            assert answer is not None, "a step was committed that this group had not begun"
            adopted = self._recover(answer) == "committed"
            assert not adopted, "a step was committed without this group"

    def _reduce_before(self) -> None:
        """Reduces the before extras of the step at hand, once in every epoch that does it."""
        assert self._plan is not None
        index, epoch, phase = self.page.step, self._plan.epoch, self.page.phase
        total = self._planned(index) if self._cancels else self._total(index)
        if not total or not self._before.due(index, epoch):
            return
        assert self._group is not None and self._reducer is not None
        self._before.count(self._share, lambda k: seed_microbatch(self.seed, index, k, self.place.index))
        self._enter("before", index)
        self._record.stands()
        device = self._parameters[0][1].device
        self._before.reduce(self._group, epoch, total, self.settings.timeouts.reduce_timeout_s, device)
        self._enter(phase, index)

    def _adopt(self, adopt: local.Adopt) -> None:
        """Takes the entry that this group missed: from its own buckets if they hold it whole, else from the donor."""
        assert self._reducer is not None
        name, fetched = entry_of(adopt), 0
        if self._reduced_as == name:
            self._outcome = self._reducer.adopt()  # reduced here, though the group did not commit it
        else:
            self._reduced_as = None
            with self.page.waiting(PEERS):
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
        try:
            self._group = self._taken(epoch)
        except GroupFailed as error:
            self._group = Over(error)  # a recovery has ended it already: the next reduce says so
        self._suspects = None
        self._reducer.attach(self._group)
        self._epochs.retire(epoch, self.settings.timeouts.form_timeout_s)

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
        self._group.all_reduce(sums).wait(self.settings.timeouts.reduce_timeout_s)
        total, squares = sums.cpu().chunk(2)  # exact: the parts have 16 bits; only equal ones make these two equal
        if not torch.equal(total * total, squares * self._group.size):
            self._record.diverged(self.page.step, digest)

    # ------------------------------------------------------------ who reads data ahead

    def watch(self, watcher: Watcher) -> None:
        """Tells a data loader from now on what this rank is dealt and what was committed; see `Watcher`."""
        self._watchers.append(watcher)

    def total(self, index: int) -> int:
        """Microbatches of a step over all groups; 0 once the run is at its end."""
        return self._total(index)

    @property
    def steady_total(self) -> int | None:
        """Microbatches of every step, if that is a number; None for a function of the step."""
        return None if callable(self._microbatches) else self._microbatches

    def expected_share(self, index: int) -> tuple[int, ...]:
        """Microbatches that this group has still to compute in a step: known of the step at hand, of a later one a
        guess by the membership in force. On the training thread.
        """
        if self._step is not None and self._step.index == index:
            return self._step.share()
        plan = self._plan
        return () if plan is None or self._follows else probable_share(plan, self._total(index))

    def feared_share(self) -> tuple[int, ...]:
        """Further microbatches of the step at hand that may fall to this group; none while no peer is suspected."""
        plan, step, suspects = self._plan, self._step, self._suspects
        if plan is None or step is None or step.voted or suspects is None or self._follows:
            return ()
        return feared_share(plan, step.total, self._share, suspects)

    def _fear(self, suspects: tuple[str, ...]) -> None:
        self._suspects = suspects
        for watcher in self._watchers:
            watcher.feared()

    def _aborted(self, below: int, reason: str) -> None:
        """Epochs are over; called by the listening thread."""
        self._epochs.abort(below, reason)
        plan = self._plan
        if plan is not None and plan.epoch < below and self._suspects is None:
            self._fear(())

    # ------------------------------------------------------------ who keeps the state

    @property
    def registry(self) -> StateRegistry:
        """What belongs to the state."""
        return self._registry

    @property
    def state_name(self) -> Entry:
        """The newest entry in the state here."""
        return self._entries.newest

    @property
    def started(self) -> bool:
        """Whether the first step has begun."""
        return self._reducer is not None

    @property
    def incarnation(self) -> str:
        """Name of this start of the group."""
        return self._client.registered.incarnation

    @property
    def alone(self) -> bool:
        """Whether no other group is in the epoch: then what is committed is final."""
        return self._plan is not None and len(self._plan.members) == 1

    def note(self, event: Event) -> None:
        """Writes an event, if the run has a folder."""
        self._record.write(event)

    # ------------------------------------------------------------ small helpers

    def _total(self, index: int) -> int:
        if self._until is not None and index >= self._until:
            return 0
        return self._planned(index)

    def _planned(self, index: int) -> int:
        total = self._microbatches(index) if callable(self._microbatches) else self._microbatches
        if total < 1:
            raise UsageError(f"microbatches of step {index}: {total}; a step has at least one")
        return total

    @property
    def leads(self) -> bool:
        """Whether this group has the lowest slot, in the epoch that it knows; on all of its ranks."""
        return self._plan is not None and self._plan.leads

    def _begin_at(self, index: int) -> None:
        assert self._reducer is not None
        self._reducer.begin(index, self._total(index))
        self._sync.begin()
        self._attempt, self._outcome = 0, None
        self._record.begin()
        self._before.begin(index)

    def _enter(self, phase: str, index: int, microbatches: int = 0, expected_s: float = 0.0) -> None:
        self.page.enter(phase, index, microbatches, expected_s)
        self._injector.reached(phase, index, microbatches)

    def _signalled(self, number: signal.Signals) -> None:
        """Called in the signal's handler."""
        self._client.wish_to_leave(f"{number.name} to rank {self.rank}", notice=number == NOTICE)

    def _turned_away(self, line: str) -> None:
        self._record.turned_away(line)

    def _say(self, line: str) -> None:
        say(f"lightkeeper: {line}")
