"""How long this rank takes for a microbatch, and waits in a step, as its manager is told: medians of the last few.

The time from one microbatch's start to the next one's, or to the reduce: data, forward and backward, and nothing of
what the rank waits for others. One slow microbatch (a garbage collection, a page that was swapped out) is none.
"""

from __future__ import annotations

import statistics
from collections import deque

KEPT = 20
ENOUGH = 8  # before that nothing is said


class Pace:
    """Seconds per microbatch. The first step is left out: it compiles, allocates, and warms caches."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._since: float | None = None
        self._first: int | None = None
        self._waited: deque[float] = deque(maxlen=ENOUGH)

    def begins(self, step: int, now: float) -> None:
        """A microbatch of this step begins; so the one before has ended. `now` is in seconds."""
        self.ends(now)
        self._first = step if self._first is None else self._first
        self._since = now if step != self._first else None

    def ends(self, now: float) -> None:
        """The last microbatch has ended, if one had begun."""
        if self._since is not None:
            self._kept.append(now - self._since)
        self._since = None

    @property
    def microbatch_us(self) -> int:
        """Microseconds per microbatch; 0 while too few are known."""
        return max(1, round(1e6 * statistics.median(self._kept))) if len(self._kept) >= ENOUGH else 0

    def waited(self, seconds: float) -> None:
        """In the step that was committed it waited for the others for so long."""
        self._waited.append(seconds)

    @property
    def wait_us(self) -> int:
        """Microseconds that it waits for the others in a step; 0 while too few are known."""
        return max(1, round(1e6 * statistics.median(self._waited))) if len(self._waited) == ENOUGH else 0
