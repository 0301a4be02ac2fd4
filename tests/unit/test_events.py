"""The event log: what is written is read back, whatever happens to the file; and each rule can fail."""

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
from lightkeeper.events import EventLog, follow, pretty, read_run, schema, summary
from lightkeeper.events import writer as writer_module
from lightkeeper.events.reader import decode, in_order
from lightkeeper.events.schema import (
    Activated,
    Adopted,
    Committed,
    Event,
    FaultInjected,
    GroupLost,
    RunStarted,
    Unknown,
    UserError,
)
from lightkeeper.events.writer import file_name, tail_text

# --- writer and reader


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
        "what": "w",
        "count": 2,
        "pause_s": 0.002,
        "bytes": 10,
        "seconds": 0.5,
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


def test_a_value_json_cannot_hold_is_dropped_not_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


# --- rules: a tiny run of three groups, six microbatches, g1 killed in the reduce of step 12

DEAL = {"g0": (0, 3), "g1": (1, 4), "g2": (2, 5)}
HEIRS = {"g0": (0, 3, 1), "g2": (2, 5, 4)}
FAULT_STEP, STEPS = 12, 15


Shares = dict[str, tuple[int, ...]]


def commit(group: str, step: int, shares: Shares, epoch: int, **over: object) -> Committed:
    values: dict[str, object] = {
        "step": step,
        "epoch": epoch,
        "group": group,
        "incarnation": group + "-1",
        "process": f"rank {group}/0",
        "total": 6,
        "microbatches": shares[group],
        "computed": len(shares[group]),
        "counted": 6,
        "seconds": 1.0,
        "wait_s": 0.2,
        "fingerprint": f"f{step}",
        "loss": 5.0 - step / 10,
        "host": "h",
        "mono_ns": (step + 1) * 10**9,
    }
    return Committed(**{**values, **over})  # type: ignore[arg-type]


def good_run() -> list[Event]:
    events: list[Event] = [Activated(epoch=1, first_step=0, members=("g0", "g1", "g2"), shares=DEAL)]
    for step in range(FAULT_STEP):
        events += [commit(group, step, DEAL, 1) for group in DEAL]
    at = FAULT_STEP * 10**9
    events.append(
        FaultInjected(
            fault="kill",
            phase="reduce",
            step=FAULT_STEP,
            group="g1",
            incarnation="g1-1",
            host="h",
            mono_ns=at + 500_000_000,
        )
    )
    events.append(
        GroupLost(
            group="g1",
            incarnation="g1-1",
            cause="signal 9",
            detected_by="manager",
            host="h",
            mono_ns=at + 510_000_000,
        )
    )
    events.append(Activated(epoch=2, first_step=FAULT_STEP, members=("g0", "g2"), shares=HEIRS))
    for group in HEIRS:
        events.append(commit(group, FAULT_STEP, HEIRS, 2, seconds=1.5, attempts=2))
        events.append(schema.Recovered(step=FAULT_STEP, epoch=2, group=group, further=HEIRS[group][2:]))
    for step in range(FAULT_STEP + 1, STEPS):
        events += [commit(group, step, HEIRS, 2, seconds=1.4) for group in HEIRS]
    return events


def swap(events: list[Event], group: str, step: int, **over: object) -> list[Event]:
    import msgspec

    return [
        msgspec.structs.replace(event, **over)
        if isinstance(event, Committed) and (event.group, event.step) == (group, step)
        else event
        for event in events
    ]


def without(events: list[Event], group: str, step: int) -> list[Event]:
    return [e for e in events if not (isinstance(e, Committed) and (e.group, e.step) == (group, step))]


def test_all_rules_hold_on_a_good_run() -> None:
    run = good_run()
    assert summary.live_groups(run) == {"g0", "g2"}
    assert summary.samples_exactly_once(run, STEPS) == summary.Finding(True, "", STEPS * 6)
    assert summary.steps_lost(run) == summary.Finding(True, "", 0)
    assert summary.recomputed_by_survivors(run) == summary.Finding(True, "", 0)
    assert summary.fingerprints_equal(run).holds
    assert summary.one_lineage(run).holds
    assert summary.fault_fired(run, "kill").holds
    assert summary.recovery_ran(run).value == 2
    assert summary.blamed(run).holds
    found = summary.detected_after(run)
    assert found.holds
    assert found.value == pytest.approx(0.010)
    assert summary.final_loss(run) == pytest.approx(5.0 - (STEPS - 1) / 10)
    assert summary.goodput(run).value == pytest.approx(1.0)


def test_stall_is_the_longest_iteration_less_the_normal_one_less_the_inherited_work() -> None:
    stalls = summary.stalls(good_run())
    assert [(stall.group, stall.step) for stall in stalls] == [("g0", FAULT_STEP), ("g2", FAULT_STEP)]
    assert stalls[0].inherited_s == pytest.approx(0.4)
    assert stalls[0].stood_s == pytest.approx(0.1)
    assert summary.stalls([e for e in good_run() if not isinstance(e, FaultInjected)]) == []


def test_samples_rule_fails() -> None:
    run = good_run()
    rule = summary.samples_exactly_once
    assert "nobody" in rule(swap(run, "g0", 3, microbatches=(0,)), STEPS).why
    assert "more than once" in rule(swap(run, "g0", 3, microbatches=(0, 3, 2)), STEPS).why
    assert "not of this step" in rule(swap(run, "g0", 3, microbatches=(0, 3, 6)), STEPS).why
    assert "not told alike" in rule(swap(run, "g0", 3, total=7), STEPS).why
    only_g0 = [event for event in swap(run, "g0", 0, total=0) if event.group == "g0"]
    assert "not told alike" in rule(only_g0).why
    assert "never committed" in rule(run, STEPS + 1).why
    assert "no step" in rule([]).why
    torn = [*run, commit("g0", 3, {"g0": (0,)}, 1, rank=1)]
    assert "ranks of g0" in rule(torn, STEPS).why


def test_microbatches_of_a_group_that_died_after_its_vote_are_vouched_for_only_by_the_entry() -> None:
    """g1 voted for step 11, died before it could write the event: the entry itself counted all six."""
    run = without(good_run(), "g1", FAULT_STEP - 1)
    assert summary.samples_exactly_once(run, STEPS).holds
    assert not summary.samples_exactly_once(swap(run, "g0", FAULT_STEP - 1, counted=4), STEPS).holds
    assert not summary.samples_exactly_once(swap(run, "g0", FAULT_STEP - 1, counted=None), STEPS).holds
    nobody_lost = [e for e in run if not isinstance(e, GroupLost | FaultInjected)]
    assert not summary.samples_exactly_once(nobody_lost, STEPS).holds
    assert not summary.samples_exactly_once(without(good_run(), "g2", 3), STEPS).holds


def test_an_evicted_group_alone_with_an_entry_is_not_in_the_lineage() -> None:
    run = [*good_run(), commit("g1", FAULT_STEP, DEAL, 1)]
    assert summary.samples_exactly_once(run, STEPS).holds
    assert summary.steps_lost(run).holds
    assert summary.one_lineage(run).holds
    went_on = [*run, commit("g1", FAULT_STEP + 1, {"g1": ()}, 2)]
    assert not summary.one_lineage(went_on).holds


def test_adopting_keeps_the_entrys_name() -> None:
    """g0 committed step 12 in epoch 1; g2 adopted it in epoch 2 under its old name: nothing is lost."""
    run = [e for e in good_run() if not (isinstance(e, Committed) and e.step == FAULT_STEP)]
    run += [commit(group, FAULT_STEP, DEAL, 1) for group in ("g0", "g2")]
    run.append(Adopted(step=FAULT_STEP, epoch=1, donor="g0", group="g2"))
    assert summary.samples_exactly_once(run, STEPS).holds
    assert summary.steps_lost(run).holds


def test_other_rules_fail() -> None:
    run = good_run()
    again = [*run, commit("g0", 3, DEAL, 1)]
    assert summary.steps_lost(again) == summary.Finding(False, "steps done again: [3]", 1)
    discarded = [*run, commit("g0", FAULT_STEP, DEAL, 1)]
    assert not summary.steps_lost(discarded).holds
    assert not summary.steps_lost([]).holds
    assert summary.recomputed_by_survivors(swap(run, "g2", FAULT_STEP, computed=5)).value == 2
    assert not summary.recomputed_by_survivors(swap(run, "g2", 3, computed=None)).holds
    assert not summary.recomputed_by_survivors([]).holds
    assert not summary.fingerprints_equal(swap(run, "g2", STEPS - 1, fingerprint="other")).holds
    assert not summary.fingerprints_equal(swap(run, "g1", 3, fingerprint="other")).holds
    assert "no fingerprint" in summary.fingerprints_equal(swap(run, "g2", STEPS - 1, fingerprint=None)).why
    assert not summary.fingerprints_equal([]).holds
    assert not summary.fingerprints_equal([*run, schema.Diverged(step=STEPS, group="g0")]).holds
    assert not summary.fault_fired(run, "freeze").holds
    no_lost = [event for event in run if not isinstance(event, GroupLost)]
    assert "nobody reported" in summary.detected_after(no_lost).why
    assert not summary.detected_after([]).holds
    wrong = [*run, GroupLost(group="g0", cause="silent", detected_by="lease")]
    assert not summary.blamed(wrong).holds
    assert not summary.recovery_ran(no_lost[: 3 * FAULT_STEP]).holds
    assert summary.final_loss([]) is None
    assert not summary.goodput([]).holds


def test_the_last_fingerprint_may_come_with_finished() -> None:
    bare = swap(swap(good_run(), "g0", STEPS - 1, fingerprint=None), "g2", STEPS - 1, fingerprint=None)
    assert not summary.fingerprints_equal(bare).holds

    def finished(group: str, digest: str) -> Event:
        return schema.Finished(step=STEPS, fingerprint=digest, group=group, process=f"rank {group}/0")

    assert summary.fingerprints_equal([*bare, finished("g0", "x"), finished("g2", "x")]).holds
    assert not summary.fingerprints_equal([*bare, finished("g0", "x")]).holds
    assert not summary.fingerprints_equal([*bare, finished("g0", "x"), finished("g2", "y")]).holds
    manager = schema.Finished(step=STEPS, group="g0", process="manager g0")
    assert not summary.fingerprints_equal([*bare, manager, finished("g2", "x")]).holds
    assert not summary.fingerprints_equal([*good_run(), finished("g0", "other")]).holds


# --- rules: the same run, and g1 comes back: started at 15.2 s, a member from step 18 on


def event_of_g1(kind: type[Event], at_s: float, incarnation: str = "g1-2", **fields: object) -> Event:
    where: dict[str, object] = {"group": "g1", "incarnation": incarnation, "host": "h", "mono_ns": int(at_s * 1e9)}
    return kind(**{**where, **fields})  # type: ignore[arg-type]


BACK = {"g0": (0, 3), "g1": (), "g2": (1, 2, 4, 5)}
BACK_STEP, END = 18, 21


def returning_run() -> list[Event]:
    events = [
        *good_run(),
        event_of_g1(schema.ProcessStarted, 15.2, incarnation="", command="launch --group g1", child=7),
        event_of_g1(schema.Joined, 16.0),
        event_of_g1(schema.Healing, 16.1, step=17),
    ]
    for step in range(STEPS, BACK_STEP):
        events += [commit(group, step, HEIRS, 2, seconds=1.4) for group in HEIRS]
    for group in HEIRS:
        events.append(schema.Copied(step=17, pause_s=0.002, group=group, host="h", mono_ns=17 * 10**9))
    events.append(event_of_g1(schema.Healed, 17.5, step=17, bytes=2 << 20, seconds=0.5, donors=2))
    events.append(commit("g1", 17, {"g1": ()}, 2, incarnation="g1-2", live=False, computed=0))
    events.append(event_of_g1(schema.Rejoined, 18.2, step=BACK_STEP))
    events.append(Activated(epoch=3, first_step=BACK_STEP, members=("g0", "g1", "g2"), shares=BACK))
    for step in range(BACK_STEP, END):
        late = {"seconds": 1.7 if step == BACK_STEP else 1.0}
        events += [commit(group, step, BACK, 3, **late) for group in HEIRS]
        events.append(commit("g1", step, BACK, 3, incarnation="g1-2", **late))
    return events


def test_a_group_that_comes_back_is_told() -> None:
    run = returning_run()
    (rejoin,) = summary.rejoins(run)
    assert (rejoin.group, rejoin.incarnation, rejoin.step, rejoin.replayed) == ("g1", "g1-2", BACK_STEP, 1)
    assert rejoin.after_s == pytest.approx(3.0)
    assert (rejoin.bytes, rejoin.bytes_per_s, rejoin.pause_s) == (2 << 20, 4 << 20, 0.002)
    assert [(stall.group, stall.step) for stall in rejoin.survivors] == [("g0", BACK_STEP), ("g2", BACK_STEP)]
    assert rejoin.survivors[0].stood_s == pytest.approx(0.3)
    assert summary.rejoins(good_run()) == []


def test_a_start_that_nobody_wrote_down_counts_from_the_joining() -> None:
    run = [event for event in returning_run() if not isinstance(event, schema.ProcessStarted)]
    (rejoin,) = summary.rejoins(run)
    assert (rejoin.after_s, rejoin.since) == (pytest.approx(2.2), "it asked to join")


def test_a_group_named_in_a_recovery_is_back_with_its_first_step() -> None:
    run = [event for event in returning_run() if not isinstance(event, schema.Rejoined)]
    assert summary.rejoins(run)[0].step == BACK_STEP
    never = [e for e in run if not isinstance(e, Committed) or not e.live or e.incarnation != "g1-2"]
    assert summary.rejoins(never) == []


def test_all_rules_hold_over_a_rejoin() -> None:
    run = returning_run()
    lines, holds = pretty.summary_lines([*run, schema.Finished(step=END)])
    assert holds, lines
    assert summary.live_groups(run) == {"g0", "g1", "g2"}
    text = "at step 18, 3.0 s after its new start, with 2.0 MiB at 4 MiB/s and 1 entries replayed"
    assert any(line.startswith("rejoined: g1") and text in line for line in lines)
    assert not summary.fingerprints_equal(swap(run, "g1", END - 1, fingerprint="other")).holds


def test_what_the_lost_start_of_a_group_threw_away_is_no_lost_step() -> None:
    """g1 committed step 12 alone before it was fenced; its second start did that step in no way."""
    run = [*returning_run(), commit("g1", FAULT_STEP, DEAL, 1, computed=5)]
    assert summary.steps_lost(run).holds
    assert summary.recomputed_by_survivors(run).holds
    assert not summary.steps_lost([*run, commit("g1", BACK_STEP, BACK, 2, incarnation="g1-2")]).holds


def test_a_replay_consumes_nothing() -> None:
    """g1 died between its vote and its event of step 11; its second start replays it, which vouches for nothing."""
    replay = commit("g1", FAULT_STEP - 1, {"g1": ()}, 1, incarnation="g1-2", live=False)
    run = [*without(returning_run(), "g1", FAULT_STEP - 1), replay]
    assert summary.samples_exactly_once(run, END).holds
    assert not summary.samples_exactly_once(swap(run, "g0", FAULT_STEP - 1, counted=4), END).holds


# --- rules for people


def verdicts(lines: list[str]) -> dict[str, str]:
    return {line[:40].strip(): line[41:45].strip() for line in lines}


def test_without_an_injected_fault_its_rules_do_not_apply() -> None:
    run = [event for event in good_run() if not isinstance(event, FaultInjected)]
    run = [*run, schema.Finished(step=STEPS)]
    lines, holds = pretty.summary_lines(run)
    assert holds
    assert "g1 (signal 9)" in next(line for line in lines if line.startswith("groups lost"))
    assert verdicts(lines)["detected after (s)"] == verdicts(lines)["only hit groups blamed"] == "n/a"
    told = GroupLost(group="g2", cause="rank 0 was killed by SIGKILL", detected_by="manager", step=103)
    assert summary.lost_in_words([told, told]) == "g2 (rank 0 was killed by SIGKILL, step 103)"


def test_a_run_that_goes_on_raises_no_false_alarm() -> None:
    run = without(good_run(), "g2", STEPS - 1)
    bare = [swap([e], e.group, e.step, fingerprint=None)[0] if isinstance(e, Committed) else e for e in run]
    lines, holds = pretty.summary_lines(bare)
    assert holds, lines
    assert lines[0].endswith(f"has not ended; {STEPS - 1} steps are settled")
    assert verdicts(lines)["fingerprints equal"] == "n/a"
    lines, holds = pretty.summary_lines([*bare, schema.Finished(step=STEPS)])
    assert not holds
    assert verdicts(lines)["fingerprints equal"] == verdicts(lines)["samples consumed exactly once"] == "no"
    lines, holds = pretty.summary_lines(swap(run, "g2", 3, fingerprint="other"))
    assert not holds
    assert verdicts(lines)["fingerprints equal"] == "no", "a difference is told at once"


def test_goodput_counts_a_stall_and_not_a_slower_pace() -> None:
    """Ten steps of a second, 7.3 s of stall, twenty steps of 1.5 s: the stall is 7.3 s of 46.8."""
    at_s, run = 0.0, list[Event]()
    for step in range(31):
        at_s += 1.0 if step <= 10 else 1.5
        at_s += 7.3 if step == 11 else 0.0
        run.append(commit("g0", step, {"g0": ()}, 1 if step <= 10 else 2, mono_ns=int(at_s * 1e9)))
    assert summary.goodput(run).value == pytest.approx(40.0 / 47.3)


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "events.md").read_text()
    for kind in schema.KINDS:
        (row,) = [
            line for line in text.splitlines() if line.startswith(f"| `{schema._tag(kind.__name__)}` |")
        ]
        own = set(kind.__struct_fields__) - set(Event.__struct_fields__)
        assert all(f"`{name}`" in row for name in own), f"docs/events.md lacks fields of {kind.__name__}"


def test_user_error_round_trip(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/1", group="g0")
    log.write(UserError(rank=1, step=3, type="TypeError", message="é\n", traceback="line\n\x00"))
    (event,) = read_run(tmp_path).events
    assert isinstance(event, UserError)
    assert event.traceback == "line\n\x00"
