"""When a person is told of a run that is watched. Pure: facts and now in, alerts out.

Like a night watchman with a clock: he does not ask whether the lamps are lit (processes live, the scheduler says
running) but whether the work has moved since his last round. He tells once that it has not, and once that it has again.

`now` is a monotonic clock's, so a wall clock that jumps moves nothing; if the watchman himself slept, the time that he
slept is not held against the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightkeeper.supervisor.watch.digest import Facts

SETBACKS_MAX = 3  # restarts from a checkpoint that count as progress, until the run is further than it ever was
AGAIN_S_MAX = 600.0  # for how long one that ended badly may be begun again
SLEPT_FACTOR = 3.0  # a look that comes so many intervals late: we were stopped


@dataclass(frozen=True)
class Alert:
    """What a person is told: `what` as in a message, and one line."""

    what: str
    summary: str


class Watch:
    """One run.

    Args:
        stalled_after_s: for how long no step may be committed; None: as the run's own pace says.
        interval_s: between two looks.
        now: seconds, of a monotonic clock.
    """

    def __init__(self, stalled_after_s: float | None, interval_s: float, now: float) -> None:
        self._stalled_after_s, self._interval_s = stalled_after_s, interval_s
        self._moved = self._looked = now
        self._best = self._latest = self._lighthouse = -1
        self._setbacks = 0
        self._first = True
        self.stalled = False
        self._end, self._ended_at = "", now
        self.well = True

    def look(self, facts: Facts, now: float) -> list[Alert]:
        """What follows from one look."""
        now = max(now, self._looked)
        late = now - self._looked - SLEPT_FACTOR * self._interval_s
        if late > 0:
            self._moved += late
        self._looked = now
        alerts: list[Alert] = []
        moved = self._progress(facts)
        if moved:
            if self.stalled:
                alerts.append(Alert("goes_on", f"goes on after {duration(now - self._moved)}: {_where(facts)}"))
            self._moved, self.stalled = now, False
        if facts.end:
            if not self._end and not (self._first and facts.well):
                alerts.append(Alert("finished" if facts.well else "failed", facts.end))
            if not self._end:
                self._ended_at = now
            self.stalled = False
        else:
            if self._end:  # it was begun again: from now on it has its time
                self._moved = now
            alerts += self._silence(facts, now)
        self._end, self.well = facts.end, facts.well and not self.stalled
        self._first = False
        return alerts

    def over(self, now: float) -> bool:
        """Whether nothing more will come: it ended well, or badly and nobody began it again for ten minutes."""
        return bool(self._end) and (self.well or now - self._ended_at >= AGAIN_S_MAX)

    def _progress(self, facts: Facts) -> bool:
        """Whether a step was committed since the last look; a first look is none."""
        moved = False
        if facts.best > self._best:
            moved, self._setbacks = True, 0
        elif facts.latest != self._latest:
            self._setbacks += facts.latest < self._latest
            moved = self._setbacks <= SETBACKS_MAX
        if facts.lighthouse_step > self._lighthouse:
            moved = True
        self._best, self._latest = max(self._best, facts.best), facts.latest
        self._lighthouse = max(self._lighthouse, facts.lighthouse_step)
        return moved and not self._first

    def _silence(self, facts: Facts, now: float) -> list[Alert]:
        since_s = now - self._moved
        patience_s = self._stalled_after_s if self._stalled_after_s is not None else facts.patience_s
        if self.stalled or since_s < patience_s:
            return []
        self.stalled = True
        return [Alert("stalled", stalled_words(facts, since_s))]


def stalled_words(facts: Facts, since_s: float) -> str:
    """Since when nothing was committed, and whatever is known of why."""
    known = [
        facts.problem and f"its folder cannot be read: {facts.problem}",
        facts.waiting,
        facts.lighthouse,
        "; ".join(f"{group}: {words}" for group, words in sorted(facts.phases.items())),
    ]
    told = "; ".join(words for words in known if words) or "nobody says why"
    return f"no step was committed for {duration(since_s)}; {_where(facts)}; {told}"


def _where(facts: Facts) -> str:
    step = max(facts.latest, facts.lighthouse_step)
    return f"the last one is {step}" if step >= 0 else "none is known"


def duration(seconds: float) -> str:
    """``42 s``, ``7 min``, ``3 h 5 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def at_once(facts: Facts, wall: float, stalled_after_s: float | None) -> Alert | None:
    """What one look alone says, for cron: by the clocks of this machine and of the run's.

    Args:
        facts: of the run.
        wall: this machine's clock, in seconds since 1970.
        stalled_after_s: as for `Watch`.

    Returns:
        None if the run goes on.
    """
    if facts.end:
        return Alert("finished" if facts.well else "failed", facts.end)
    patience_s = stalled_after_s if stalled_after_s is not None else facts.patience_s
    since = max(facts.wall or facts.begun_wall, facts.again_wall)
    if facts.problem:
        return Alert("stalled", f"its folder cannot be read: {facts.problem}")
    if not since:
        return Alert("stalled", "no step was committed yet, and nothing says since when it runs")
    if wall - since < patience_s:
        return None
    return Alert("stalled", stalled_words(facts, wall - since))


def going_words(facts: Facts, wall: float) -> str:
    """How far a run is that goes on: its last step and how old that is, or for how long it has run without any.

    Args:
        facts: of the run.
        wall: as for `at_once`.
    """
    if facts.latest < 0:
        since = facts.again_wall or facts.begun_wall
        known = f"; the lighthouse says step {facts.lighthouse_step}" if facts.lighthouse_step >= 0 else ""
        return f"no step was committed yet{f'; it was started {_ago(since, wall)}' if since else ''}{known}"
    again = f"; it was started again {_ago(facts.again_wall, wall)}" if facts.again_wall > facts.wall else ""
    return f"the last step is {facts.latest}, {_ago(facts.wall, wall)}{again}"


def _ago(then: float, wall: float) -> str:
    age_s = wall - then
    return f"{age_s:.0f} s ago" if age_s >= 0 else f"{-age_s:.0f} s ahead of this machine's clock"
