"""What the supervisor takes from a run's events about the end of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from lightkeeper.events import schema
from lightkeeper.events.schema import Event
from lightkeeper.supervisor.attribution import blame
from lightkeeper.supervisor.facts import judged
from lightkeeper.supervisor.starts import Start, _said_last

T = TypeVar("T", bound=Event)


def said(kind: type[T], process: str = "manager g0", incarnation: str = "new", wall: float = 10.0, **fields: Any) -> T:
    group = fields.pop("group", "g0")
    return kind(
        run="r", job="j", process=process, group=group, incarnation=incarnation, host="h", pid=1, wall=wall,
        mono_ns=int(wall * 1e9), seq=0, **fields,
    )  # fmt: skip


def committed(step: int) -> schema.Committed:
    return said(
        schema.Committed, "rank g0/0", step=step, epoch=1, term=1, rank=0, microbatches=(0,), total=1, counted=1,
        seconds=0.1, wait_s=0.0,
    )  # fmt: skip


def lost(incarnation: str) -> schema.GroupLost:
    return said(
        schema.GroupLost, "lighthouse", incarnation, cause="rank 0 was killed by SIGKILL", detected_by="manager",
        phase="compute", step=7,
    )  # fmt: skip


def test_what_is_said_late_of_the_start_before_is_not_its_own() -> None:
    events = [said(schema.ProcessStarted), lost("old")]
    assert judged(events, "g0", -9, "", False).cause == ""
    end = judged([*events, lost("new")], "g0", 137, "", False)
    assert (end.kind, end.step, end.cause) == ("killed", 7, "rank 0 was killed by SIGKILL")


def test_without_a_verdict_its_commits_say_in_which_step_it_was() -> None:
    assert judged([said(schema.ProcessStarted), committed(3), committed(4)], "g0", -9, "", False).step == 5
    assert judged([said(schema.ProcessStarted)], "g0", -9, "", False).step == -1


def test_finished_left_and_asked() -> None:
    done = said(schema.Finished, "rank g0/0", step=9)
    assert judged([done], "g0", 0, "", False).finished
    assert not judged([done], "g0", 1, "", False).finished
    end = judged([], "g0", 0, "", True)
    assert end.asked and not end.finished


def test_how_the_job_before_it_ended_is_no_reason_for_who_gave_up() -> None:
    stopped = said(schema.JobStopped, "lighthouse", reason="every group was started again", ok=False, group="")
    end = judged([said(schema.ProcessStarted), stopped], "g0", 105, "", False)
    assert end.cause == "" and not end.quorum
    assert judged([said(schema.ProcessStarted), stopped], "g0", 106, "", False).cause == stopped.reason


def test_the_class_of_its_log_is_a_word_and_the_line_belongs_to_the_cause() -> None:
    log_class = "xid (rank 0): NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
    kept = said(schema.Evidence, folder="incidents/x", reason="rank 0 exited 1", log_class=log_class)
    end = judged([said(schema.ProcessStarted), kept, lost("new")], "g0", 1, "", False)
    assert end.classified == "xid" and end.cause.endswith("79, GPU has fallen off the bus")
    assert blame(end).whose == "node"


def test_the_line_that_says_why_is_taken_from_a_launchers_log(tmp_path: Path) -> None:
    log = tmp_path / "launch.log"
    log.write_text("manager g0: ends with exit code 105: step 3 waited\nmanager g0: kept of it: x (3 parts)\n")
    assert _said_last(Start(logs=[log]), 105) == "it exited 105: manager g0: ends with exit code 105: step 3 waited"
