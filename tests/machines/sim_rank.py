"""One trainer rank by script: what `manager/trainer.py` does, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim_reduce import Sum

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager import local

if TYPE_CHECKING:
    from sim_job import Job

MICROBATCH_S = (0.01, 0.05)


class Rank:
    """Computes, reduces, votes, and follows answers.

    Attributes:
        state: chain of the entries applied, each with its name and what it summed: equal states are equal weights.
        held: microbatches summed into the local gradient of the step in progress.
    """

    def __init__(
        self, job: Job, group: str, index: int, say: Callable[[local.FromRank], None], left: Callable[[int], None]
    ) -> None:
        self.job, self.group, self.index = job, group, index
        self._say, self._ended = say, left
        self.alive = True
        self.phase, self.since = "join", job.clock.now
        self.step = 0
        self.plan: local.Plan | None = None
        self.plans: dict[int, local.Plan] = {}
        self.below = 0
        self.share: tuple[int, ...] = ()
        self.ready = 0
        self.attempt = 0
        self.held: list[int] = []
        self.pending: tuple[Entry, Sum] | None = None
        self.newest: tuple[Entry, Sum] | None = None
        self.state: tuple[tuple[Entry, Sum], ...] = ()
        self._turn = 0

    # ------------------------------------------------------------ pushes and answers

    def receive(self, message: local.ToRank) -> None:
        if not self.alive:
            return
        if isinstance(message, local.Build):
            plan = message.plan
            kept = self.plans.setdefault(plan.epoch, plan)
            assert kept.members == plan.members, f"epoch {plan.epoch} means {kept.members} and {plan.members}"
            if plan.planned:
                self._later((0.01, 0.3), lambda: self._say(local.Built(epoch=plan.epoch)), bound=False)
        elif isinstance(message, local.Abort):
            for epoch in range(self.below, min(message.below, max(self.plans, default=0) + 1)):
                if epoch in self.plans:
                    self.job.net(self.plans[epoch], self.index).break_by(self.group)
            self.below = max(self.below, message.below)
            if self.phase in ("reduce", "closing") and self.plan is not None and self.plan.epoch < self.below:
                self._failed("aborted", "")
        elif isinstance(message, local.Answer):
            self._follow(message)

    def _follow(self, answer: local.Answer) -> None:
        assert self.phase in ("vote", "join"), f"{self.group} is answered in phase {self.phase}"
        if answer.verdict == "recover":
            assert answer.plan is not None and answer.plan.step == self.step
            self.plan, self.attempt, self.ready = answer.plan, 0, answer.ready
            self._enter("recover")
            if answer.plan.adopt is not None:
                self._later((0.001, 0.05), lambda: self._adopt(answer.plan.adopt))
            else:
                self.share = answer.plan.share
                self._compute()
        elif answer.verdict == "again":
            self.attempt += 1
            self._compute()
        elif answer.verdict == "stop":
            self._exit(0 if answer.ok and self.step == self.job.until else 6)
        else:
            self._commit(answer)

    def _commit(self, answer: local.Answer) -> None:
        assert self.pending is not None and self.plan is not None
        self.newest, self.pending = self.pending, None
        self.state = (*self.state, self.newest)
        self.job.checkers.committed(self)
        self.step, self.held, self.attempt = self.step + 1, [], 0
        self.share, self.ready = answer.share, answer.ready
        assert answer.step == self.step
        if answer.verdict == "leave":
            self._exit(0)
            return
        if answer.epoch != self.plan.epoch:
            self.plan = self.plans[answer.epoch]
        self._compute()

    # ------------------------------------------------------------ a step

    def _compute(self) -> None:
        further = [k for k in self.share if k not in self.held]
        self._enter("compute")
        low, high = (seconds * self.job.slowness for seconds in MICROBATCH_S)
        self._later((low * len(further), high * len(further) + 0.001), lambda: self._reduce(further))

    def _reduce(self, further: list[int]) -> None:
        assert self.plan is not None
        self.held += further
        closing = self.step == self.job.until
        self._enter("closing" if closing else "reduce")
        if self.plan.epoch < self.below:
            self._failed("the epoch is over", "")
            return
        again = not closing and self.attempt == 0 and self.job.clock.random.random() < self.job.again
        net = self.job.net(self.plan, self.index)
        turn = self._turn
        part = (tuple(self.held), self.ready, again)
        net.put(self.group, (self.step, self.attempt), part, lambda total, who: self._reduced(total, who, turn))

    def _reduced(self, total: Sum | None, suspect: str, turn: int) -> None:
        if not self.alive or turn != self._turn:
            return
        assert self.plan is not None
        if total is None or self.job.reduce_fails():
            self.job.net(self.plan, self.index).break_by(self.group)
            self._failed("connection closed by peer", suspect)
        elif self.step == self.job.until:
            self._vote("closed")
        elif total.again:
            self._vote("again")
        else:
            self.pending = (Entry(self._epoch(), self.step), total)
            self._vote("reduced", activates=total.ready)

    def _failed(self, error: str, suspect: str) -> None:
        self._vote("failed", error=error, suspects=(suspect,) if suspect else ())

    def _adopt(self, adopt: local.Adopt) -> None:
        name = Entry(Epoch(adopt.epoch, Term(adopt.term, adopt.lighthouse)), adopt.step)
        if self.pending is None or self.pending[0] != name:
            self.pending = self.job.fetch(adopt.donor, self.index, name)
        if self.pending is None:
            self._failed(f"fetching from {adopt.donor}: it is gone", adopt.donor)
        else:
            self._vote("adopted")

    def _vote(self, outcome: str, **more: object) -> None:
        assert self.plan is not None
        self._enter("vote")
        following = 0 if outcome == "closed" else self.job.total(self.step + 1)
        vote = local.Vote(
            epoch=self.plan.epoch, step=self.step, outcome=outcome, attempt=self.attempt, next_total=following, **more
        )  # fmt: skip
        self._later((0.0002, 0.005), lambda: self._say(vote))

    # ------------------------------------------------------------ inside

    def _epoch(self) -> Epoch:
        assert self.plan is not None
        return Epoch(self.plan.epoch, Term(self.plan.term, self.plan.lighthouse))

    def _enter(self, phase: str) -> None:
        self.phase, self.since = phase, self.job.clock.now
        self._turn += 1

    def _later(self, between: tuple[float, float], event: Callable[[], None], bound: bool = True) -> None:
        """Does something in a while, unless the rank has died or (if bound) gone on to something else."""
        turn = self._turn

        def run() -> None:
            if self.alive and (not bound or turn == self._turn):
                event()

        self.job.clock.after(self.job.clock.uniform(*between), run)

    def _exit(self, code: int) -> None:
        self._enter("ended")
        self.die(code, after_all=code == 0)

    def die(self, code: int, after_all: bool = False) -> None:
        """The process ends and its connections close; after the last reduce of a run nobody misses them."""
        if not self.alive:
            return
        self.alive = False
        if not after_all:
            for plan in self.plans.values():
                self.job.net(plan, self.index).break_by(self.group)
        self._ended(code)
