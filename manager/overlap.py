"""When a bucket may be reduced while the backward pass still runs: learnt from how often hooks fire.

A parameter's hook may fire several times in a microbatch (chunked loss, reentrant checkpointing), once, or
never (unused). Nothing says in advance how often, so the first steps only count. From then on a bucket is
ready when each of its parameters has fired as often, in the last microbatch, as in the steps before. A wrong
guess is never wrong in its sums: a firing that comes too late makes all members reduce again, and the
learning starts over with a longer look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW_FIRST = 2  # steps that are only counted
WINDOW_MAX = 64


class Overlap:
    """Counts firings, and says when a bucket is ready.

    Args:
        bucket_of: For every parameter, the index of its bucket.
        buckets: Number of buckets.
    """

    def __init__(self, bucket_of: Sequence[int], buckets: int) -> None:
        self._bucket_of = bucket_of
        self._buckets = buckets
        self._window = WINDOW_FIRST
        self._history: deque[list[int]] = deque(maxlen=self._window)
        self._learnt: list[int] | None = None
        self._counts = [0] * len(bucket_of)
        self._missing = [0] * buckets
        self._last = False
        self._fired = False

    @property
    def learnt(self) -> bool:
        """Whether buckets may be launched from hooks now."""
        return self._learnt is not None

    @property
    def expects_firings(self) -> bool:
        """Whether some parameter has fired in every step that is remembered."""
        return any(min(counts) > 0 for counts in zip(*self._history, strict=True)) if self._history else False

    @property
    def fired_in_step(self) -> bool:
        """Whether any hook fired in this step."""
        return self._fired

    def begin_step(self) -> None:
        """A new step: nothing has fired."""
        self._fired = self._last = False

    def begin_microbatch(self, last: bool) -> None:
        """A microbatch starts; `last` if no other is known to follow in this step."""
        self._counts = [0] * len(self._bucket_of)
        self._last = last
        if last and self._learnt is not None:
            self._missing = [0] * self._buckets
            for i, count in enumerate(self._learnt):
                self._missing[self._bucket_of[i]] += count > 0

    def fire(self, i: int) -> None:
        """The hook of parameter `i` fired."""
        self._fired = True
        self._counts[i] += 1
        if self._last and self._learnt is not None and self._counts[i] == self._learnt[i]:
            self._missing[self._bucket_of[i]] -= 1

    def ready(self, bucket: int) -> bool:
        """Whether every parameter of `bucket` has fired as often as learnt, in the last known microbatch."""
        return self._last and self._learnt is not None and self._missing[bucket] == 0

    def stop(self) -> None:
        """No bucket is ready any more in this microbatch."""
        self._last = False

    def end_step(self, computed: bool) -> None:
        """The step is committed; learn from its last microbatch if this member `computed` one."""
        if computed:
            self._history.append(self._counts)
            if len(self._history) == self._window:
                self._learnt = [max(counts) for counts in zip(*self._history, strict=True)]
        self._last = False

    def forget(self) -> None:
        """A firing came after its bucket was launched: look again, twice as long."""
        self._window = min(2 * self._window, WINDOW_MAX)
        self._history = deque(maxlen=self._window)
        self._learnt = None
        self._last = False
