"""Which events are one incident, what was done and what it cost; and which one `lightkeeper why` tells."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helpers beside it are found
from cli_said import one_line
from event_runs import good_run, returning_run
from incident_events import ALL, EXITED, KILLED, STUCK, begins, failed, kept, lost, of, one, over, phases, raised, start

from lightkeeper.cli.app import run
from lightkeeper.errors import UsageError
from lightkeeper.events import EventLog, why
from lightkeeper.events.of_progress import Slow, SlowEnded, Stuck
from lightkeeper.events.of_supervisor import JobRestarts, RunEnded, RunFailed
from lightkeeper.events.schema import (
    Activated,
    Committed,
    Event,
    Evidence,
    Fenced,
    GroupLost,
    JobStopped,
    Prepared,
    ProcessEnded,
    Recovered,
    Rejoined,
)
from lightkeeper.events.verdict import combined, incidents

FROZEN = "rank 0 has been stopped for 2.1 s"


def test_a_loss_is_known_without_the_lighthouses_words() -> None:
    """It did not write into this folder: the members' own epochs say who was left out, their managers what they saw."""
    out = of(Activated, 1.0, "g0", epoch=2, first_step=12, members=("g0", "g2"), cause=f"g1 lost: {KILLED}")
    found = incidents(
        [
            *start(), out, ended(1.2, "g1", 137), of(Recovered, 1.5, "g0", step=12, epoch=2),
            kept(2.0, "g1", KILLED), of(Recovered, 2.1, "g2", step=12, epoch=2),
            of(Activated, 30, "g0", epoch=3, first_step=40, members=("g0",), cause=f"g2 lost: {FROZEN}"),
            of(Recovered, 30.1, "g0", step=40, epoch=3),
            kept(31.0, "g2", f"left out of the job: {FROZEN}"), ended(90, "g0", 143),
        ]
    )  # fmt: skip
    told = [(i.culprit.group, i.culprit.rank, i.culprit.kind, i.step, i.victims) for i in found]
    assert told == [("g1", 0, "killed", 12, ("g0", "g2")), ("g2", 0, "frozen", 40, ("g0",))]
    assert [i.evidence for i in found] == [("incidents/g1-2.0",), ("incidents/g2-31.0",)]


@pytest.mark.parametrize("code", [137, -9])
def test_a_job_of_which_only_evidence_or_an_exit_code_is_left_has_an_incident(code: int) -> None:
    by_evidence = one(kept(2.0, "g1", KILLED))
    assert (by_evidence.culprit.group, by_evidence.culprit.kind) == ("g1", "killed")
    by_code = one(ended(2.0, "g1", code))
    assert (by_code.culprit.group, by_code.culprit.kind) == ("g1", "killed") and "SIGKILL" in by_code.culprit.cause
    assert incidents([*start(), ended(2.0, "g1", 143), ended(2.0, "g0", 104), ended(2.0, "g2", -2)]) == []


def ended(at: float, group: str, code: int) -> Event:
    return of(ProcessEnded, at, group, process=f"manager {group}", exit_code=code)


def test_a_process_that_raised_and_ends_late_swallows_nothing() -> None:
    """Its end and its evidence come after the others went on, and so does a survivor's evidence."""
    found = incidents(
        [
            *start(),
            raised(1.0, "g2"),
            lost(1.1, "g2", "rank 0 raised ValueError: bad batch", "manager"),
            *over(2, ("g0", "g1")),
            kept(5.0, "g0", "a recovery prepared e2/1@48f46d47"),
            of(Stuck, 8.0, "g2", **{**STUCK, "since_s": 7.0, "rank": 0}),
            kept(9.9, "g2", EXITED),
            ended(10.0, "g2", 1),
            lost(60.0, "g1", KILLED, "manager"),
            *over(61, ("g0",), step=40, epoch=3),
            kept(63.0, "g0", "a recovery prepared e3/1@48f46d47"),
        ]
    )
    assert [(i.culprit.group, i.culprit.kind, i.step) for i in found] == [("g2", "exception", 12), ("g1", "killed", 40)]
    assert found[0].evidence == ("incidents/g0-5.0", "incidents/g2-9.9") and found[1].evidence == ("incidents/g0-63.0",)
    assert {signal.name for signal in found[0].signals} == {"exception"}, "that its interpreter took long is no stall"
    assert all(not incident.others for incident in found)


def test_an_ended_process_says_nothing_about_the_last_incident() -> None:
    events = [
        lost(1.0, "g1", KILLED, "manager"),
        *over(2, ("g0", "g2")),
        of(ProcessEnded, 90, "g0", exit_code=-6, child=7),
    ]
    assert one(*events).victims == ("g0", "g2") and not {s.group for s in one(*events).signals} - {"g1"}


def test_a_loss_that_nobody_recovers_from_is_over_when_another_begins() -> None:
    """The first was left out before anybody wrote of it here: a folder to which the lighthouse came late."""
    first = of(Activated, 0.5, epoch=2, first_step=3, members=("g0", "g2"), cause="planned")
    found = incidents(
        [*start(), first, raised(1.0, "g1"), lost(60.0, "g2", KILLED, "manager"), *over(61, ("g0",), 40, 3)]
    )
    assert [(i.culprit.group, i.culprit.kind) for i in found] == [("g1", "exception"), ("g2", "killed")]


def test_evidence_alone_waits_for_its_incident_only_a_while() -> None:
    alone = kept(1.0, "g2", "somebody asked for it", log_class="disk_full: OSError: [Errno 28] No space left on device")
    incident = one(alone, lost(60.0, "g1", KILLED, "manager"), *over(61, ("g0", "g2")))
    assert (incident.culprit.group, incident.evidence, incident.others) == ("g1", (), ())


def test_a_bug_in_all_groups_has_no_victims_though_they_meet_it_one_after_the_other() -> None:
    cause = "g{} lost: rank 0 raised ValueError: bad batch"
    events = [
        raised(5.0, "g0"), lost(5.0, "g0", "rank 0 raised ValueError: bad batch", "manager"), failed(5.1, "g1"),
        of(Activated, 5.1, epoch=2, first_step=11, members=("g1", "g2"), cause=cause.format(0)),
        of(Fenced, 5.1, "g0", reason="it raised"), of(Recovered, 5.2, "g1", step=11, epoch=2),
        raised(5.3, "g1"), of(Recovered, 5.3, "g2", step=11, epoch=2),
        lost(5.3, "g1", "rank 0 raised ValueError: bad batch", "manager"),
        of(Activated, 5.4, epoch=3, first_step=12, members=("g2",), cause=cause.format(1)),
        raised(5.5, "g2"), of(JobStopped, 5.6, reason="the same exception in all groups, a bug of the job", ok=False),
    ]  # fmt: skip
    incident = one(*events)
    assert (incident.culprit.kind, incident.victims) == ("job", ())
    stopped = "the job stopped: the same exception in all groups, a bug of the job"
    assert incident.done == ("step 11 done by g1, g2", stopped), "nobody was fenced for the sake of others"


def test_an_exception_of_the_only_group_that_is_left_is_that_groups() -> None:
    alone = of(Activated, 0.5, epoch=2, first_step=3, members=("g0",), cause="planned")
    stop = of(JobStopped, 6, reason="the same exception in all groups at step 12, a bug of the job: x", ok=False)
    incident = one(alone, raised(5.0, "g0"), stop)
    assert (incident.culprit.group, incident.culprit.kind) == ("g0", "exception")
    assert incident.done == ("the job stopped: g0 raised, and no other group was left",)


QUORUM = of(JobStopped, 40, reason="quorum lost: g1, g2 lost: killed; ...", ok=False, keep="g0")


def test_a_job_that_ended_for_want_of_groups_tells_who_was_lost_and_how_to_go_on() -> None:
    events = [failed(1.0, "g0", "g1"), lost(1.1, "g1", KILLED, "manager"), lost(1.2, "g2", KILLED, "manager")]
    incident = one(*events, QUORUM)
    assert (incident.culprit.group, incident.culprit.kind) == ("g1", "killed")
    assert [other.group for other in incident.others] == ["g2"]
    assert incident.done == ("quorum lost: the job ended, and g0 alone was to keep its last step",)
    assert incident.advice.endswith("; then start all groups again: the job goes on from the step that g0 kept")
    assert "bug" not in " ".join(why.lines(incident))
    assert "start all groups" not in one(*events, *over(2, ("g0",))).advice, "where it did not end"


def test_if_those_who_are_missing_left_as_asked_nobody_is_to_blame() -> None:
    left = [
        of(Activated, 2, epoch=2, first_step=6, members=("g0", "g1"), cause="planned"),
        begins(2.1, "groups have left; the job goes on with at least 3"), failed(2.2, "g0", epoch=2), QUORUM,
    ]  # fmt: skip
    incident = one(*left)
    assert (incident.culprit.group, incident.culprit.kind) == ("", "quorum")
    assert why.lines(incident)[0].startswith("nobody: too few groups are left: quorum lost: ")


def test_each_recovery_is_an_incident_and_late_words_belong_to_the_first() -> None:
    found = incidents(
        [
            *start(),
            lost(1.0, "g1", KILLED, "manager"),
            *over(2, ("g0", "g2")),
            failed(2.2, "g2", "g1"),
            of(Fenced, 2.3, "g1", reason="left out"),
            raised(2.4, "g1"),
            lost(9.0, "g2", "rank 0 exited 3", "manager"),
            *over(10, ("g0",), step=40, epoch=3),
        ]
    )
    assert [(i.culprit.group, i.step, i.culprit.kind) for i in found] == [("g1", 12, "exception"), ("g2", 40, "exit")]
    assert "g1 fenced" in found[0].done
    assert "fenced" not in " ".join(found[1].done)


def test_two_deaths_before_the_others_go_on_are_one_incident() -> None:
    incident = one(lost(1.0, "g1", KILLED, "manager"), lost(1.3, "g2", KILLED, "manager"), *over(2, ("g0",)))
    assert (incident.culprit.group, [other.group for other in incident.others]) == ("g1", ["g2"])
    assert "g1, g2 left out from step 12" in incident.done
    assert "then g2 rank 0" in why.lines(incident)[1]


def test_a_death_while_the_others_recover_is_the_same_incident() -> None:
    """Nobody has committed a step in the epoch that was activated first."""
    first = of(Activated, 1.2, epoch=2, first_step=12, members=("g0", "g2"), cause="g1 lost")
    again = [failed(9.0, "g0", "g2", epoch=2), lost(9.1, "g2", KILLED, "manager"), *over(9.2, ("g0",), epoch=3)]
    incident = one(lost(1.0, "g1", KILLED, "manager"), first, *again)
    assert (incident.culprit.group, [other.group for other in incident.others]) == ("g1", ["g2"])
    assert incident.done[0] == "g1, g2 left out from step 12"


def test_without_any_word_of_a_rank_an_activation_ends_an_incident() -> None:
    """The folder of a lighthouse alone."""
    first = of(Activated, 1.2, epoch=2, first_step=12, members=("g0", "g2"), cause="g1 lost")
    found = incidents([*start(), lost(1.0, "g1", KILLED, "manager"), first, lost(9.0, "g2", KILLED, "manager")])
    assert [incident.culprit.group for incident in found] == ["g1", "g2"]


def test_the_first_epoch_is_no_incident() -> None:
    first = [begins(0.1, "first epoch"), phases(0.2, g0="start of step 0", g1="", g2="")]
    assert incidents([*first, *start()]) == []


def test_who_left_in_order_is_no_incident_nor_is_a_planned_change() -> None:
    planned = of(Prepared, 1.0, epoch=2, change="planned")
    left = lost(1.5, "g1", "left as it was asked to", "left")
    assert incidents([*start(), planned, left, of(JobStopped, 9, reason="finished", ok=True)]) == []
    assert incidents([]) == []


def test_a_joiner_that_dies_is_an_incident_that_nobody_recovers_from() -> None:
    found = incidents(
        [*start(), lost(1.0, "g7", "it went away before it was a member", "stream"), lost(5.0, "g1", KILLED, "manager")]
    )
    assert [incident.culprit.group for incident in found] == ["g7", "g1"]
    assert found[1].done == ("nothing yet: it is not over",)


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([(RunFailed, {"failure": "budget", "reason": "6 attempts"}), (RunEnded, {"code": 1, "reason": "6 attempts"})],
         "the run failed: 6 attempts"),
        ([(RunEnded, {"code": 0, "reason": "stopped as asked (SIGTERM)"})],
         "the run ended (exit code 0): stopped as asked (SIGTERM)"),
        ([(JobRestarts, {"number": 1, "step": 12, "reason": "all died"}), (RunEnded, {"code": 0, "reason": "x"})],
         "the whole job was started again: all died"),
    ],
)  # fmt: skip
def test_what_the_supervisor_did_is_told_where_no_member_went_on(
    ends: list[tuple[type[Event], dict[str, object]]], told: str
) -> None:
    before = of(RunEnded, 0.1, code=0, reason="an earlier one")
    events = [*start(), before, lost(1.0, "g1", KILLED, "manager")]
    assert incidents(events)[0].done == ("nothing yet: it is not over",)
    (incident,) = incidents([*events, *(of(kind, 2.0 + i, **fields) for i, (kind, fields) in enumerate(ends))])
    assert incident.done == (told,)


def test_what_befell_the_job_before_it_began_again_is_still_told() -> None:
    """All groups were started again, for want of groups: who was lost is in the run before."""
    again = [
        of(Activated, 9, g, incarnation=f"{g}-2", epoch=7, first_step=10, members=ALL, cause="first epoch of the job")
        for g in ALL
    ]
    before = [*start(), lost(1.0, "g1", KILLED, "manager")]
    assert [one.culprit.group for one in incidents([*before, *again])] == ["g1"]
    later = of(GroupLost, 12, "g0", incarnation="g0-2", cause=KILLED, detected_by="manager")
    assert [one.culprit.group for one in incidents([*before, *again, later])] == ["g1", "g0"]


def test_a_stuck_rank_that_goes_on_by_itself_is_over() -> None:
    went_on = of(Committed, 30, "g1", step=12, epoch=1, rank=1)
    found = incidents([*start(), of(Stuck, 20, "g1", **STUCK), went_on, lost(50, "g2", KILLED, "manager")])
    assert [incident.culprit.group for incident in found] == ["g1", "g2"]


def test_what_it_cost() -> None:
    events = [event for event in good_run() if not isinstance(event, Recovered)]
    events += [
        Recovered(step=12, epoch=2, group=g, stall_s=s, further=(k,)) for g, s, k in (("g0", 0.2, 1), ("g2", 0.4, 4))
    ]
    (incident,) = incidents(events)
    assert incident.cost.stalls_s == {"g0": 0.2, "g2": 0.4}
    assert (incident.cost.further, incident.cost.recomputed, incident.cost.steps_lost) == (2, 0, 0)
    assert why.lines(incident)[4] == (
        "cost: g2 stood 0.40 s, g0 stood 0.20 s; 2 orphaned microbatches computed by them; none computed twice, "
        "no step lost"
    )
    waits = [msgspec.structs.replace(e, wait_s=2.7) if isinstance(e, Committed) and e.step == 12 else e for e in events]
    assert incidents(waits)[0].cost.stalls_s == {"g0": 2.5, "g2": 2.5}  # they wait 0.2 s in every step
    twice = [msgspec.structs.replace(e, computed=5) if isinstance(e, Committed) and e.step == 12 else e for e in events]
    assert incidents(twice)[0].cost.recomputed == 4
    alone = [msgspec.structs.replace(e, epoch=1) if isinstance(e, Committed) and e.group == "g0" else e for e in events]
    assert incidents(alone)[0].cost.steps_lost == 3  # 12 to 14, which g2 committed under a higher epoch


def test_the_return_of_the_lost_group_belongs_to_it() -> None:
    (incident,) = incidents(returning_run())
    assert incident.done[-1].startswith("g1 healed and rejoined at step 18, ")
    assert incident.done[0] == "g1 left out from step 12"
    again = [*returning_run(), GroupLost(group="g1", incarnation="g1-2", cause="x", detected_by="manager", host="h")]
    assert len(incidents(again)) == 2


def test_a_return_after_the_next_loss_does_not_count() -> None:
    late = of(Rejoined, 30, "g1", step=50, incarnation="g1-3")
    second = lost(20, "g1", KILLED, "manager", incarnation="g1-2")
    first, _ = incidents([*start(), lost(1.0, "g1", KILLED, "manager"), *over(2, ("g0", "g2")), second, late])
    assert first.done[-1] == "g1 came back and was lost again"


def test_a_slow_group_is_an_incident_of_its_own_kind() -> None:
    about = {"rank": 2, "node": "n7", "steps": 20, "wait_s": 0.01, "others_wait_s": 0.3}
    found = incidents(
        [
            *start(),
            of(Slow, 10, "g1", factor=1.31, costs=0.11, step=40, **about),
            of(Slow, 20, "g1", factor=1.4, costs=0.2, step=60, flaps=1, done="asked to leave", **about),
            of(SlowEnded, 30, "g1", step=80),
            of(Slow, 40, "g1", factor=1.5, costs=0.3, step=100, **{**about, "others_wait_s": 0.0}),
        ]
    )
    first, second = found
    assert (first.culprit.group, first.culprit.rank, first.culprit.node, first.step) == ("g1", 2, "n7", 40)
    assert first.culprit.confidence == combined([0.6, 0.5, 0.2]) > second.culprit.confidence == 0.6
    assert first.done == ("asked to leave", "as fast as the others again at step 80")
    assert why.lines(first)[4] == "cost: 20 % of everybody's time while it lasts"
    assert second.done == ("reported",) and "n7" in second.advice


def test_which_one_is_meant() -> None:
    found = incidents(
        [
            *start(),
            lost(1.0, "g1", KILLED, "manager"),
            *over(2, ("g0", "g2")),
            lost(9.0, "g2", "rank 0 exited 3", "manager"),
            *over(10, ("g0",), step=40, epoch=3),
        ]
    )
    assert why.choose(found, "last") is found[1] is why.choose(found, "40") is why.choose(found, "g2")
    assert why.choose(found, "12") is found[0] is why.choose(found, "g1")
    assert why.choose(found, "g0") is found[1]
    with pytest.raises(UsageError, match="no incident of step 7: there are 2, at step 12, 40; about g1, g2"):
        why.choose(found, "7")
    with pytest.raises(UsageError, match="no incident of 'g9'"):
        why.choose(found, "g9")


def test_losses_go_before_slow_groups_and_the_others_are_named() -> None:
    slow = [
        of(Slow, at, "g2", rank=0, factor=1.3, costs=0.1, step=step, steps=9) if at % 2 else of(SlowEnded, at, "g2")
        for at, step in ((15, 151), (16, 0), (17, 172))
    ]
    found = incidents([*start(), lost(1.0, "g1", KILLED, "manager"), *over(2, ("g0", "g2")), *slow])
    killed, first, second = found
    assert why.choose(found, "last") is killed and why.choose(found, "g2") is second
    assert why.choose(found, "151") is first and why.choose(found[1:], "last") is second
    assert why.lines(killed, found)[1].endswith("; 2 other incidents: slow at steps 151, 172 (why RUN STEP)")
    assert why.lines(second, found)[1].endswith("; 2 other incidents: step 12; slow at step 151 (why RUN STEP)")
    assert why.lines(first, [first]) == why.lines(first) and "other incident" not in why.lines(first)[1]
    assert second.advice.startswith("look first what else runs on ") and second.advice.endswith("drain g2")
    many = why.lines(killed, [killed, *[first] * 3, *(dataclasses.replace(first, step=i) for i in range(9))])[1]
    assert many.endswith("; 12 other incidents: slow at steps ..., 3, 4, 5, 6, 7, 8 (why RUN STEP)")


def test_a_word_that_does_not_end_is_cut() -> None:
    long = one(raised(1.0, "g1", message="x" * 9999), *over(2, ("g0", "g2")))
    assert all(len(line) <= why.CHARS_MAX for line in why.lines(long))


def written(folder: Path, *events: Event) -> Path:
    log = EventLog(folder, "lighthouse", job="job")
    for event in events:
        log.write(event)
    log.close()
    return folder


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", *start(), lost(1.0, "g1", KILLED, "manager"), *over(2, ("g0", "g2")))
    assert run(["why", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].startswith("g1 rank 0: rank 0 was killed by SIGKILL (confidence 0.9")
    assert run(["why", str(folder), "g1", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["culprit"]["group"], told["low"], told["signals"][0]["name"]) == ("g1", False, "exit")
    assert run(["why", str(folder), "13"]) == 2
    assert "no incident of step 13" in one_line(capsys)
    assert run(["why", str(tmp_path)]) == 2
    assert "no event log" in one_line(capsys)


def test_command_where_the_lighthouse_wrote_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / "run", "manager g1", job="job")
    log.write(ProcessEnded(group="g1", incarnation="g1-1", exit_code=0))
    log.close()
    assert run(["why", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert told.out == f"no incident in {tmp_path / 'run'}: the members tell of no loss, and of no failed reduce\n"
    assert told.err.count("\n") == 1 and "the lighthouse wrote no events here" in told.err
    assert "--run-folder" in told.err
    log = EventLog(tmp_path / "run", "manager g2", job="job")
    log.write(Evidence(group="g2", incarnation="g2-1", folder="incidents/a", reason=KILLED))
    log.close()
    assert run(["why", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("g2 rank 0 on ") and ": rank 0 was killed by SIGKILL (" in told.out
    assert told.out.count("\n") == 6
    assert "the lighthouse wrote no events here" in told.err


def test_command_without_an_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", *start())
    assert run(["why", str(folder)]) == 0
    assert capsys.readouterr().out == f"no incident in {folder}: nobody was lost, and no reduce failed\n"
    assert run(["why", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == "null\n"
