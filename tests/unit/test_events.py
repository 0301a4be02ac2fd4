"""The event log: what is written is read back, whatever happens to the file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightkeeper.errors import RunFolderError
from lightkeeper.events import EventLog, follow, read_run, schema
from lightkeeper.events import writer as writer_module
from lightkeeper.events.reader import decode, in_order
from lightkeeper.events.schema import Committed, Event, GroupLost, RunStarted, Unknown, UserError
from lightkeeper.events.writer import file_name, tail_text


def test_header_is_filled_in(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run7", "rank g2/0", job="j", group="g2", incarnation="i1")
    log.write(Committed(step=4, epoch=2, microbatches=(1, 5), total=6))
    log.write(GroupLost(group="g1", incarnation="i9", cause="signal 9", detected_by="stream"))
    log.write(GroupLost(group="g1", cause="signal 9", detected_by="stream"))
    first, second, third = read_run(tmp_path / "run7").events
    assert isinstance(first, Committed)
    assert first.microbatches == (1, 5)
    assert (first.v, first.run, first.job, first.process) == (schema.SCHEMA_VERSION, "run7", "j", "rank g2/0")
    assert (first.group, first.incarnation, first.pid, first.seq) == ("g2", "i1", os.getpid(), 0)
    assert (second.group, second.incarnation, second.seq) == ("g1", "i9", 1)
    assert (third.group, third.incarnation) == ("g1", ""), "not our incarnation"
    assert first.mono_ns <= second.mono_ns
    assert abs(first.wall - second.wall) < 60


def test_file_name_is_one_path_component(tmp_path: Path) -> None:
    assert file_name("rank g2/0", 71) == "rank-g2-0-71.jsonl"
    log = EventLog(tmp_path, "../../etc/x")
    assert log.path.parent == tmp_path / "events"


@pytest.mark.parametrize("kind", schema.KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_survives_the_file(kind: type[Event], tmp_path: Path) -> None:
    samples: dict[str, object] = {
        "exit_code": -9,
        "reason": "r",
        "ok": True,
        "step": 3,
        "epoch": 2,
        "first_step": 3,
        "whom": "g1",
        "deadlines": {"compute": 15.0},
        "deadline_s": 15.0,
        "factor": 1.5,
        "costs": 0.1,
        "steps": 20,
        "node": "host7",
        "folder": "incidents/1",
        "by": "ann@console",
        "since_s": 1.5,
        "note": "n",
        "cause": "c",
        "detected_by": "lease",
        "fault": "kill",
        "phase": "reduce",
        "rank": 0,
        "type": "T",
        "message": "m",
        "peer": "p",
        "error": "e",
        "term": 1,
        "members": ("g0",),
        "what": "w",
        "count": 2,
        "pause_s": 0.002,
        "why": "w",
        "bytes": 10,
        "seconds": 0.5,
        "tier": "shared",
        "path": "/c/step-00000007",
        "copy_s": 0.1,
        "write_s": 0.2,
        "loaded": True,
        "compared": True,
        "restarts": 1,
        "final": "f",
        "failures": 2,
        "nodes": ("n0",),
        "code": 137,
        "whose": "node",
        "failure": "xid",
        "number": 2,
        "via": "webhook h",
        "start": 2,
        "problem": "disk",
        "returns": True,
    }
    needed = {name: samples[name] for name in _required(kind)}
    EventLog(tmp_path, "lighthouse").write(kind(**needed))  # type: ignore[arg-type]
    (event,) = read_run(tmp_path).events
    assert type(event) is kind
    for name, value in needed.items():
        assert getattr(event, name) == value


def _required(kind: type[Event]) -> list[str]:
    import msgspec

    return [field.name for field in msgspec.structs.fields(kind) if field.required]


def test_torn_last_line_is_reported_and_the_rest_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/0")
    for step in range(3):
        log.write(Committed(step=step, epoch=1))
    text = log.path.read_bytes()
    log.path.write_bytes(text[:-25])
    run = read_run(tmp_path)
    assert [event.step for event in run.events if isinstance(event, Committed)] == [0, 1]
    (torn,) = run.torn
    assert (torn.file.name, torn.line) == (log.path.name, 3)


def test_unknown_kind_and_newer_version_are_kept(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "lighthouse")
    log.write(RunStarted(settings={"groups": 3}))
    known = json.loads(log.path.read_text())
    with log.path.open("a") as file:
        file.write(json.dumps({**known, "kind": "meteor", "size": 3, "seq": 1}) + "\n")
        file.write(json.dumps({**known, "v": schema.SCHEMA_VERSION + 1, "seq": 2}) + "\n")
        file.write(json.dumps({**known, "settings": 5, "seq": 3}) + "\n")
        file.write(json.dumps({**known, "added_later": 5, "seq": 4}) + "\n")
    events = read_run(tmp_path).events
    assert [type(event).__name__ for event in events] == ["RunStarted", *["Unknown"] * 3, "RunStarted"]
    meteor = events[1]
    assert isinstance(meteor, Unknown)
    assert meteor.name == "meteor"
    assert meteor.raw["size"] == 3
    assert schema.kind_of(meteor) == "meteor"
    assert schema.kind_of(events[0]) == "run_started"


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"5", b"\xff\xfe", b'{"kind":"committed"'])
def test_what_is_no_json_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_full_disk_never_raises_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path, "rank g0/0")
    log.write(Committed(step=0, epoch=1))
    real, room = os.write, {"bytes": 20}

    def full(descriptor: int, data: bytes) -> int:
        if room["bytes"] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[: room["bytes"]])
        room["bytes"] = 0
        return written

    monkeypatch.setattr(writer_module.os, "write", full)
    for step in (1, 2, 3):
        log.write(Committed(step=step, epoch=1))  # the first leaves a torn line, the others nothing
    monkeypatch.setattr(writer_module.os, "write", real)
    assert log.dropped == 3
    log.write(Committed(step=4, epoch=1))
    log.write(Committed(step=5, epoch=1))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "events are being dropped" in said[0]
    assert "3 events were dropped" in said[1]
    run = read_run(tmp_path)
    assert [schema.kind_of(event) for event in run.events] == [
        "committed",
        "events_dropped",
        "committed",
        "committed",
    ]
    assert len(run.torn) == 1
    dropped = run.events[1]
    assert isinstance(dropped, schema.EventsDropped)
    assert dropped.count == 3


def test_real_full_disk(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/0")
    os.close(log._descriptor)
    log._descriptor = os.open("/dev/full", os.O_WRONLY | os.O_APPEND)
    log.write(Committed(step=0, epoch=1))
    assert log.dropped == 1


def test_unwritable_folder_is_told_at_the_start(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write the run folder .*file"):
        EventLog(blocker, "lighthouse")


def test_a_value_json_cannot_hold_is_dropped_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path, "lighthouse")
    log.write(RunStarted(settings={"x": object()}))
    assert log.dropped == 1
    assert "RunStarted cannot be written" in capsys.readouterr().err


def test_an_event_too_large_for_a_line_is_dropped(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "lighthouse")
    log.write(RunStarted(settings={"x": "y" * writer_module.LINE_BYTES_MAX}))
    assert log.dropped == 1
    assert tail_text("a" * 10 + "end", 3) == "[...] end"


def test_threads_and_forks_do_not_mix_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/0")

    def write() -> None:
        for step in range(200):
            log.write(Committed(step=step, epoch=1))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    code = f"""
import os
from lightkeeper.events import EventLog
from lightkeeper.events.schema import Committed
log = EventLog({str(tmp_path / "forked")!r}, "rank g0/0")
log.write(Committed(step=0, epoch=1))
child = os.fork()
log.write(Committed(step=1, epoch=1))
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    events = read_run(tmp_path).events
    assert sorted(event.seq for event in events) == list(range(800))
    forked = read_run(tmp_path / "forked").events
    assert len({event.pid for event in forked}) == 2
    assert sorted(event.seq for event in forked) == [0, 0, 1]


def test_closed_log_takes_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "lighthouse")
    log.close()
    log.close()
    log.write(RunStarted())
    assert read_run(tmp_path).events == []


def test_no_event_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no event log in"):
        read_run(tmp_path)


def test_order_is_by_time_and_never_against_a_file(tmp_path: Path) -> None:
    def at(process: str, seq: int, mono: int, host: str = "a", wall: float | None = None) -> Event:
        wall = mono / 1e9 if wall is None else wall
        return RunStarted(process=process, seq=seq, mono_ns=mono, host=host, wall=wall)

    mixed = [at("b", 0, 30), at("a", 0, 10), at("a", 1, 40), at("b", 1, 40), at("c", 0, 5, "other", 25e-9)]
    assert [(e.process, e.seq) for e in in_order(mixed)] == [("a", 0), ("c", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_follow_yields_whole_lines_as_they_come(tmp_path: Path) -> None:
    seen: list[Event] = []
    idle = 0
    log: EventLog | None = None
    stop = threading.Event()
    for event in follow(tmp_path, stop=stop.is_set, poll_s=0.001):
        if event is not None:
            seen.append(event)
            continue
        idle += 1
        assert idle < 1000
        if log is None:
            log = EventLog(tmp_path, "lighthouse")
            log.write(RunStarted())
            with log.path.open("ab") as file:
                file.write(b'{"kind":"left","reas')
        elif len(seen) == 1 and idle == 2:
            with log.path.open("ab") as file:
                file.write(b'on":"done"}\n')
        elif len(seen) == 2:
            stop.set()
    assert [schema.kind_of(event) for event in seen] == ["run_started", "left"]


def test_events_import_no_torch() -> None:
    code = "import sys, lightkeeper.events, lightkeeper.events.summary; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "events.md").read_text()
    for kind in schema.KINDS:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{kind.__struct_config__.tag}` |")]
        own = set(kind.__struct_fields__) - set(Event.__struct_fields__)
        assert all(f"`{name}`" in row for name in own), f"docs/events.md lacks fields of {kind.__name__}"


def test_user_error_round_trip(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/1", group="g0")
    log.write(UserError(rank=1, step=3, type="TypeError", message="é\n", traceback="line\n\x00"))
    (event,) = read_run(tmp_path).events
    assert isinstance(event, UserError)
    assert event.traceback == "line\n\x00"


def test_what_a_shared_lighthouse_says_of_other_jobs_is_left_out(tmp_path: Path) -> None:
    EventLog(tmp_path, "manager g0", job="mine", group="g0").write(Committed(step=0, epoch=1, total=1))
    for job in ("mine", "theirs", ""):
        EventLog(tmp_path, "lighthouse", job=job).write(GroupLost(group=f"of {job}", cause="x", detected_by="stream"))
    lost = {event.group for event in read_run(tmp_path).events if isinstance(event, GroupLost)}
    assert lost == {"of mine", "of "}
