"""When the next checkpoint is due: after so many steps, after so many seconds, or as often as it pays.

How often it pays is Young's first-order formula, the square root of 2 x cost x mean time between failures (J. W.
Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974). The
cost is what a save was seen to cost training: how much longer the steps beside it took. A failure is one that needs a
disk: a whole-job restart, not a group that its peers heal.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

FIRST_S = 60.0  # of training before the first save whose cost is not known
SHORTEST_S = 10.0
BESIDE_MAX = 0.5  # of the time, at most, a save is under way
USUAL_STEPS = 32
RETRY_S, RETRY_S_MAX = 1.0, 300.0
_DOUBLINGS_MAX = 30  # beyond it the power is no float any more some day


def interval_s(cost_s: float, failures: int, trained_s: float, mtbf_s: float) -> float:
    """Young's interval, in seconds.

    Args:
        cost_s: what one save costs training.
        failures: that were seen.
        trained_s: seconds of training in which they were.
        mtbf_s: mean time between failures as it is held to be before any was seen; counts as one failure in that time.
    """
    between_s = (mtbf_s + trained_s) / (1 + failures)
    return math.sqrt(2 * max(cost_s, 1e-3) * between_s)


@dataclass
class Cost:
    """What saving costs training, by the seconds that steps take."""

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_STEPS))
    _beside_s: float = 0.0
    seconds: float | None = None  # of the newest save; None before the first one

    def step(self, took_s: float, beside: bool) -> None:
        """A step took so long; `beside` says whether a save was under way."""
        if not beside:
            self.usual.append(took_s)
        elif self.usual:
            self._beside_s += max(0.0, took_s - median(self.usual))

    def saved(self) -> None:
        """A save has ended."""
        self.seconds, self._beside_s = self._beside_s, 0.0


@dataclass
class Cadence:
    """When a save is due.

    Attributes:
        every: steps; 0: not by steps.
        every_s: seconds; 0: not by seconds. Neither: as often as it pays.
        mtbf_s: see `interval_s`.
        failures: whole-job restarts so far.
        trained_s: seconds of training before this start.
        saved_step: steps behind the newest checkpoint, or behind the state that the run began with.
        saved_at: when that was.
        began_at: when this start began to train.
        begun_step: steps behind the state whose save was begun last, -1 if that failed.
        begun_at: when that was.
        write_s: seconds that the newest save took.
        cost: what saves cost.
        failed: failures in a row.
    """

    every: int = 0
    every_s: float = 0.0
    mtbf_s: float = 8 * 3600.0
    failures: int = 0
    trained_s: float = 0.0
    saved_step: int = 0
    saved_at: float = 0.0
    began_at: float = 0.0
    begun_step: int = -1
    begun_at: float = 0.0
    write_s: float = 0.0
    cost: Cost = field(default_factory=Cost)
    failed: int = 0
    _retry_at: float = 0.0

    def interval_s(self, now: float) -> float:
        """Seconds between two saves, where steps do not say."""
        if self.every_s:
            return self.every_s
        if self.cost.seconds is None:
            return FIRST_S
        trained_s = self.trained_s + now - self.began_at
        best_s = interval_s(self.cost.seconds, self.failures, trained_s, self.mtbf_s)
        return max(best_s, SHORTEST_S, self.write_s / BESIDE_MAX)

    def due(self, step: int, now: float) -> bool:
        """Whether the state with so many steps behind it is to be saved."""
        newest = max(self.saved_step, self.begun_step)
        if step <= newest or self.rests(now):
            return False
        if self.every:
            return step // self.every > newest // self.every
        return now - max(self.saved_at, self.begun_at) >= self.interval_s(now)

    def rests(self, now: float) -> bool:
        """Whether the last save failed, and it is too early to try again."""
        return bool(self.failed) and now < self._retry_at

    def by_steps(self, step: int) -> bool:
        """Whether it is due by steps alone, whatever failed."""
        return step // self.every > self.saved_step // self.every

    def begins(self, step: int, now: float) -> None:
        """A save of this step is under way; the next one is counted from it."""
        self.begun_step, self.begun_at = step, now

    def saved(self, step: int, write_s: float, now: float) -> None:
        """A save of this step is committed; its copy was made `write_s` or more before now."""
        self.saved_step, self.saved_at = max(step, self.saved_step), now - write_s
        self.write_s, self.failed = write_s, 0
        self.cost.saved()

    def fails(self, now: float) -> float:
        """A save failed; returns the seconds until it is tried again."""
        wait_s = min(RETRY_S * 2.0 ** min(self.failed, _DOUBLINGS_MAX), RETRY_S_MAX)
        self.failed += 1
        self._retry_at = now + wait_s
        self.begun_step, self.begun_at = -1, 0.0
        return wait_s
