"""How often, and how fast, things are started again, and when no further start makes sense. Pure."""

from __future__ import annotations

from typing import Any

from lightkeeper.supervisor.attribution import Blame
from lightkeeper.supervisor.jobfile import Budget


class Attempts:
    """The failures of one run, counted against its budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.count = self.job_restarts = 0
        self._failed_at = -1  # the newest committed step at the failure before
        self._idle = 0  # failures in a row without a further step
        self._alike: dict[tuple[str, int], list[str]] = {}  # where failures were for which no node is blamed

    def state(self) -> dict[str, Any]:
        """As JSON, for the next supervisor."""
        return {
            "count": self.count,
            "job_restarts": self.job_restarts,
            "failed_at": self._failed_at,
            "idle": self._idle,
            "alike": [[kind, step, where] for (kind, step), where in self._alike.items()],
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """What the supervisor before had counted."""
        self.count, self.job_restarts = state["count"], state["job_restarts"]
        self._failed_at, self._idle = state["failed_at"], state["idle"]
        self._alike = {(kind, step): list(where) for kind, step, where in state["alike"]}

    def failed(self, committed: int) -> None:
        """One more failure, when this step was the newest that is committed."""
        self.count += 1
        self._idle = self._idle + 1 if committed <= self._failed_at else 1
        self._failed_at = committed

    def alike(self, kind: str, step: int, where: str) -> None:
        """A failure for which no node is blamed."""
        self._alike.setdefault((kind, step), []).append(where)

    def hopeless(self, found: Blame, step: int, one_node: bool) -> str:
        """Why no further start makes sense after a group failed so; "" if it does.

        Args:
            found: whose fault it was.
            step: at which step.
            one_node: whether there is no other node to try.
        """
        if found.fatal:
            return f"it would only end so again ({found.kind})"
        where = self._alike.get((found.kind, step), [])
        elsewhere = len(set(where)) > 1 or one_node
        if found.whose != "node" and len(where) >= self.budget.same_failure and elsewhere:
            return f"the same failure ({found.kind}) at step {step} on {len(set(where))} nodes, {len(where)} times"
        if self.count > self.budget.attempts:
            return f"the budget of {self.budget.attempts} attempts is used up"
        return self.idle()

    def idle(self) -> str:
        """What is said of too many failures without progress; "" if they are not too many."""
        if self._idle <= self.budget.without_progress:
            return ""
        return f"{self._idle} attempts in a row brought no step beyond {self._failed_at}"

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row: not after the first, then twice as long each time."""
        if failures <= 1:
            return 0.0
        return min(self.budget.pause_s_max, self.budget.pause_s * 2.0 ** min(failures - 1, 30))

    def job_pause_s(self) -> float:
        """How long to wait before the whole job starts again."""
        return self.pause_s(self._idle)
