"""Simulated time, and streams between two processes: ordered, delayed, and lost with all that is under way."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Clock:
    """Events in order of time; all randomness of a history comes from its seed."""

    def __init__(self, seed: int) -> None:
        self.now = 100.0
        self.random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def at(self, when: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def uniform(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


class Way:
    """One direction of a stream: messages arrive in order, after a delay each, unless it breaks."""

    def __init__(self, clock: Clock, deliver: Callable[[Any], None]) -> None:
        self._clock, self._deliver = clock, deliver
        self._last = 0.0
        self.broken = False

    def send(self, message: Any) -> None:
        if self.broken:
            return
        self._last = max(self._last, self._clock.now + self._clock.uniform(0.0005, 0.02))
        self._clock.at(self._last, lambda: None if self.broken else self._deliver(message))

    def finish(self, then: Callable[[], None]) -> None:
        """Calls `then` after all that was sent before has arrived."""
        self._clock.at(max(self._last, self._clock.now), then)
