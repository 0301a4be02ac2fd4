"""What the events of a run that is watched say of its progress, in whatever order its files are read."""

from __future__ import annotations

from lightkeeper.events.of_supervisor import RunEnded, RunFailed
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
from lightkeeper.supervisor.watch.digest import Digest, Facts


def digest(*events: Event) -> Facts:
    made = Digest()
    for event in events:
        made.take(event)
    return made.facts()


def committed(step: int, wall: float, **more: object) -> Committed:
    given = {"process": "rank g0/0", "job": "j", "seconds": 2.0, **more}
    return Committed(step=step, epoch=1, wall=wall, **given)  # type: ignore[arg-type]


def test_who_is_waited_for() -> None:
    told = digest(
        GroupLost(group="g9", cause="exit", detected_by="manager", wall=10.0),
        committed(5, 100.0),
        Waiting(whom="g1", since_s=3.0, why="ranks 0-7 compute", wall=101.0),
        LastPhases(epoch=2, phases={"g1": "compute"}, wall=101.0),
    )
    assert (told.best, told.waiting, told.phases) == (5, "waits for g1 (ranks 0-7 compute)", {"g1": "compute"})
    later = digest(Waiting(whom="g1", since_s=3.0, wall=101.0), committed(5, 200.0))
    assert later.waiting == "", "it went on since"
    lost = digest(committed(5, 100.0), GroupLost(group="g1", cause="signal 9", detected_by="stream", wall=100.5))
    assert lost.waiting == "g1 is lost (signal 9)"


def test_ends() -> None:
    assert digest(committed(5, 100.0), Finished(step=6, wall=101.0)).end == "finished after 6 steps"
    assert digest(Finished(step=6, wall=100.0), committed(5, 105.0)).end, "another rank's clock is ahead"
    assert digest(Finished(step=6, wall=100.0), committed(0, 200.0)).end == "", "it was begun anew"
    assert digest(committed(0, 200.0), Finished(step=6, wall=100.0)).end == ""
    failed = digest(committed(5, 100.0), JobStopped(reason="quorum lost", ok=False, wall=101.0))
    assert (failed.end, failed.well) == ("quorum lost", False)


def supervisor(wall: float, code: int | None = None, reason: str = "crash loop") -> Event:
    """Its start, or with a code its end."""
    header = {"process": "supervisor", "job": "j", "wall": wall}
    return ProcessStarted(**header) if code is None else RunEnded(code=code, reason=reason, **header)  # type: ignore[arg-type]


def test_the_supervisors_end_counts() -> None:
    told = digest(
        supervisor(90.0), RunFailed(failure="crash_loop", reason="crash loop", wall=99.0), supervisor(100.0, 1)
    )
    assert (told.end, told.well, told.begun_wall) == ("crash loop", False, 90.0)
    lost = JobStopped(reason="quorum lost", ok=False, wall=99.0)
    for events in ([lost, supervisor(100.0, 1)], [supervisor(100.0, 1), lost]):
        assert digest(*events).end == "crash loop"
    told = digest(Finished(step=6, wall=99.0), supervisor(100.0, 0, "the run is finished"))
    assert (told.end, told.well) == ("finished after 6 steps", True)
    told = digest(lost, supervisor(100.0, 0, "stopped as asked"))
    assert (told.end, told.well) == ("stopped as asked", True)
    assert digest(supervisor(100.0, 1), committed(0, 200.0)).end == "", "it was begun anew, without a supervisor"


def test_a_later_start_of_the_supervisor_takes_the_end_back() -> None:
    before = [supervisor(10.0), committed(5, 100.0), Finished(step=6, wall=101.0), supervisor(102.0, 0)]
    for events in ([*before, supervisor(103.0)], [supervisor(103.0), *reversed(before)]):
        told = digest(*events)
        assert (told.end, told.best, told.again_wall) == ("", 5, 103.0)
    assert digest(*before, ProcessStarted(process="manager g0", wall=103.0)).end, "any other process proves nothing"
    assert digest(*before, supervisor(103.0), supervisor(104.0, 1)).end == "crash loop"
    taken_up = digest(supervisor(10.0), committed(5, 100.0), supervisor(103.0))
    assert taken_up.again_wall == 0.0, "it had not ended: its steps are as old as they are"
    assert digest(*before, supervisor(103.0), supervisor(120.0)).again_wall == 103.0, (
        "that it is tried often is no step"
    )


def test_what_is_no_progress() -> None:
    assert digest(committed(5, 100.0), committed(9, 101.0, live=False)).best == 5, "replayed, or followed"
    back = digest(committed(50, 100.0), committed(40, 200.0), committed(39, 150.0))
    assert (back.best, back.latest) == (50, 40)


def test_a_lighthouse_that_serves_other_jobs() -> None:
    told = digest(committed(5, 100.0), JobStopped(reason="x", ok=False, wall=101.0, process="lighthouse", job="other"))
    assert told.end == ""
