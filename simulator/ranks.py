"""One trainer rank by script: what ``manager/trainer.py`` and ``manager/rank.py`` do, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager import exits, local
from lightkeeper.manager.pace import Pace
from lightkeeper.manager.progress import STANDING
from lightkeeper.simulator.clock import Process
from lightkeeper.simulator.collectives import Net
from lightkeeper.simulator.holder import Holder, Never
from lightkeeper.simulator.state import BEFORE, Part, Reduced, State

if TYPE_CHECKING:
    from lightkeeper.simulator.groups import GroupProcess

SAY_S = (0.0002, 0.005)
FETCH_S = (0.001, 0.05)
APPLY_S = (0.001, 0.005)
Answered = Callable[[local.Answer], None]


class Rank(Process):
    """Computes, reduces, votes, and follows answers.

    Attributes:
        phase: what it does, in the words of its progress page; since when is in `since`.
        step: the step at hand.
        state: what was applied up to now.
        below: epochs below this number are over.
        held: microbatches summed into the local gradient of the step at hand.
        before: the before extras of the step at hand, 0 if they are not known; reduced in epoch `before_in`.
        used: those that what is held was computed with.
        pending: the entry that the buffers hold, reduced or fetched, until it is committed.
    """

    def __init__(self, group: GroupProcess, index: int) -> None:
        super().__init__(group.clock, f"{group.group}/{index}")
        self.group, self.world, self.index = group, group.world, index
        self.phase, self.since = "join", self.clock.now
        self.state = self.world.checkpoints.of(group.group)
        self.step = self.state.step + 1
        self.plan: local.Plan | None = None
        self.plans: dict[int, local.Plan] = {}
        self.nets: dict[int, Net] = {}
        self.below = 0
        self.share: tuple[int, ...] = ()
        self.ready = 0
        self.attempt = 0
        self.held: list[int] = []
        self.before, self.before_in = 0, 0
        self.used: frozenset[int] = frozenset()
        self.pending: Reduced | None = None
        self.holder = Holder(self.world.shape.kept_max)
        self.slow_s = 0.0
        self.pace = Pace()
        self.slow_until = 0.0
        self.stalled_until = 0.0  # while the world's time is below, it does nothing, and is not stopped
        self.last_push_s = 0.0  # when the newest message of its manager arrives: its socket keeps their order
        self.source = local.Source(step=0, donors=())
        self._then: Answered | None = None
        self._turn = 0

    @property
    def stood_still_at(self) -> float:
        """Until when it stood still last, or took long over one step, for whatever reason; in the world's time."""
        return max(self.frozen_until, self.stalled_until, self.slow_until, self.group.frozen_until)

    @property
    def shown_phase(self) -> str:
        """What its page would show."""
        return "recover" if self.phase in ("form", "adopt") else self.phase

    def stall(self, seconds: float) -> None:
        """Does nothing for so long, and lives."""
        self.freeze(seconds)
        self.stalled_until = max(self.stalled_until, self.clock.now + seconds)

    # ------------------------------------------------------------ what the manager says

    def receive(self, message: local.ToRank) -> None:
        """A message of the manager."""
        if not self.alive or self.sleeps(self.receive, message):
            return
        if isinstance(message, local.Answer):
            self._answered(message)
        elif isinstance(message, local.Build):
            self._build(message.plan)
        elif isinstance(message, local.Abort):
            self._abort(message.below)
        elif isinstance(message, local.Touch):
            self.holder.wanted = True
        elif isinstance(message, local.Instead):
            self.source = message.source
        elif isinstance(message, local.Release):
            self.holder.release()

    def _answered(self, answer: local.Answer) -> None:
        then = self._then
        assert then is not None, f"{self.name} is answered {answer.verdict} in phase {self.phase}"
        if answer.verdict == "copy":
            self.holder.make_copy(self.state)  # the answer proper follows
            return
        self._then = None
        then(answer)

    def _build(self, plan: local.Plan) -> None:
        if plan.epoch < self.below or plan.epoch in self.nets:
            return
        net = self.world.net(plan, self.index)
        self.plans[plan.epoch], self.nets[plan.epoch] = plan, net
        net.arrive(self.group.group)
        if plan.planned:
            net.when_formed(self.group.group, lambda ok, _: self._built(plan.epoch, ok), self.group.form_timeout_s)

    def _built(self, epoch: int, formed: bool) -> None:
        if not self.alive or self.sleeps(self._built, epoch, formed):
            return
        if formed:
            self.group.from_rank(self.index, local.Built(epoch=epoch))
        elif epoch >= self.below:  # else a newer change replaces it
            self.group.from_rank(self.index, local.BuildFailed(epoch=epoch, error="a peer did not come"))

    def _abort(self, below: int) -> None:
        self.below = max(self.below, below)
        for epoch, net in self.nets.items():
            if epoch < below and not net.broken_by:
                net.break_by(self.group.group)
        if self.phase in (*STANDING, "form") and self._epoch_is_over():
            self._failed("aborted", "")

    # ------------------------------------------------------------ a step

    def begin(self) -> None:
        """The step at hand, as a member; after the last one the run is closed."""
        if self.step == self.world.shape.until:
            self._reduce_bucket("closing", 0)
            return
        assert self.plan is not None
        if self.world.shape.before and self.before_in != self.plan.epoch:
            self._reduce_bucket("before", BEFORE)
            return
        further = [k for k in self.share if k not in self.held]
        self.enter("compute")
        low, high = self.world.shape.microbatch_s
        each_s = self.clock.uniform(low, high) * self.group.slowness
        seconds = each_s * len(further) + 0.001 + self.slow_s
        if self.slow_s:
            self.slow_until = self.clock.now + seconds
        self.slow_s = 0.0
        for number in range(len(further)):
            self.pace.begins(self.step, self.clock.now + each_s * number)
        self.pace.ends(self.clock.now + each_s * len(further))
        self.later(seconds, self._reduce, further)

    def _reduce(self, further: list[int]) -> None:
        self.held += further
        if further and self.world.shape.before:
            self.used |= {self.before}
        self._reduce_bucket("reduce", 0)

    def _reduce_bucket(self, phase: str, bucket: int) -> None:
        self.enter(phase)
        assert self.plan is not None
        net = self.nets.get(self.plan.epoch)
        if net is None or self._epoch_is_over():
            self._failed("the epoch is over", "")
            return
        again = phase == "reduce" and self.attempt == 0 and bucket == 0 and self.clock.chance(self.world.shape.again)
        held = () if phase == "closing" or bucket else tuple(self.held)
        part = Part(held, self.ready, again, self.state, self.before, self.used)
        turn = self._turn
        key = (self.step, self.attempt, bucket)
        net.put(self.group.group, key, part, lambda total, who: self._reduced(total, who, turn, bucket))

    def _reduced(self, total: Reduced | None, suspect: str, turn: int, bucket: int) -> None:
        if not self.alive or self.sleeps(self._reduced, total, suspect, turn, bucket) or turn != self._turn:
            return
        assert self.plan is not None
        if total is None or self.world.reduce_fails():
            self.nets[self.plan.epoch].break_by(self.group.group)
            self._failed("connection closed by peer", suspect)
        elif self.phase == "closing":
            self.vote("closed")
        elif bucket == BEFORE:
            self.before, self.before_in = total.before, self.plan.epoch
            self.begin()
        elif bucket == 0 and self.world.shape.buckets > 1:
            self.holder.overwritten()
            self.pending = total
            self._reduce_bucket("reduce", 1)
        else:
            total = total if bucket == 0 else self.pending
            assert total is not None
            self.holder.overwritten()
            self.pending = total
            if total.again:
                self.vote("again")
            else:
                self.vote("reduced", activates=total.ready)

    def _failed(self, error: str, suspect: str) -> None:
        self.vote("failed", error=error, suspects=(suspect,) if suspect else ())

    def vote(self, outcome: str, activates: int = 0, error: str = "", suspects: tuple[str, ...] = ()) -> None:
        """The one call of a step."""
        assert self.plan is not None
        following = 0 if outcome == "closed" else self.world.total(self.step + 1)
        vote = local.Vote(
            epoch=self.plan.epoch, step=self.step, outcome=outcome, attempt=self.attempt, next_total=following,
            activates=activates, error=error, suspects=suspects,
        )  # fmt: skip
        self.ask(vote, self._on_vote)

    def ask(self, message: local.Ready | local.Vote, then: Answered, phase: str = "vote") -> None:
        """Sends what the manager answers; what follows is done with the answer."""
        self.enter(phase)
        self._then = then
        self.later(self.clock.uniform(*SAY_S), self.group.from_rank, self.index, message)

    def _on_vote(self, answer: local.Answer) -> None:
        verdict = answer.verdict
        if verdict in ("go", "leave"):
            self._commit(answer)
        elif verdict == "again":
            self.attempt += 1
            self.pending = None
            self.begin()
        elif verdict == "recover":
            self.recover(answer)
        else:
            self.stop(answer)

    def _commit(self, answer: local.Answer) -> None:
        entry = self.pending
        assert entry is not None and self.plan is not None, f"{self.name} commits nothing"
        self.pending = None
        self._apply(entry)
        self.share, self.ready = answer.share, answer.ready
        assert answer.step == self.step, f"{self.name} is at step {self.step} and told of {answer.step}"
        if answer.verdict == "leave":
            self._leave()
            return
        if answer.epoch != self.plan.epoch:
            self.switch(answer.epoch)
        self.later(self.clock.uniform(*APPLY_S), self._end_body, answer.copy)

    def _apply(self, entry: Reduced) -> None:
        before = self.state
        self.state = self.world.arithmetic.apply(before, entry)
        self.holder.committed(entry, before.name)
        self.world.checkers.committed(self, entry, before)
        self.step, self.held, self.attempt = self.step + 1, [], 0
        self._forget_before()

    def _end_body(self, copy: bool) -> None:
        self.holder.at_boundary()
        if copy:
            self.holder.make_copy(self.state)
        self.begin()

    # ------------------------------------------------------------ recovery and planned changes

    def recover(self, answer: local.Answer) -> None:
        """Follows a plan: fetches what was missed, then does the step anew."""
        plan = answer.plan
        assert plan is not None and plan.step == self.step, f"{self.name}: step {self.step}, {plan}"
        self.plan, self.attempt, self.ready = plan, 0, 0  # what was prepared on the epoch that failed is void
        self.enter("form")
        net = self.nets.get(plan.epoch)
        if net is None or plan.epoch < self.below:
            self._failed("the epoch is over", "")
            return
        turn = self._turn
        net.when_formed(self.group.group, lambda ok, who: self._formed(ok, who, turn), self.group.form_timeout_s)

    def _formed(self, formed: bool, suspect: str, turn: int) -> None:
        if not self.alive or self.sleeps(self._formed, formed, suspect, turn) or turn != self._turn:
            return
        assert self.plan is not None
        if not formed:
            self._failed("the epoch's group could not be formed", suspect)
            return
        self._drop(self.plan.epoch)
        if self.plan.adopt is None:
            self.share = self.plan.share
            self.begin()
        else:
            self.enter("adopt")
            self.later(self.clock.uniform(*FETCH_S), self._adopt, self.plan.adopt, self.clock.now)

    def _adopt(self, adopt: local.Adopt, since: float) -> None:
        """Takes the entry that this group missed: from its own buckets if they hold it whole, else from the donor."""
        name = Entry(Epoch(adopt.epoch, Term(adopt.term, adopt.lighthouse)), adopt.step)
        if self.pending is None or self.pending.name != name:
            self.pending = None
            donor = self.world.transfers.get(adopt.address)
            if donor is None or not self.world.reaches(self, donor):
                self._failed(f"fetching from {adopt.donor}: it is gone", "")
                return
            if donor.state.step < adopt.step and self.clock.now - since < self.group.form_timeout_s:
                self.later(0.02, self._adopt, adopt, since)  # its group has committed it and it has not heard yet
                return
            try:
                self.pending = donor.holder.entry(name)
            except Never as error:
                self._failed(f"fetching from {adopt.donor}: {error}", "")
                return
        self.world.checkers.adopted += 1
        self.vote("adopted")

    def switch(self, epoch: int) -> None:
        """A planned epoch came into force by the entry just committed; the one before is closed in the background."""
        self.plan = self.plans[epoch]
        for old in [number for number in self.nets if number < epoch]:
            self.nets.pop(old).close(self.group.group, lambda: None)

    def _drop(self, below: int) -> None:
        for old in [number for number in self.nets if number < below]:
            self.nets.pop(old).break_by(self.group.group)

    def _epoch_is_over(self) -> bool:
        return self.plan is not None and self.plan.epoch < self.below

    # ------------------------------------------------------------ ends

    def _leave(self) -> None:
        """The epoch's last reduce may not have completed everywhere: an empty one closes it."""
        self.enter("leave")
        turn = self._turn
        for net in self.nets.values():
            if not net.broken_by:
                net.close(self.group.group, lambda: self._left(turn))
        self.later(self.group.form_timeout_s, self._exit, 0)

    def _left(self, turn: int) -> None:
        if self.alive and turn == self._turn:
            self.later(0.001, self._exit, 0)

    def stop(self, answer: local.Answer) -> None:
        """The job ends."""
        assert answer.verdict == "stop", f"{self.name} is answered {answer.verdict}"
        if answer.keep and not answer.ok:
            self.enter("checkpoint")
            self.later(self.world.shape.save_s, self._has_kept, exits.STOPPED)
            return
        if answer.keep:
            self.world.checkers.kept(self)
        machine = self.group.machine
        let_in = machine.known is not None or machine.healed  # else what it has loaded is its own affair
        if answer.ok and self.step == self.world.shape.until and not self.group.dismissed and let_in:
            self.world.checkers.finished(self)
        self._exit(0 if answer.ok else exits.STOPPED)

    def _has_kept(self, code: int) -> None:
        """Its save is done."""
        self.world.checkers.kept(self)
        self._exit(code)

    def _exit(self, code: int) -> None:
        self.enter("ended")
        self.die(code)

    def die(self, code: int) -> None:
        """The process ends and its connections close; after the last reduce of a run nobody misses them."""
        if not self.alive:
            return
        self.alive = False
        self.holder.stopped = True
        self.world.transfers.pop(self.address, None)
        if self.phase != "ended":
            for net in self.nets.values():
                if not net.broken_by:
                    net.break_by(self.group.group)
        self.group.rank_ended(self.index, code)

    def raise_error(self) -> None:
        """The user's code raises: the interpreter says so, and ends a while later."""
        self.enter("raised")
        error = local.RankError(step=self.step, type="ValueError", message="injected", where="loop.py:1", traceback="")
        self.group.from_rank(self.index, error)
        self.later(self.clock.uniform(0.001, 0.5), self.die, 1)

    # ------------------------------------------------------------ inside

    @property
    def address(self) -> str:
        """Of its transfer server."""
        return f"{self.group.incarnation}:{self.index}"

    def enter(self, phase: str) -> None:
        """Goes on to something else: whatever was to follow before is void."""
        self.phase, self.since = phase, self.clock.now
        self._turn += 1

    def later(self, seconds: float, event: Callable[..., None], *arguments: object) -> None:
        """Does something in a while, unless the rank has died or gone on to something else."""
        self.clock.after(seconds, self._run, self._turn, event, arguments)

    def _run(self, turn: int, event: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self.alive and turn == self._turn and not self.sleeps(self._run, turn, event, arguments):
            event(*arguments)

    def _forget_before(self) -> None:
        self.before, self.before_in, self.used = 0, 0, frozenset()

    def set_state(self, state: State) -> None:
        """A joiner takes the members' state."""
        self.state, self.step = state, state.step + 1
        self.held, self.attempt, self.pending = [], 0, None
        self._forget_before()
