"""When a manager beats: at its interval, and at once when it says something that others wait for.

In a large job the interval is seconds. What the lighthouse acts on cannot wait so long: that an epoch was taken up,
that a joiner has caught up, that a rank was stopped, and that the ranks stand in a reduce for longer than usual.
"""

from __future__ import annotations

from lightkeeper.lighthouse.messages import Beat

STANDS_S = 0.2
USUAL_TIMES = 1.5
USUAL_KEPT = 0.9  # of the longest standing, from step to step


class Beats:
    """What was said last, and how long this group's ranks stand when nothing is wrong."""

    def __init__(self) -> None:
        self._said: Beat | None = None
        self._said_s = 0.0
        self._step = 0
        self._longest_ms = 0
        self._usual_ms = 0.0

    def stood(self, step: int, waiting_ms: int) -> None:
        """How long the ranks have been standing in the reduce of this step."""
        if step != self._step:
            self._step, self._usual_ms = step, max(self._longest_ms, USUAL_KEPT * self._usual_ms)
            self._longest_ms = 0
        self._longest_ms = max(self._longest_ms, waiting_ms)

    @property
    def unusual_ms(self) -> float:
        """From how long on standing is longer than usual."""
        return USUAL_TIMES * self._usual_ms

    def due(self, beat: Beat, beat_s: float, now: float) -> bool:
        """Whether to say this now.

        Args:
            beat: what could be said.
            beat_s: the interval, in seconds.
            now: monotonic seconds.
        """
        said = self._said
        if said is None or now - self._said_s >= beat_s:
            return True
        if (said.epoch, said.phase == "follow", said.stopped_ms > 0, said.overdue is None) != (
            beat.epoch, beat.phase == "follow", beat.stopped_ms > 0, beat.overdue is None,
        ):  # fmt: skip
            return True
        stands = beat.waiting_ms >= max(1000 * STANDS_S, self.unusual_ms)
        return stands and not (said.waiting_ms > 0 and said.step == beat.step)

    def said(self, beat: Beat, now: float) -> None:
        """This was said."""
        self._said, self._said_s = beat, now

    def again(self) -> None:
        """Another lighthouse, or another stream, has heard nothing yet."""
        self._said = None

    def recovered(self) -> None:
        """A recovery ended the standing: it was not a usual one."""
        self._longest_ms = 0
