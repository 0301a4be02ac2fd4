"""Each rule over the events of a run holds on a good run, and each can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from event_runs import (
    BACK,
    BACK_STEP,
    DEAL,
    END,
    FAULT_STEP,
    STEPS,
    commit,
    good_run,
    returning_run,
    swap,
    without,
)

from lightkeeper.events import lineage, pretty, schema, summary
from lightkeeper.events.schema import Activated, Adopted, Committed, Event, FaultInjected, GroupLost
from lightkeeper.lighthouse.messages import FIRST_EPOCH


def test_all_rules_hold_on_a_good_run() -> None:
    run = good_run()
    assert lineage.live_groups(run) == {"g0", "g2"}
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
    unlike = summary.fingerprints_equal([*run, schema.SettingsDiffer(step=7, group="g1")])
    assert not unlike.holds and unlike.why == "in step 7 the optimizers have different settings, say g1"
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


def test_a_new_start_is_the_newest_also_where_nobody_wrote_who_was_lost() -> None:
    first = msgspec.structs.replace(commit("g1", 0, DEAL, 1), mono_ns=0)
    started = schema.ProcessStarted(process="manager g1", group="g1", incarnation="g1-1", host="h", mono_ns=0)
    run = [started, first, *returning_run()]
    unheard = [event for event in run if not isinstance(event, GroupLost | FaultInjected)]
    (rejoin,) = summary.rejoins(unheard)
    assert (rejoin.after_s, rejoin.since, rejoin.again) == (pytest.approx(3.0), "its new start", True)


def test_a_group_that_was_no_member_before_came_in_and_counts_from_its_heal() -> None:
    never = [e for e in returning_run() if e.incarnation != "g1-1"]
    (rejoin,) = summary.rejoins(never)
    assert (rejoin.after_s, rejoin.since, rejoin.again) == (pytest.approx(1.2), "it began to heal", False)
    lines, _ = pretty.summary_lines([*never, schema.Finished(step=END)])
    (line,) = [line for line in lines if line.startswith(("came in:", "rejoined:"))]
    assert line.startswith("came in: g1 ") and "at step 18, 1.2 s after it began to heal" in line


def test_a_group_that_was_parked_after_its_loss_counts_from_its_heal() -> None:
    parked = schema.Parked(why="", group="g1", incarnation="g1-2", process="lighthouse", host="h", mono_ns=16 * 10**9)
    (rejoin,) = summary.rejoins([*returning_run(), parked])
    assert (rejoin.after_s, rejoin.since, rejoin.again) == (pytest.approx(1.2), "it began to heal", True)


def test_a_member_that_wrote_nothing_here_is_named() -> None:
    run = [event for event in good_run() if event.group != "g1"]
    found = summary.samples_exactly_once(run)
    assert not found.holds and found.why == (
        "step 0: g1, of its members, wrote no events here (start all groups with --run-folder)"
    )


def test_a_group_named_in_a_recovery_is_back_with_its_first_step() -> None:
    run = [event for event in returning_run() if not isinstance(event, schema.Rejoined)]
    assert summary.rejoins(run)[0].step == BACK_STEP
    never = [e for e in run if not isinstance(e, Committed) or not e.live or e.incarnation != "g1-2"]
    assert summary.rejoins(never) == []


def test_all_rules_hold_over_a_rejoin() -> None:
    run = returning_run()
    lines, holds = pretty.summary_lines([*run, schema.Finished(step=END)])
    assert holds, lines
    assert lineage.live_groups(run) == {"g0", "g1", "g2"}
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


def verdicts(lines: list[str]) -> dict[str, str]:
    return {line[:40].strip(): line[41:45].strip() for line in lines}


def test_without_an_injected_fault_its_rules_do_not_apply() -> None:
    run = [event for event in good_run() if not isinstance(event, FaultInjected)]
    run = [*run, schema.Finished(step=STEPS)]
    lines, _ = pretty.summary_lines(run)
    assert "n/a: the lighthouse" in next(line for line in lines if line.startswith("groups lost"))
    run = [msgspec.structs.replace(e, process="lighthouse") if isinstance(e, GroupLost) else e for e in run]
    lines, holds = pretty.summary_lines(run)
    assert holds
    assert "g1 (signal 9, step 12)" in next(line for line in lines if line.startswith("groups lost"))
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


def resumed_run(first: int) -> list[Event]:
    """What is left of the good run if its groups were started with the state before step `first`."""
    epoch = schema.Activated(epoch=1, first_step=first, members=tuple(DEAL), shares=DEAL, cause=FIRST_EPOCH)
    return [epoch, *(e for e in good_run()[1:] if not isinstance(e, Committed) or e.step >= first)]


def test_a_resumed_run_has_no_steps_before_the_one_that_it_began_at() -> None:
    run = resumed_run(5)
    assert summary.samples_exactly_once(run, STEPS) == summary.Finding(True, "", (STEPS - 5) * 6)
    assert summary.samples_exactly_once(run).holds
    assert "step 5 was never" in summary.samples_exactly_once([e for e in run if getattr(e, "step", 9) != 5], STEPS).why


def test_a_finished_run_that_is_started_again_breaks_no_rule() -> None:
    begun = schema.Activated(epoch=1, first_step=40, members=("g0",), cause=FIRST_EPOCH)
    lines, holds = pretty.summary_lines([begun, schema.Finished(step=40, group="g0")])
    assert holds, lines
    assert verdicts(lines)["samples consumed exactly once"] == verdicts(lines)["goodput"] == "n/a"
    assert not pretty.summary_lines([begun, schema.Finished(step=41, group="g0")])[1], "step 40 was not committed"


def test_goodput_counts_a_stall_and_not_a_slower_pace() -> None:
    """Ten steps of a second, 7.3 s of stall, twenty steps of 1.5 s: the stall is 7.3 s of 46.8."""
    at_s, run = 0.0, list[Event]()
    for step in range(31):
        at_s += 1.0 if step <= 10 else 1.5
        at_s += 7.3 if step == 11 else 0.0
        run.append(commit("g0", step, {"g0": ()}, 1 if step <= 10 else 2, mono_ns=int(at_s * 1e9)))
    assert summary.goodput(run).value == pytest.approx(40.0 / 47.3)


def test_checkpoints_are_told_of_a_run_that_has_any() -> None:
    def saved(step: int) -> schema.Event:
        return schema.CheckpointSaved(
            step=step, epoch=1, term=1, tier="shared", path="/c", bytes=3 << 20, copy_s=0.1, write_s=0.25, loaded=True,
            final="f",
        )  # fmt: skip

    def row(events: list[schema.Event]) -> list[str]:
        return [line for line in pretty.summary_lines(events)[0] if line.startswith("checkpoints saved")]

    assert row(good_run()) == []
    failed = schema.CheckpointFailed(step=9, tier="shared", reason="no space left on device", failures=1)

    def loaded(step: int, restarts: int) -> schema.Event:
        return schema.CheckpointLoaded(
            step=step, tier="local", path="/l", bytes=1, seconds=0.1, compared=True, restarts=restarts
        )

    replacement = loaded(6, 1)  # of a group that was lost; the others went on from step 4
    (found,) = row([loaded(4, 1), *good_run(), saved(6), failed, replacement, saved(8)])
    assert " ".join(found.split()) == (
        "checkpoints saved 2 begun at step 4; the newest of step 8 (shared, 3.0 MiB in 0.2 s); "
        "1 save failed or late, last: no space left on device"
    )


def test_what_a_job_had_done_before_it_began_again_from_a_checkpoint_is_thrown_away() -> None:
    before = [e for e in good_run() if isinstance(e, Activated | Committed) and e.epoch == 1]
    shares, again = (
        DEAL,
        [Activated(epoch=3, first_step=4, members=tuple(DEAL), shares=DEAL, cause=f"{FIRST_EPOCH}: x")],
    )
    for step in range(4, 9):  # not yet as far as it had been
        again += [
            commit(group, step, shares, 3, incarnation=f"{group}-2", mono_ns=(step + 50) * 10**9) for group in shares
        ]
    lost = [GroupLost(group=g, incarnation=f"{g}-1", cause="x", detected_by="stream") for g in DEAL]
    run = [*before, *lost, *again]
    line = lineage.lineage(run)
    assert line.last_step == 8 and {c.incarnation for c in line.commits[5]} == {"g0-2", "g1-2", "g2-2"}
    assert {c.step for c in line.discarded} == set(range(4, FAULT_STEP)) and line.commits[3][0].epoch == 1
    assert summary.one_lineage(run).holds and summary.samples_exactly_once(run).holds
    assert summary.steps_lost(run) == summary.Finding(True, "", 0), "nobody who stayed lost any"
