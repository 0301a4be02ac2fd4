"""What a run's events say of its progress. Pure: events in, in any order between files; facts out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from lightkeeper.events.of_supervisor import RunEnded
from lightkeeper.events.schema import (
    Committed,
    Event,
    Finished,
    GroupLost,
    JobStopped,
    LastPhases,
    ProcessStarted,
    Waiting,
)

KINDS = (
    "process_started", "committed", "finished", "job_stopped", "run_ended", "waiting", "last_phases", "group_lost",
)  # fmt: skip
STEPS_KEPT = 256
STARTS_KEPT = 256
SKEW_S = 30.0  # clocks of a job's hosts may differ by so much
STALLED_S_MIN = 60.0
STARTING_S = 600.0  # before the pace is known: importing, compiling, loading
PACE_STEPS = 3
MEDIANS, LONGEST = 20.0, 3.0


@dataclass(frozen=True)
class Facts:
    """What is known of a run now.

    Attributes:
        best: the highest step that was ever committed, -1 for none.
        latest: the step of the commit that was written last; less than `best` after a restart from a checkpoint.
        wall: when that was, in seconds since 1970 by its host's clock; 0.0 for never.
        begun_wall: the earliest line that was read; 0.0 if none was.
        again_wall: when its supervisor was started after the run had ended; 0.0 if it was not.
        patience_s: for how long no step may be committed, by the pace of the run.
        end: how it ended, in words; "" while it has not.
        well: whether that was good.
        waiting: for whom it waits, or who is lost, in words; "" if nobody says.
        phases: by group, what its ranks did when the last recovery began.
        lighthouse_step: highest step of a group by the lighthouse's status, -1 if it was not asked.
        lighthouse: what the lighthouse says besides, or why it says nothing.
        evidence: folder of the newest incident, "" if there is none.
        problem: why the run's folder cannot be read; "" if it can.
    """

    best: int = -1
    latest: int = -1
    wall: float = 0.0
    begun_wall: float = 0.0
    again_wall: float = 0.0
    patience_s: float = STARTING_S
    end: str = ""
    well: bool = True
    waiting: str = ""
    phases: Mapping[str, str] = field(default_factory=dict)
    lighthouse_step: int = -1
    lighthouse: str = ""
    evidence: str = ""
    problem: str = ""


class Digest:
    """Takes the events of one run, as they are read."""

    def __init__(self) -> None:
        self.best = self.latest = -1
        self.jobs: set[str] = set()
        self.wall = self.begun_wall = 0.0
        self._starts: deque[float] = deque(maxlen=STARTS_KEPT)  # of the supervisor
        self._ended_wall = 0.0  # the newest end of all, also one that counts no more
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)
        self._end: tuple[float, str, bool] | None = None
        self._verdict: tuple[float, str, bool] | None = None  # the supervisor's, at its own end
        self._waiting: tuple[float, str] = (0.0, "")
        self._phases: tuple[float, Mapping[str, str]] = (0.0, {})

    def take(self, event: Event) -> None:
        """One event. What is older than what is known already, from another file, changes nothing."""
        if event.process != "lighthouse" and event.job:
            self.jobs.add(event.job)
        elif event.process == "lighthouse" and event.job and self.jobs and event.job not in self.jobs:
            return
        if event.wall and (not self.begun_wall or event.wall < self.begun_wall):
            self.begun_wall = event.wall
        if isinstance(event, Committed):
            if event.live:
                self._committed(event)
        elif isinstance(event, Finished):
            self._ended(event, f"finished after {event.step} steps", True)
        elif isinstance(event, JobStopped):
            self._ended(event, event.reason, event.ok)
        elif isinstance(event, RunEnded):
            if self._is_an_end(event):
                self._verdict = event.wall, event.reason, event.code == 0
        elif isinstance(event, ProcessStarted):
            if event.process == "supervisor":
                # The same command goes on with a run that had ended; the first step may be long in coming.
                self._starts.append(event.wall)
                self._forget_ends_before(event.wall)
        elif isinstance(event, Waiting):
            if event.wall >= self._waiting[0]:
                self._waiting = event.wall, f"waits for {event.whom}" + (f" ({event.why})" if event.why else "")
        elif isinstance(event, GroupLost):
            if event.wall >= self._waiting[0]:
                self._waiting = event.wall, f"{event.group} is lost ({event.cause})"
        elif isinstance(event, LastPhases) and event.wall >= self._phases[0]:
            self._phases = event.wall, event.phases

    def _committed(self, event: Committed) -> None:
        self._seconds.append(event.seconds)
        self.best = max(self.best, event.step)
        if event.wall >= self.wall:
            self.wall, self.latest = event.wall, event.step
        self._forget_ends_before(event.wall - SKEW_S)  # it was begun anew in the same folder

    def _forget_ends_before(self, wall: float) -> None:
        self._end = None if self._end is not None and self._end[0] < wall else self._end
        self._verdict = None if self._verdict is not None and self._verdict[0] < wall else self._verdict

    def _is_an_end(self, event: Event) -> bool:
        """Whether it is not one of a run before this one."""
        self._ended_wall = max(self._ended_wall, event.wall)
        return event.wall >= max(self.wall - SKEW_S, *self._starts, 0.0)

    def _ended(self, event: Event, words: str, well: bool) -> None:
        if not self._is_an_end(event):
            return
        if self._end is None or (self._end[2] and not well):
            self._end = event.wall, words, well

    def facts(self, problem: str = "", lighthouse_step: int = -1, lighthouse: str = "", evidence: str = "") -> Facts:
        """What follows from all that was taken, and from who else was asked."""
        _, end, well = self._end or (0.0, "", True)
        if self._verdict is not None and not (end and well and self._verdict[2]):
            _, end, well = self._verdict  # of two good ends the first says after how many steps
        again = min((wall for wall in self._starts if wall > self._ended_wall > 0), default=0.0)
        fresh = max(self.wall, again) - SKEW_S
        return Facts(
            best=self.best,
            latest=self.latest,
            wall=self.wall,
            begun_wall=self.begun_wall,
            again_wall=again,
            patience_s=patience_s(tuple(self._seconds)),
            end=end,
            well=well,
            waiting=self._waiting[1] if self._waiting[0] > fresh else "",
            phases=self._phases[1] if self._phases[0] > fresh else {},
            lighthouse_step=lighthouse_step,
            lighthouse=lighthouse,
            evidence=evidence,
            problem=problem,
        )


def patience_s(seconds: tuple[float, ...]) -> float:
    """For how long no step may be committed: 20 usual steps, or 3 of the longest, at least a minute.

    Args:
        seconds: of the newest steps; the longest of them had an evaluation or a save in it.
    """
    if len(seconds) < PACE_STEPS:
        return STARTING_S
    return max(STALLED_S_MIN, MEDIANS * median(seconds), LONGEST * max(seconds))
