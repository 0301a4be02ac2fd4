"""How long a rank may do nothing new before it is held to be stuck: learnt from what the group's ranks have done.

A night nurse who knows that the patient in bed four sleeps for eight hours does not ring the bell after one. What takes
long here is learnt here: in each phase, and in a whole step. What a loop declares (`Manager.expect`) needs no learning.
And the bell is rung late rather than early: a rank that is wrongly called stuck costs a heal, one that is called so
seconds later costs seconds.

Rejected: one time-out for all phases (the first step compiles, an evaluation takes as long as fifty steps); a deadline
below the floor, since ten seconds of a held interpreter lock (a large allocation, a page cache being written back) are
none of anybody's business.

Pure: what ranks do and the time come in, who is overdue comes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightkeeper.lighthouse.messages import Overdue
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.progress import EXPECTED

OF_PHASE = 10.0  # times the longest in that phase lately
OF_STEP = 3.0  # times the longest that a step took
STEPS_KEPT = 50
MANY = 5
STANDSTILL_S = 2.0  # between two looks
TOLD_FACTOR = 1.5  # deadlines are told again when one has changed by so much


@dataclass(slots=True)
class _Rank:
    """What is known of a rank since it was seen first.

    Attributes:
        view: what it did when it was last looked at.
        busy_s: for how long it has been at work in the step at hand, without what was declared.
        steps: how many it has done since it is known what a microbatch takes there.
    """

    view: RankView
    seen: float
    busy_s: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class Deadlines:
    """The deadlines of one group.

    Args:
        floor_s: no deadline is shorter.
        first_s: that of a first step, and of a declared phase that was never seen; none that is learnt is longer.

    Attributes:
        longest_step_s: the longest that a rank was at work in a step.
    """

    floor_s: float
    first_s: float
    longest_step_s: float = 0.0
    _longest: dict[str, deque[float]] = field(default_factory=dict)  # by phase, of the last steps that had it
    _step: dict[str, float] = field(default_factory=dict)  # by phase, in the step at hand
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _told: dict[str, float] = field(default_factory=dict)
    _looked: float | None = None
    _awake: float = 0.0

    def look(self, views: Mapping[int, RankView], now: float) -> list[Overdue]:
        """Learns from what the ranks do now; who is overdue, the longest first.

        Args:
            views: what each rank does.
            now: monotonic seconds; a look should follow the last within a fraction of a second.
        """
        found = []
        if self._looked is not None and now - self._looked > STANDSTILL_S:
            self._awake = now  # this process itself stood still, and so may all of them have
        self._looked = now
        for rank, view in sorted(views.items()):
            view = replace(view, idle_s=min(view.idle_s, now - self._awake)) if self._awake else view
            self._learn(rank, view, now)
            deadline_s = self.of(rank, view)
            if view.stopped_s == 0.0 and view.idle_s > deadline_s:
                found.append(Overdue(rank, view.phase, round(1000 * view.idle_s), round(1000 * deadline_s), view.step))
        return sorted(found, key=lambda overdue: (-overdue.idle_ms, overdue.rank))

    def of(self, rank: int, view: RankView) -> float:
        """How long this rank may do nothing new where it is, in seconds."""
        if view.expected_s:
            return max(self.floor_s, view.expected_s)
        known = self._ranks.get(rank)
        lately = self._lately(view.phase)
        if known is None or known.steps == 0 or (view.phase in EXPECTED and not lately):
            return self.first_s
        learnt_s = max(OF_PHASE * (lately[-1] if lately else 0.0), OF_STEP * self.longest_step_s)
        return min(self.first_s, max(self.floor_s, learnt_s))

    def how(self, rank: int, view: RankView) -> str:
        """How that came about, in words."""
        if view.expected_s:
            return "declared"
        if self.of(rank, view) == self.first_s:
            return "nothing is learnt yet"
        return f"learnt from {max(known.steps for known in self._ranks.values())} steps"

    def news(self) -> dict[str, float] | None:
        """The deadlines by phase, in seconds, once a step has been learnt and when one has changed much; else None."""
        rank = next((r for r, known in self._ranks.items() if known.steps), None)
        if rank is None or not (self._longest or self._step):
            return None
        now = {
            phase: self.of(rank, RankView(phase, 0, 0.0, 0.0))
            for phase in sorted({"compute", "reduce", *self._longest})
        }
        if all(_alike(self._told.get(phase, 0.0), deadline_s) for phase, deadline_s in now.items()):
            return None
        self._told = now
        return now

    def _lately(self, phase: str) -> list[float]:
        """How long the ranks have been in a phase in the last steps that had it, without the longest if there are many:
        one hiccup is no habit.
        """
        lately = sorted(self._longest.get(phase, ()))
        return lately[:-1] if len(lately) >= MANY and phase not in EXPECTED else lately

    def _learn(self, rank: int, view: RankView, now: float) -> None:
        known = self._ranks.setdefault(rank, _Rank(view, now))
        before, gap_s = known.view, now - known.seen
        known.view, known.seen = view, now
        if view.step < before.step or view.phase in ("join", "heal"):
            known.busy_s, known.steps = 0.0, 0  # it begins anew, with another state
            return
        if view.step > before.step:
            self.longest_step_s = max(self.longest_step_s, known.busy_s)
            if view.microbatch_us:  # else it came here by a copy or by entries, or is a spare: it has computed nothing
                known.steps += view.step - before.step
            known.busy_s = 0.0
            for phase, longest_s in self._step.items():
                self._longest.setdefault(phase, deque(maxlen=STEPS_KEPT)).append(longest_s)
            self._step = {}
        if view.idle_s and not view.stopped_s:
            self._step[view.phase] = max(self._step.get(view.phase, 0.0), view.idle_s)
            if not view.expected_s:
                known.busy_s += min(gap_s, view.idle_s)


def _alike(one: float, other: float) -> bool:
    return one > 0.0 and max(one, other) / min(one, other) < TOLD_FACTOR
