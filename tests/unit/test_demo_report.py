"""The demo's report, from events written by hand."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from demo_runs import LAST, OPTIONS, STEPS, commits, faulty_run, healed_run, reference_run
from event_runs import swap

from lightkeeper.demo.options import DemoOptions
from lightkeeper.demo.report import Line, Outcome, Report, build, plain_lines, table
from lightkeeper.events import schema
from lightkeeper.events.schema import Event, FaultInjected, GroupLost, Recovered


def outcome(events: list[Event], victim: str = "g1", **over: object) -> Outcome:
    values: dict[str, object] = {
        "events": events,
        "exit_codes": {"lighthouse": 0, "g0": 0, "g1": 0, "g2": 0},
        "leftovers": (),
        "folder": Path("/run"),
    }
    return Outcome(**{**values, "victim": victim, **over})  # type: ignore[arg-type]


def failed(report: Report) -> set[str]:
    return {line.name for line in report.lines if line.holds is False}


def test_good_run_passes() -> None:
    report = build(OPTIONS, outcome(healed_run()), outcome(reference_run(), victim=""))
    assert failed(report) == set()
    assert report.ok
    said = {line.name: line.text for line in report.lines}
    assert said["fault"] == "SIGKILL of rank g1/0 inside reduce of step 4"
    assert said["detected after"] == "0.100 s"
    assert said["rejoined after"] == "2.8 s from its new start, as a member from step 8 on"
    assert said["state fetched"] == "1.00 MiB in 0.250 s, 4 MiB/s"
    assert said["snapshot pause"] == "2.0 ms of a member's training thread, at most"
    assert said["fingerprints equal"] == "yes: g0, g1, g2 (3 of 3)"
    assert said["exit codes"] == "0 of g0, g1, g2, lighthouse; 137 of g1 when it was broken"
    assert said["event log"] == "/run/events"
    figures = report.as_dict()
    assert figures["ok"] is True
    assert figures["failed"] == {}
    assert figures["detected_after_s"] == pytest.approx(0.1)
    assert figures["survivors_stood_s"] == 0.0
    assert figures["rejoined_after_s"] == pytest.approx(2.8)
    assert (figures["heal_bytes"], figures["heal_bytes_per_s"]) == (1 << 20, 4 << 20)
    assert (figures["entries_replayed"], figures["snapshot_pause_s"], figures["rejoin_stood_s"]) == (1, 0.002, 0.0)
    assert (figures["steps_lost"], figures["microbatches_recomputed"]) == (0, 0)
    assert (figures["samples_exactly_once"], figures["fingerprints_equal"]) == (True, True)
    assert figures["loss_difference"] == 0.0
    json.loads(msgspec.json.encode(figures))


def start_of_g1(at_s: float) -> schema.ProcessStarted:
    return schema.ProcessStarted(process="manager g1", group="g1", host="h", mono_ns=int(at_s * 1e9))


START_AGAIN = start_of_g1(9.5)


@pytest.mark.parametrize(
    ("events", "over", "fails"),
    [
        ([e for e in healed_run() if not isinstance(e, FaultInjected)], {}, "fault"),
        ([e for e in healed_run() if not isinstance(e, GroupLost)], {}, "detected after"),
        ([e for e in healed_run() if not isinstance(e, Recovered)], {}, "recovery ran"),
        ([*healed_run(), GroupLost(group="g0", cause="x", detected_by="lease")], {}, "blamed"),
        ([e for e in healed_run() if getattr(e, "step", 0) != LAST], {}, "steps lost"),
        ([*healed_run(), *commits(2, {"g0": (0, 3)}, 1)], {}, "steps lost"),
        (swap(healed_run(), "g0", 5, computed=4), {}, "microbatches recomputed"),
        (swap(healed_run(), "g0", 5, microbatches=(0,)), {}, "samples consumed exactly once"),
        (swap(healed_run(), "g0", LAST, fingerprint="x"), {}, "fingerprints equal"),
        (swap(swap(healed_run(), "g0", LAST, loss=9.0), "g2", LAST, loss=9.0), {}, "final loss"),
        (healed_run(), {"exit_codes": {"lighthouse": 0, "g0": 1, "g1": 0, "g2": 0}}, "exit codes"),
        (healed_run(), {"exit_codes": {"lighthouse": None, "g0": 0, "g1": 0, "g2": 0}}, "exit codes"),
        (healed_run(), {"exit_codes": {"lighthouse": 0, "g0": 0, "g1": 1, "g2": 0}}, "exit codes"),
        ([e for e in healed_run() if not isinstance(e, schema.Copied)], {}, "snapshot pause"),
        ([e for e in healed_run() if not isinstance(e, schema.Healed)], {}, "state fetched"),
        ([e for e in healed_run() if e.group != "g1" or getattr(e, "step", 0) != LAST], {}, "fingerprints equal"),
        (healed_run(), {"leftovers": ("71 python",)}, "processes left over"),
        (healed_run(), {"trouble": "nothing happened for 60 s"}, "the run"),
        ([], {}, "samples consumed exactly once"),
    ],
    ids=range(19),
)
def test_every_check_can_fail(events: list[Event], over: dict[str, object], fails: str) -> None:
    report = build(OPTIONS, outcome(events, **over), outcome(reference_run(), victim=""))  # type: ignore[arg-type]
    assert fails in failed(report)
    assert not report.ok
    assert fails in report.as_dict()["failed"]


def test_too_few_steps_to_come_back_are_told_and_are_no_failure() -> None:
    """Whatever became of the second start, it had no time."""
    codes = {"lighthouse": 0, "g0": 0, "g1": None, "g2": 0}
    for events in (faulty_run(), [start_of_g1(0.0), *faulty_run(), START_AGAIN]):
        report = build(OPTIONS, outcome(events, exit_codes=codes), outcome(reference_run(), victim=""))
        assert report.ok
        said = {line.name: line.text for line in report.lines}
        assert said["fingerprints equal"] == "yes: g0, g2 (2 of 3)"
    assert said["rejoined after"] == ("not shown: --steps 12 is too few; the run ended 2.5 s after the new start of g1")
    assert report.as_dict()["rejoined_after_s"] is None


def test_a_group_that_had_time_and_did_not_come_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkeeper.demo.report.REJOIN_S_MAX", 2.0)
    report = build(
        OPTIONS, outcome([start_of_g1(0.0), *faulty_run(), START_AGAIN]), outcome(reference_run(), victim="")
    )
    assert failed(report) == {"rejoined after"}


def test_missing_reference_loss_fails() -> None:
    report = build(OPTIONS, outcome(healed_run()), outcome([], victim="", trouble="g0 ended with 1"))
    assert failed(report) == {"final loss without the fault"}


def test_without_fault_nothing_is_asked_about_one() -> None:
    options = DemoOptions(groups=3, steps=STEPS, microbatches=6, fault="none")
    report = build(options, outcome(reference_run(), victim=""), None)
    assert report.ok
    assert "survivors stood for" not in {line.name for line in report.lines}
    lost = [*reference_run(), GroupLost(group="g2", cause="silent", detected_by="lease")]
    assert failed(build(options, outcome(lost, victim=""), None)) == {"fault"}


def test_wrong_phase_is_not_the_fault_asked_for() -> None:
    events = [
        msgspec.structs.replace(event, phase="vote") if isinstance(event, FaultInjected) else event
        for event in healed_run()
    ]
    assert failed(build(OPTIONS, outcome(events), outcome(reference_run(), victim=""))) == {"fault"}


def test_table_and_lines_say_the_same() -> None:
    report = Report([Line("a", "b", True), Line("c", "d", False), Line("e", "f", None)])
    assert plain_lines(report)[1].split() == ["FAILED", "c", "d"]
    drawn = io.StringIO()
    Console(file=drawn, width=80).print(table(report))
    assert "FAILED" in drawn.getvalue()
