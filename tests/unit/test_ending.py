"""How a run ended, as its event log shows it, and which of several runs in a folder is judged."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from event_runs import DEAL, STEPS, good_run, swap

from lightkeeper.events import ending, pretty, schema, summary
from lightkeeper.events.of_supervisor import RunEnded
from lightkeeper.events.schema import Activated, Committed, Event, FaultInjected, GroupLost, ProcessEnded
from lightkeeper.lighthouse.messages import FIRST_EPOCH


def quiet_run(steps: int = 10, start: str = "1", epoch: int = 1, at_s: float = 0.0) -> list[Event]:
    """Three groups that train and have not finished; no fault, and no lighthouse that writes into the folder."""
    events: list[Event] = [
        Activated(
            epoch=epoch, first_step=0, members=tuple(DEAL), cause=FIRST_EPOCH, group=group,
            incarnation=f"{group}-{start}", process=f"manager {group}", host="h", mono_ns=int(at_s * 1e9), wall=at_s,
        )
        for group in DEAL
    ]  # fmt: skip
    commits = [e for e in good_run() if isinstance(e, Committed) and e.step < steps]
    return events + [
        msgspec.structs.replace(
            commit, epoch=epoch, incarnation=f"{commit.group}-{start}", fingerprint=None,
            mono_ns=commit.mono_ns + int(at_s * 1e9), wall=at_s + commit.step,
        )
        for commit in commits
    ]  # fmt: skip


def ended(group: str, code: int, start: str = "1") -> ProcessEnded:
    return ProcessEnded(exit_code=code, process=f"manager {group}", group=group, incarnation=f"{group}-{start}")


def failed(group: str, *suspects: str) -> schema.ReduceFailed:
    return schema.ReduceFailed(
        step=10, epoch=1, process=f"manager {group}", group=group, incarnation=f"{group}-1", suspects=suspects
    )


def row(lines: list[str], name: str) -> str:
    (found,) = [line for line in lines if line.startswith(name)]
    return " ".join(found[len(name) :].split())


def test_a_run_that_was_asked_to_end_breaks_no_rule() -> None:
    for more in (
        [ended(group, 0) for group in DEAL],
        [schema.JobStopped(reason="all groups asked to leave: SIGINT", ok=True, process="lighthouse")],
    ):
        lines, holds = pretty.summary_lines([*quiet_run(), *more])
        assert holds, lines
        assert row(lines, "the run").startswith("was ended on request: "), lines
        assert row(lines, "the run").endswith("; 10 steps are settled")
        assert row(lines, "fingerprints equal") == "n/a none so far; the run was not finished"


def test_a_run_whose_groups_gave_up_has_ended_without_finishing() -> None:
    """g2 was killed with all it had while no lighthouse was there; the others waited for their whole budget."""
    waiting = [*quiet_run(), failed("g0", "g2"), failed("g1")]
    assert not ending.ending(waiting).ended and pretty.summary_lines(waiting)[1]
    lines, holds = pretty.summary_lines([*waiting, ended("g0", 105), ended("g1", 105)])
    assert not holds
    told = "no ended without finishing: g0, g1 gave up (exit code 105); g2 killed (its log breaks off)"
    assert row(lines, "the run") == f"{told}; 10 steps are settled"
    assert row(lines, "groups lost").startswith("g2 (its log breaks off)")


def test_who_waits_for_a_group_that_has_ended_still_runs() -> None:
    run = [*quiet_run(), failed("g0", "g2"), ended("g2", 137)]
    assert ending.ending(run) == ending.Ending(False)
    over = ending.ending([*run, ended("g0", 105), ended("g1", 106)])
    assert over.words == (
        "ended without finishing: g0 gave up (exit code 105); g1 stopped (exit code 106); g2 killed by SIGKILL"
    )


def test_a_job_that_stopped_for_a_cause_has_not_ended_well() -> None:
    stop = schema.JobStopped(reason="3 recoveries in a row without a commit", ok=False, process="lighthouse")
    lines, holds = pretty.summary_lines([*quiet_run(), stop])
    assert not holds
    assert "ended without finishing: 3 recoveries in a row without a commit" in row(lines, "the run")


def test_a_supervised_run_that_never_began_has_ended_as_its_supervisor_says() -> None:
    begun = schema.ProcessStarted(process="supervisor")
    failed = RunEnded(process="supervisor", code=1, reason="6 attempts in a row")
    assert ending.ending([begun]) == ending.ending([begun, failed, begun]) == ending.Ending(False)
    assert ending.ending([begun, failed]) == ending.Ending(
        True, well=False, words="ended without finishing: 6 attempts in a row"
    )
    asked = RunEnded(process="supervisor", code=0, reason="stopped as asked (SIGTERM)")
    assert ending.ending([begun, asked]) == ending.Ending(True, words=f"was ended on request: {asked.reason}")


def test_a_run_with_its_last_step_is_judged_to_its_end() -> None:
    run = [event for event in good_run() if not isinstance(event, FaultInjected)]
    assert ending.ending([*run, schema.Finished(step=STEPS)]).finished
    lines, holds = pretty.summary_lines([*quiet_run(), schema.Finished(step=10)])
    assert not holds and row(lines, "fingerprints equal").startswith("no")


def test_of_two_runs_in_a_folder_the_last_one_is_judged() -> None:
    """All were killed and started again; the lighthouse says so, and some of it late, of the ones before."""
    first = swap(quiet_run(), "g1", 3, computed=9)
    late = GroupLost(group="g1", incarnation="g1-1", cause="x", detected_by="stream", process="lighthouse")
    stop = schema.JobStopped(reason="every group was started again", ok=False, process="lighthouse")
    joins = [schema.Joined(group=g, incarnation=f"{g}-2", process="lighthouse", wall=100.0) for g in DEAL]
    for epoch in (2, 1):  # an empty disk begins with the same number
        second = quiet_run(4, "2", epoch, at_s=100.0)
        events = [*first, joins[0], late, stop, *joins[1:], *second]
        kept, runs = ending.newest_run(events)
        assert (kept, runs) == ([*joins, *second], 2)
        lines, holds = pretty.summary_lines(events)
        assert holds, lines
        assert row(lines, "runs").startswith("the job began 2 times in this folder; judged: since the last, ")
        assert row(lines, "the run") == "has not ended; 4 steps are settled"
    assert not pretty.summary_lines(first)[1], "the first run is not as it should be"


def test_what_no_group_says_before_the_first_run_is_not_of_the_last_one() -> None:
    """The lighthouse and the supervisor write before any group does, and of none."""
    begin = schema.ProcessStarted(process="supervisor", wall=-1.0)
    first, second = quiet_run(), quiet_run(4, "2", 2, at_s=100.0)
    again = schema.ProcessStarted(process="supervisor", wall=99.0)
    events = [begin, *first, again, *second]
    assert ending.newest_run(events) == (second, 2)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(100.0))
    assert row(pretty.summary_lines(events)[0], "runs").endswith(f"since the last, {since}")


def test_each_run_of_a_folder_has_its_own_events() -> None:
    each = [quiet_run(), quiet_run(4, "2", 2, at_s=100.0), quiet_run(3, "3", 3, at_s=200.0)]
    late = GroupLost(group="g1", incarnation="g1-1", cause="x", detected_by="stream", process="lighthouse")
    assert ending.runs([*each[0], *each[1], late, *each[2]]) == [[*each[0], late], *each[1:]]
    assert ending.runs(each[0]) == each[:1]
    assert ending.runs([]) == [[]]


def test_a_run_that_has_only_begun_breaks_no_rule_yet() -> None:
    lines, holds = pretty.summary_lines([*quiet_run(), *quiet_run(0, "2", 2, at_s=100.0)])
    assert holds, lines
    assert row(lines, "goodput") == "n/a no step was committed so far"
    assert row(lines, "samples consumed exactly once") == "n/a no step was committed so far"


def test_one_run_is_one_run() -> None:
    again = quiet_run()
    assert ending.newest_run(again) == (again, 1)
    assert ending.newest_run(good_run()) == (good_run(), 1)
    assert ending.newest_run([]) == ([], 1)


def test_a_loss_that_nobody_saw_has_the_step_of_the_groups_own_log() -> None:
    lost = GroupLost(group="g2", incarnation="g2-1", cause="its stream broke", detected_by="lease", step=0)
    assert summary.lost_in_words([*quiet_run(), lost]) == "g2 (its stream broke, step 10)"
    other = msgspec.structs.replace(lost, incarnation="g2-2")
    assert summary.lost_in_words([*quiet_run(), other]) == "g2 (its stream broke, step 0)"
    seen = msgspec.structs.replace(lost, phase="compute")
    assert summary.lost_in_words([*quiet_run(), seen]) == "g2 (its stream broke, step 0)", "in its first step"


def test_spares_that_were_promoted_and_groups_that_were_parked_are_counted() -> None:
    lines, _ = pretty.summary_lines(quiet_run())
    assert not any("parked" in line or "promoted" in line for line in lines), "nothing of it in a run without them"
    more = [schema.Promoted(group="g2", epoch=2, step=7), *[schema.Parked(group="g3", why="parked") for _ in range(2)]]
    lines, _ = pretty.summary_lines([*quiet_run(), *more])
    assert row(lines, "spares promoted") == "1 g2 (step 7)"
    assert row(lines, "groups parked") == "1 g3"
