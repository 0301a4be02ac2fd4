"""What chaos holds against a run: small runs as lists of events, good ones and each with one thing wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from event_runs import commit, good_run

from lightkeeper.chaos.checkers import Outcome, Struck, as_dict, check, redone, windows
from lightkeeper.chaos.faults import FAULTS, OTHER, VICTIM, Plan
from lightkeeper.events import schema
from lightkeeper.events.of_checkpoints import CheckpointLoaded, CheckpointSaved
from lightkeeper.events.of_progress import Stuck
from lightkeeper.events.of_supervisor import GroupEnded
from lightkeeper.events.schema import Event, FaultInjected, GroupLost
from lightkeeper.lighthouse.messages import FIRST_EPOCH

GROUPS = ("g0", "g1", "g2")
BACK = 15
DEAL = {"g0": (0, 3), "g1": (1, 4), "g2": (2, 5)}
CODES: dict[str, int | None] = dict.fromkeys((*GROUPS, "lighthouse"), 0)


def plan_of(name: str) -> Plan:
    return Plan(FAULTS[name], 0, {VICTIM: "g1", OTHER: "g0"})


def struck_run(fault: str = "kill", by: str = "manager", more: tuple[Event, ...] = ()) -> list[Event]:
    """`good_run` struck from outside; g1 comes back in step 15."""
    events: list[Event] = []
    for event in good_run():
        if isinstance(event, FaultInjected):
            event = msgspec.structs.replace(event, phase="", fault=fault, process="chaos")
        elif isinstance(event, GroupLost):
            cause = "rank 0 was killed by SIGKILL" if by == "manager" else "no progress"
            event = msgspec.structs.replace(event, detected_by=by, cause=cause)
            events += more
        events.append(event)
    events.append(schema.Activated(epoch=3, first_step=BACK, members=GROUPS, shares=DEAL, cause="planned"))
    for step in range(BACK, BACK + 3):
        events += [commit(g, step, DEAL, 3, incarnation=f"{g}-{2 if g == 'g1' else 1}") for g in GROUPS]
    return events


def outcome(events: list[Event], name: str = "kill", **over: object) -> Outcome:
    given = Outcome(events, GROUPS, [Struck(plan_of(name), ("g1",))], CODES, (), {"rank g0/0": 30}, {"rank g0/0": 31})
    return replace(given, **over)  # type: ignore[arg-type]


def failed(given: Outcome) -> dict[str, str]:
    result = as_dict(check(given))
    assert result["ok"] is (not result["failed"])
    return result["failed"]


def about(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def test_a_kill_that_was_dealt_with_holds() -> None:
    assert failed(outcome(struck_run())) == {}


def test_a_fault_that_did_not_strike_is_no_success() -> None:
    events = [event for event in struck_run() if not isinstance(event, FaultInjected | GroupLost)]
    found = failed(outcome(events))
    assert found["fault"] == "it did not strike" and "expected g1" in found["blamed"]
    assert failed(outcome(struck_run(), struck=[]))["fault"] == "none was done"


def test_another_fault_than_the_one_asked_for_is_told() -> None:
    assert failed(outcome(struck_run("freeze")))["fault"] == "it did not strike"


def test_a_second_kill_that_was_to_come_and_did_not_is_told() -> None:
    assert "expected 2" in failed(outcome(struck_run("donor-kill"), "donor-kill"))["fault"]


def test_a_victim_that_is_blamed_is_told() -> None:
    events = [msgspec.structs.replace(e, group="g2") if isinstance(e, GroupLost) else e for e in struck_run()]
    found = failed(outcome(events))
    assert found["blamed"].startswith("g2 (rank 0 was killed by SIGKILL, found by manager); expected g1")
    assert found["verdict"].startswith("g2 (killed, ")
    assert "nobody reported it lost" in found["seen after"]


def test_one_that_is_lost_beside_the_victim_is_told() -> None:
    extra = GroupLost(group="g2", cause="silent", detected_by="lease", host="h")
    assert "g2 (silent, found by lease)" in failed(outcome(struck_run(more=(extra,))))["blamed"]


def test_how_it_was_found_counts() -> None:
    assert "expected found by manager or stream" in failed(outcome(struck_run(by="lease")))["blamed"]


def test_an_incarnation_that_was_not_hit_is_told() -> None:
    events = struck_run(
        more=(GroupLost(group="g1", incarnation="g1-0", cause="exit", detected_by="manager", host="h"),)
    )
    assert "g1 was not hit in this incarnation" in failed(outcome(events))["blamed"]


def test_a_loss_that_was_said_late_is_told() -> None:
    late = [
        msgspec.structs.replace(e, mono_ns=e.mono_ns + 9 * 10**9) if isinstance(e, GroupLost) else e
        for e in struck_run()
    ]
    assert failed(outcome(late)) == {"seen after": "9.01 s, at most 5 s"}


def test_what_must_follow_is_asked_for() -> None:
    stuck = Stuck(group="g1", rank=0, phase="compute", step=12, since_s=6.0, deadline_s=5.0, host="h")
    base = [
        msgspec.structs.replace(e, fault="stall", phase="compute") if isinstance(e, FaultInjected) else e
        for e in struck_run(by="progress")
    ]
    assert failed(outcome(base, "stall-in-compute")) == {"followed": "no stuck about g1"}
    place = base.index(about(base, GroupLost)[0])
    good = [*base[:place], stuck, *base[place:]]
    assert failed(outcome(good, "stall-in-compute")) == {}
    victim = msgspec.structs.replace(stuck, group="g0")
    assert (
        "g0, which waits for others, was called stuck"
        in (failed(outcome([*good[:place], victim, *good[place:]], "stall-in-compute"))["followed"])
    )
    without = [event for event in good if not isinstance(event, schema.Recovered)]
    assert failed(outcome(without, "stall-in-compute")) == {"followed": "no step was repeated"}


def test_nobody_may_be_lost_by_a_short_freeze() -> None:
    found = failed(outcome(struck_run("freeze-short"), "freeze-short"))
    assert "expected nobody" in found["blamed"] and found["followed"] == "group_lost about g1"


def test_who_does_not_come_back_is_told() -> None:
    given = outcome(good_run_outside(), struck=[Struck(plan_of("kill"))])
    assert failed(given) == {"came back": "g1 did not come back", "trained to the end": "g0, g2"}


def good_run_outside() -> list[Event]:
    return [event for event in struck_run() if not isinstance(event, schema.Committed) or event.step < BACK]


def test_one_that_is_not_to_come_back_ends_with_its_own_code() -> None:
    by_itself = {FaultInjected: {"fault": "exit", "phase": "compute"}, GroupLost: {"cause": "rank 0 exited 1"}}
    events = [msgspec.structs.replace(e, **by_itself.get(type(e), {})) for e in good_run()]
    given = outcome(events, struck=[Struck(plan_of("exit"))], exit_codes={**CODES, "g1": 1})
    assert failed(given) == {}
    assert failed(replace(given, exit_codes={**CODES, "g1": 3}))["exit codes"] == "g1 3"


@pytest.mark.parametrize(
    ("over", "name", "says"),
    [
        ({"exit_codes": {**CODES, "g0": 105}}, "exit codes", "g0 105"),
        ({"exit_codes": {}}, "exit codes", "nobody ended"),
        ({"leftovers": ["4711 python"]}, "processes left over", "4711 python"),
        ({"after": {"rank g0/0": 40}}, "descriptors", "+10 (rank g0/0)"),
        ({"after": {}}, "descriptors", "no process was looked at"),
        ({"trouble": "not within 60 s: g1 is back"}, "the run", "not within 60 s"),
    ],
)
def test_what_is_wrong_at_the_end_is_told(over: dict[str, object], name: str, says: str) -> None:
    found = failed(outcome(struck_run(), **over))
    assert list(found) == [name] and says in found[name]


def test_a_wrong_bit_and_a_lost_sample_are_told() -> None:
    events = struck_run()
    last = [i for i, event in enumerate(events) if isinstance(event, schema.Committed)][-1]
    other = [*events[:last], msgspec.structs.replace(events[last], fingerprint="other")]
    assert list(failed(outcome(other))) == ["fingerprints equal"]
    fewer = [*events[:last], msgspec.structs.replace(events[last], microbatches=(2,), computed=1)]
    assert list(failed(outcome(fewer))) == ["samples exactly once"]


def test_of_a_log_with_a_gap_only_what_it_can_tell_is_asked() -> None:
    dropped = schema.EventsDropped(count=3, group="g1", host="h")
    place = 12 * 3 + 1
    events = struck_run("log-unwritable")
    kept = [e for e in events if not isinstance(e, GroupLost | FaultInjected | schema.Recovered)]
    fault = about(events, FaultInjected)
    gap = [e for e in kept if not (isinstance(e, schema.Committed) and e.group == "g1" and 5 <= e.step <= 8)]
    names = {each.name for each in check(outcome([*fault, *gap[:place], dropped, *gap[place:]], "log-unwritable"))}
    assert "samples exactly once" not in names
    assert failed(outcome([*fault, *gap[:place], dropped, *gap[place:]], "log-unwritable")) == {}
    assert failed(outcome([*fault, *gap], "log-unwritable")) == {"followed": "no events_dropped about g1"}


def test_each_fault_of_several_is_judged_by_what_came_between_it_and_the_next() -> None:
    events = struck_run()
    lighthouse = FaultInjected(fault="lighthouse-kill", phase="", step=16, process="chaos", host="h")
    both = [Struck(plan_of("kill"), ("g1",)), Struck(plan_of("lighthouse-kill"))]
    given = outcome([*events, lighthouse], struck=both)
    first, second = windows(given)
    assert len(about(first, GroupLost)) == 1 and second == [lighthouse]
    assert failed(given) == {}
    late = GroupLost(group="g2", cause="silent", detected_by="lease", host="h")
    found = failed(replace(given, events=[*events, lighthouse, late]))
    assert list(found) == [f"lighthouse-kill of g1: {name}" for name in ("blamed", "verdict", "followed")]


def test_a_verdict_for_another_reason_or_about_another_group_is_told() -> None:
    exited = [
        msgspec.structs.replace(e, cause="rank 0 exited 3") if isinstance(e, GroupLost) else e for e in struck_run()
    ]
    found = failed(outcome(exited))
    assert list(found) == ["verdict"] and "expected killed" in found["verdict"]
    assert failed(outcome(struck_run("freeze-short"), "freeze-short"))["verdict"].endswith("; expected nobody")
    cut = [event for event in struck_run("cut-link") if not isinstance(event, GroupLost)]
    assert "expected network" in failed(outcome(cut, "cut-link"))["verdict"]


def judgement(group: str, whose: str, failure: str = "killed") -> GroupEnded:
    return GroupEnded(group=group, nodes=("n1",), code=137, whose=whose, failure=failure, step=12, reason="x")


def test_under_a_supervisor_every_end_must_be_judged_and_no_other() -> None:
    run = [*struck_run(), judgement("g1", "maybe"), judgement("g0", "nobody", "finished")]
    assert failed(outcome(run, supervised=True)) == {}
    assert "nobody ended; expected of g1" in failed(outcome(struck_run(), supervised=True))["attributed"]
    wrong = [*struck_run(), judgement("g1", "job")]
    assert "g1: job (killed); expected of g1: maybe or node" in failed(outcome(wrong, supervised=True))["attributed"]
    more = [*run, judgement("g2", "maybe")]
    assert "g2: maybe" in failed(outcome(more, supervised=True))["attributed"]


def test_a_job_that_began_again_must_have_taken_the_newest_checkpoint() -> None:
    def told(first: int, loaded: int) -> list[Event]:
        saved = {"epoch": 1, "term": 1, "tier": "shared", "path": "p", "bytes": 1, "copy_s": 0.1, "write_s": 0.1}
        saved |= {"final": "f", "loaded": False}
        read = {"tier": "shared", "path": "p", "bytes": 1, "seconds": 0.1, "compared": True, "restarts": 1}
        return [
            *(CheckpointSaved(step=step, wall=20.0, **saved) for step in (10, 20)),  # type: ignore[arg-type]
            commit("g0", 24, DEAL, 1, wall=30.0),
            CheckpointLoaded(step=loaded, wall=40.0, **read),  # type: ignore[arg-type]
            schema.Activated(
                epoch=3, first_step=first, members=GROUPS, shares=DEAL, cause=f"{FIRST_EPOCH}: x", wall=50.0
            ),
        ]

    good = redone("", told(20, 20), told(20, 20))
    assert good.holds and good.value == 5 and "step 20 of 25" in good.text
    assert not redone("", told(10, 10), told(10, 10)).holds, "an older one"
    assert not redone("", told(20, 20), told(20, 20)[:-1]).holds, "it never began"
