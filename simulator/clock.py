"""Simulated time: events in order, and processes that see time each by their own clock, and may stand still."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Event = Callable[..., None]


class Clock:
    """Events in order of time; all randomness of a history comes from its seed.

    Attributes:
        now: seconds since the history began.
        random: what the world draws from; the plan of faults has a generator of its own.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, Event, tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, event: Event, *arguments: Any) -> None:
        """Lets something happen in so many seconds."""
        self.at(self.now + delay_s, event, *arguments)

    def at(self, when: float, event: Event, *arguments: Any) -> None:
        """Lets something happen at a time; what is at the same time happens in the order of these calls."""
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, event, arguments))

    def uniform(self, low: float, high: float) -> float:
        """A number between two."""
        return low + (high - low) * self.random.random()

    def chance(self, probability: float) -> bool:
        """Whether something happens that does so with this probability."""
        return self.random.random() < probability

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self._queue:
            return False
        self.now, _, event, arguments = heapq.heappop(self._queue)
        self.events += 1
        event(*arguments)
        return True


class Process:
    """Something that can stand still and whose clock need not run like the world's.

    Attributes:
        alive: whether it exists.
        frozen_until: while the world's time is below, nothing happens in it; what arrives is kept.
        offset_s: its monotonic clock less the world's time.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive = True
        self.frozen_until = 0.0
        self.offset_s = 0.0
        self._kept: list[tuple[Event, tuple[Any, ...]]] = []  # what came while it stood still, in order
        self._thaws = False

    @property
    def now(self) -> float:
        """Its own monotonic seconds."""
        return self.clock.now + self.offset_s

    @property
    def frozen(self) -> bool:
        """Whether it stands still."""
        return self.clock.now < self.frozen_until

    def sleeps(self, event: Event, *arguments: Any) -> bool:
        """Whether it stands still; then the event is kept until it thaws."""
        if self.clock.now >= self.frozen_until and (self._thaws or not self._kept):
            return False
        if not self._kept:
            self.clock.at(self.frozen_until, self._thaw)
        self._kept.append((event, arguments))
        return True

    def _thaw(self) -> None:
        """What was kept happens now, in its order; unless something had it stand still for longer meanwhile."""
        if self.clock.now < self.frozen_until:
            self.clock.at(self.frozen_until, self._thaw)
            return
        kept, self._kept = self._kept, []
        self._thaws = True
        for event, arguments in kept:
            event(*arguments)
        self._thaws = False

    def freeze(self, seconds: float, unseen: bool = False) -> None:
        """Stands still for so long; unseen, as in a virtual machine that is paused, its clock stands still as well."""
        until = self.clock.now + seconds
        further_s = until - max(self.frozen_until, self.clock.now)
        if further_s > 0:
            self.frozen_until = until
            self.offset_s -= further_s if unseen else 0.0  # a clock never goes back
