"""Whether a launcher starts its group again, and when: a pure function of how the group ended and of the time.

A group that was killed, left out or lost its manager starts again: it heals, and the job needs it. One that ended by
its script's own word, was refused, gave up or was asked to end does not: it would only end so again. What keeps dying
is not started for ever. The lighthouse holds such a group back too, longer each time, so the pause here stays short.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from lightkeeper.manager import exits

GOOD_S = 600.0  # a group that ran for so long has its restarts back
AT_ONCE = 2  # so many restarts come without a pause
PAUSE_S_MAX = 30.0
ASKS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class GroupEnd:
    """How one start of the group ended.

    Attributes:
        code: exit code of the group.
        first: what the first of its ranks that ended before the group did ended with, negative for a signal; None if
            there was none.
        asked: whether somebody asked the group to leave.
    """

    code: int
    first: int | None = None
    asked: bool = False

    @property
    def by_signal(self) -> int:
        """The signal by which a rank ended the group, or 0."""
        return -self.first if self.first is not None and self.first < 0 and self.code == 128 - self.first else 0


class Restarts:
    """Counts them.

    Args:
        allowed: how many there may be without `GOOD_S` good seconds in between.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed, self.used = allowed, 0

    @property
    def left(self) -> int:
        """How many are left."""
        return self.allowed - self.used

    def after(self, end: GroupEnd, ran_s: float) -> float | None:
        """Decides on the next start, and counts it.

        Args:
            end: how the group ended.
            ran_s: for how many seconds it had run.

        Returns:
            Seconds to wait before it; None if the group is not started again.
        """
        if not may_restart(end):
            return None
        if ran_s >= GOOD_S:
            self.used = 0
        if self.left <= 0:
            return None
        self.used += 1
        return 0.0 if self.used <= AT_ONCE else min(PAUSE_S_MAX, 2.0 ** (self.used - AT_ONCE - 1))


def may_restart(end: GroupEnd) -> bool:
    """Whether a group that ended so is of use to the job when it comes back."""
    if end.asked:
        return False
    if end.code in (exits.FENCED, exits.ORPHANED):
        return True
    return end.by_signal != 0 and end.by_signal not in ASKS
