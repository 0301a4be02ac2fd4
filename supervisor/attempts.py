"""How often, and how fast, things are started again, and when no further start makes sense. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightkeeper.supervisor.attribution import Blame
from lightkeeper.supervisor.jobfile import Budget


@dataclass
class Alike:
    """Failures of one kind at one step.

    Attributes:
        rounds: how often, those that came together counted once.
        starts: how many starts there had been at the newest of them.
        where: on which nodes.
    """

    rounds: int = 0
    starts: int = 0
    where: set[str] = field(default_factory=set)


class Attempts:
    """The failures of one run, counted against its budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.count = self.job_restarts = 0
        self._failed_at = -1  # the newest committed step at the failure before
        self._idle = 0  # failures in a row without a further step
        self._idle_starts = 0  # how many starts there had been at the newest of them
        self._starts = 0
        self._alike: dict[tuple[str, int], Alike] = {}  # failures for which no node is blamed

    def state(self) -> dict[str, Any]:
        """As JSON, for the next supervisor."""
        return {
            "count": self.count,
            "job_restarts": self.job_restarts,
            "failed_at": self._failed_at,
            "idle": self._idle,
            "idle_starts": self._idle_starts,
            "starts": self._starts,
            "alike": [[*key, one.rounds, one.starts, sorted(one.where)] for key, one in self._alike.items()],
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """What the supervisor before had counted."""
        self.count, self.job_restarts = state["count"], state["job_restarts"]
        self._failed_at, self._idle, self._idle_starts = state["failed_at"], state["idle"], state["idle_starts"]
        self._starts = state["starts"]
        self._alike = {(kind, step): Alike(rounds, starts, set(w)) for kind, step, rounds, starts, w in state["alike"]}

    def failed(self, committed: int, start: int) -> None:
        """One more failure, of the start of this number, when this step was the newest that is committed."""
        self.count += 1
        if committed > self._failed_at:
            self._idle = 0
        if start > self._idle_starts or not self._idle:  # groups that fail together fail once
            self._idle += 1
            self._idle_starts = self._starts
        self._failed_at = committed

    def started(self) -> int:
        """A group is started; the number of that start."""
        self._starts += 1
        return self._starts

    def alike(self, kind: str, step: int, where: str, start: int) -> None:
        """A failure for which no node is blamed, of the start of this number.

        Groups that fail together fail once: only one that was started after the failure before it counts again.
        """
        one = self._alike.setdefault((kind, step), Alike())
        one.where.add(where)
        if start > one.starts:
            one.rounds += 1
            one.starts = self._starts

    def hopeless(self, found: Blame, step: int, one_node: bool) -> str:
        """Why no further start makes sense after a group failed so; "" if it does.

        Args:
            found: whose fault it was.
            step: at which step.
            one_node: whether there is no other node to try.
        """
        if found.fatal:
            return f"it would only end so again ({found.kind})"
        alike = self._alike.get((found.kind, step), Alike())
        elsewhere = len(alike.where) > 1 or one_node
        if found.whose != "node" and alike.rounds >= self.budget.same_failure and elsewhere:
            return f"the same failure ({found.kind}) at step {step} on {len(alike.where)} nodes, {alike.rounds} times"
        if self.count > self.budget.attempts:
            return f"the budget of {self.budget.attempts} attempts is used up"
        return self.idle()

    def idle(self) -> str:
        """What is said of too many failures without progress; "" if they are not too many."""
        if self._idle <= self.budget.without_progress:
            return ""
        further = f"no step beyond {self._failed_at}" if self._failed_at >= 0 else "no step at all"
        return f"{self._idle} attempts in a row brought {further}"

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row: not after the first, then twice as long each time."""
        if failures <= 1:
            return 0.0
        return min(self.budget.pause_s_max, self.budget.pause_s * 2.0 ** min(failures - 1, 30))

    def job_pause_s(self) -> float:
        """How long to wait before the whole job starts again."""
        return self.pause_s(self._idle)
