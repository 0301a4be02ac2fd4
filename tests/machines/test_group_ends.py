"""How a group ends, what it gives up waiting for, and what it does after it stood still itself."""

from __future__ import annotations

import pytest
from groupworld import TERM, GroupWorld, epoch

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local
from lightkeeper.manager.machine import RankView


def test_a_killed_rank_ends_the_group_which_kills_the_rest_and_says_so() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.rank_ends(1, -9, "reduce", 7)
    assert world.said(m.Died) == [m.Died("rank 1 was killed by SIGKILL", 1, "reduce", 7)]
    assert world.killed == ["rank 1 was killed by SIGKILL"] and world.ended[0].exit_code == 137
    world.rank_ends(0, -9)
    assert len(world.said(m.Died)) == len(world.ended) == 1


@pytest.mark.parametrize(("exit_code", "code"), [(3, 3), (-11, 139), (None, 1), (0, 1)])
def test_the_groups_exit_code_is_its_ranks(exit_code: int | None, code: int) -> None:
    world = GroupWorld()
    world.start()
    world.rank_ends(0, exit_code)
    assert world.ended[0].exit_code == code


def test_an_exit_0_before_the_run_was_closed_is_no_good_end() -> None:
    world = GroupWorld()
    world.start()
    world.rank_ends(0, 0)
    left = "rank 0 exited 0 before the run was closed: the loop was left at step 0"
    assert world.said(m.Died)[0].cause == f"{left}; call manager.finish() to end the run early, in all groups"


def test_a_loop_over_steps_that_was_left_early_is_told_where_and_what_to_call() -> None:
    world = GroupWorld()
    world.start()
    world.machine.ready[0] = local.Ready(signature={"until": "60"}, total=24)
    world.rank_ends(0, 0, step=5)
    assert world.ended[0].reason == (
        "rank 0 exited 0 before the run was closed: the loop over manager.steps() was left at step 5 of 60; "
        "call manager.finish() to end the run early, in all groups"
    )


def test_an_error_of_the_users_is_told_with_the_death() -> None:
    world = GroupWorld()
    world.start()
    error = local.RankError(
        step=5, type="ValueError", message="loss is nan", where="train.py:12 in loop", traceback="Traceback"
    )
    world.rank_says(0, error)
    (died,) = world.said(m.Died)
    assert died.cause == "rank 0 raised ValueError: loss is nan", "the others need not wait for its interpreter to end"
    assert not world.killed, "it may still be about to print it"
    world.rank_ends(0, 1, "compute", 5)
    died = world.said(m.Died)[-1]
    assert died.cause == "rank 0 exited 1 after ValueError: loss is nan"
    assert died.error == m.UserError(5, "ValueError", "loss is nan", "train.py:12 in loop")
    assert world.events[0].traceback == "Traceback"
    assert world.ended[0].reason == "rank 0 exited 1 after ValueError at step 5, which it has printed"


def test_of_a_message_of_many_lines_the_first_is_told() -> None:
    world = GroupWorld()
    world.start()
    message = "sample 7 of the data set failed: KeyError: 7\n\nTraceback (most recent call last):\n ..."
    world.rank_says(0, local.RankError(step=5, type="SampleError", message=message, where="w", traceback=""))
    assert world.said(m.Died)[0].cause == "rank 0 raised SampleError: sample 7 of the data set failed: KeyError: 7"
    assert world.events[0].message == message, "the event has all of it"


def test_an_interpreter_that_does_not_end_after_its_exception_is_killed_and_the_exception_named_first() -> None:
    world = GroupWorld()
    world.start()
    world.rank_says(0, local.RankError(step=5, type="RuntimeError", message="x", where="w", traceback=""))
    world.pass_s(9)
    assert not world.ended
    world.pass_s(2)
    assert world.ended[0].reason == (
        "rank 0 raised RuntimeError: x; it is killed, since it has not ended 10 s after that"
    )


def test_why_the_job_stops_does_not_repeat_what_a_rank_here_has_printed() -> None:
    world = GroupWorld()
    world.start()
    reason = "the same exception in all groups at step 5, a bug of the job: ValueError: loss is nan (t.py:1 in f)"
    world.hears(m.Stop(reason, ok=False))
    assert world.machine.last_words == f"the job stops: {reason}"
    world.rank_says(0, local.RankError(step=5, type="ValueError", message="loss is nan", where="w", traceback=""))
    world.hears(m.Stop(reason, ok=False))
    assert world.machine.last_words == "the job stops: the same exception in all groups at step 5, a bug of the job"


def test_an_error_of_the_users_is_known_even_if_nobody_could_tell_the_exit_code() -> None:
    world = GroupWorld()
    world.start()
    world.rank_says(0, local.RankError(step=5, type="ValueError", message="x", where="w", traceback=""))
    world.rank_ends(0, None)
    assert world.said(m.Died)[0].error is not None and world.ended[0].exit_code == 1


def test_a_rank_that_ended_in_order_needs_no_exit_code() -> None:
    world = GroupWorld()
    world.start()
    world.vote_all("reduced", 0, at=1, next_total=0)
    world.vote_all("closed", 1, at=1, next_total=0)
    world.rank_ends(0, None, phase="ended")
    assert [end.exit_code for end in world.ended] == [0]


def test_a_crash_after_the_run_was_closed_is_still_the_groups_exit_code() -> None:
    world = GroupWorld()
    world.start()
    world.vote_all("closed", 0, at=1)
    world.rank_ends(0, 9, phase="ended")
    assert world.ended[0].exit_code == 9


def test_fenced_means_killed() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.hears(m.Fence("its manager has been silent for 2.3 s"))
    assert world.killed == ["left out of the job: its manager has been silent for 2.3 s"]
    assert world.ended[0].exit_code == exits.FENCED


def test_refused_for_good_ends_and_refused_for_now_does_not() -> None:
    world = GroupWorld()
    world.connect()
    world.hears(m.Refused("its lease must pass first", retry=True))
    assert not world.ended
    world.hears(m.Refused("g1 differs from g0: w"))
    assert world.ended[0].exit_code == exits.REFUSED and "g1 differs from g0: w" in world.ended[0].reason


def test_a_stop_for_cause_is_answered_to_waiting_and_later_votes_and_is_the_exit_code() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "reduced", 0, at=1)
    world.hears(m.Stop("the job contradicts itself", ok=False))
    assert world.answers(0)[-1].verdict == "stop" and not world.answers(0)[-1].ok
    assert world.pushed(1, local.Abort), "who stands in a reduce must come out of it"
    world.vote(1, "failed", 0, at=1, error="aborted")
    assert world.answers(1)[-1].reason == "the job contradicts itself"
    world.rank_ends(0, 6)
    world.rank_ends(1, 6)
    assert [end.exit_code for end in world.ended] == [exits.STOPPED]


# ---------------------------------------------------------------- without a Manager, leaving


def test_scripts_that_never_made_a_manager_end_in_order_once_all_have() -> None:
    world = GroupWorld(ranks=2)
    world.connect()
    world.rank_ends(1, 0)
    assert not world.ended
    world.rank_ends(0, 0)
    assert world.ended[0].exit_code == 0 and "without making a lightkeeper.Manager" in world.ended[0].reason
    assert not world.said(m.Died)


def test_a_script_that_fails_before_it_made_a_manager_hands_its_code_on() -> None:
    world = GroupWorld()
    world.connect()
    world.rank_ends(0, 5)
    assert [end.exit_code for end in world.ended] == [5] and world.killed
    assert world.said(m.Died)[0].cause == "rank 0 exited 5"


def test_a_rank_that_comes_after_another_ended_without_a_manager_does_not_wait_for_it() -> None:
    world = GroupWorld(ranks=2)
    world.connect()
    world.rank_ends(1, 0)
    register = local.Register(token="t", rank=0, pid=1000, transfer="g1:10", progress="")
    world._carry_out(world.machine.register(register, world.now))
    assert [end.exit_code for end in world.ended] == [1] and world.killed
    assert world.said(m.Died)[0].cause == "rank 1 exited 0 before the run was closed: it made no Manager"


# ---------------------------------------------------------------- waiting


def test_a_lighthouse_that_is_not_there_at_the_start_is_given_up_after_the_budget_and_named() -> None:
    world = GroupWorld(outage_budget_s=10, lighthouse="lh.example:29400")
    world.ready()
    world.pass_s(10)
    assert not world.ended
    world.pass_s(0.25)
    assert world.ended[0].exit_code == exits.GAVE_UP
    assert (
        world.ended[0].reason
        == "the lighthouse at lh.example:29400 could not be reached for 10 s; start this group again"
    )
    assert world.killed


def test_attempts_that_reach_nobody_do_not_make_the_lighthouse_reached() -> None:
    """`LighthouseLink` calls `connected` before it knows whether anybody answers, and `disconnected` after."""
    world = GroupWorld(outage_budget_s=10, lighthouse="lh.example:29400")
    for _ in range(30):
        world._carry_out(world.machine.connected(world.now))
        world.disconnect()
        world.pass_s(1)
    assert world.ended, "30 s without an answer, with a budget of 10 s"


def test_the_lighthouse_may_be_away_for_as_long_as_training_goes_on() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.start()
    world.disconnect()
    for step in range(30):
        world.pass_s(5)
        world.vote(0, "reduced", step, at=1)
    assert not world.ended and world.machine.step == 30


def test_a_vote_that_waits_longer_than_the_budget_ends_the_group_with_a_reason() -> None:
    world = GroupWorld(outage_budget_s=10, lighthouse="lh.example:29400")
    world.start()
    world.prepare(2)
    world.vote(0, "failed", 0, at=1, error="aborted")
    world.disconnect()
    world.pass_s(10)
    assert not world.ended
    world.pass_s(0.25)
    assert world.ended[0].exit_code == exits.GAVE_UP
    assert world.ended[0].reason == (
        "step 0 has been waiting for 10 s, longer than the outage budget; "
        "the lighthouse at lh.example:29400 is not in touch; start this group again"
    )
    assert f"{world.said(m.Died)[0].cause}; start this group again" == world.ended[0].reason


def test_the_first_epoch_may_take_ten_budgets() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.connect()
    world.ready()
    world.pass_s(100)
    assert not world.ended
    world.pass_s(0.25)
    assert world.ended[0].exit_code == exits.GAVE_UP


def test_computing_is_not_waiting() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.start()
    world.pass_s(1000)
    assert not world.ended


def test_what_the_job_waits_for_is_said_to_a_rank_that_waits_and_to_no_other() -> None:
    world = GroupWorld()
    world.start()
    world.hears(m.Waiting(("g2",), "their promise", 1500))
    assert not world.pushed(0, local.Say)
    world.prepare(2)
    world.vote(0, "failed", 0, at=1, error="x")
    world.hears(m.Waiting(("g2",), "their promise", 1500))
    assert world.pushed(0, local.Say)[0].line == "waiting for g2 (their promise) since 1.5 s"
    world.hears(m.Waiting(("g2",), "their promise", 2500))
    assert len(world.pushed(0, local.Say)) == 1, "said less and less often"
    world.hears(m.Waiting(("g2",), "another reason", 2600))
    assert world.pushed(0, local.Say)[1].line == "waiting for g2 (another reason) since 2.6 s"


# ---------------------------------------------------------------- beats and the own clock


def test_a_beat_says_what_the_slowest_rank_does() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.pass_s(0.25, {0: RankView("reduce", 0, 1.5, 0.0), 1: RankView("compute", 0, 0.0, 0.25)})
    (beat,) = world.said(m.Beat)
    doing = (m.Doing((0,), "reduce", 0, waiting_ms=1500), m.Doing((1,), "compute", 0, stopped_ms=250))
    assert beat == m.Beat(1, 0, "compute", 1500, 250, total=24, ranks=doing, borne_ms=15_000)


def test_it_beats_as_often_as_the_lighthouse_says() -> None:
    world = GroupWorld()
    world.hears(m.Welcome(TERM, 150, 15))
    assert world.machine.beat_s == 0.015


def test_after_a_gap_in_its_own_clock_it_answers_no_vote_until_its_epoch_stands() -> None:
    world = GroupWorld()
    world.start()
    world.freeze_s(2.25)
    assert world.said(m.Query) == [m.Query(epoch(1))]
    world.vote(0, "reduced", 0, at=1)
    assert not world.answers() and world.machine.last is None
    world.hears(m.Stands(epoch(7)))
    assert not world.answers(), "another epoch's"
    world.hears(m.Stands(epoch(1)))
    assert world.answer().verdict == "go"


@pytest.mark.parametrize("first", ["vote", "prepare"])
def test_the_gap_is_seen_by_whatever_comes_first_after_it(first: str) -> None:
    world = GroupWorld()
    world.start()
    world.now += 2.25
    if first == "vote":
        world.vote(0, "reduced", 0, at=1)
        assert not world.answers() and world.said(m.Query)
    else:
        world.prepare(2)
        assert world.said(m.Query) and world.said(m.Promise)


def test_a_gap_within_the_lease_is_nothing() -> None:
    world = GroupWorld()
    world.start()
    world.freeze_s(2.0)
    world.vote(0, "reduced", 0, at=1)
    assert world.answer().verdict == "go" and not world.said(m.Query)


def test_the_query_is_asked_again_on_a_new_stream() -> None:
    world = GroupWorld()
    world.start()
    world.disconnect()
    world.freeze_s(5)
    world.forget()
    world.connect()
    assert world.said(m.Query) == [m.Query(epoch(1))]


def test_an_activation_ends_the_doubt() -> None:
    world = GroupWorld()
    world.start()
    world.freeze_s(5)
    world.prepare(2)
    world.activate(2)
    world.vote(0, "reduced", 0, at=2)
    assert world.answers()[-1].verdict == "go"


def test_a_query_that_nobody_answers_ends_with_the_budget() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.start()
    world.freeze_s(5)
    world.vote(0, "reduced", 0, at=1)
    world.pass_s(10.25)
    assert world.ended[0].exit_code == exits.GAVE_UP and world.machine.last is None


# ---------------------------------------------------------------- nodes


def test_a_node_that_is_gone_ends_the_group_and_is_named() -> None:
    world = GroupWorld(ranks=4)
    world.start()
    cause = "the agent of node 1 (host-b, pid 71) is gone"
    world._carry_out(world.machine.node_gone(cause, 2, world.now))
    (died,) = world.said(m.Died)
    assert (died.cause, died.rank) == (cause, 2)
    assert [end.exit_code for end in world.ended] == [exits.ORPHANED] and world.killed == [cause]
    assert world.machine.owes_word
    assert world.machine.node_gone(cause, 2, world.now) == []


def test_a_node_that_does_not_come_is_given_up() -> None:
    world = GroupWorld(ranks=4)
    world.connect()
    line = "waiting for the agent of node 1 (the group has 2 nodes) since 601 s"
    world._carry_out(world.machine.gives_up(line, world.now))
    assert [end.exit_code for end in world.ended] == [exits.GAVE_UP] and world.killed
    assert world.machine.gives_up("again", world.now) == []


def test_a_lease_longer_than_the_budget_ends_a_group_before_it_is_a_member() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.connect(lease_ms=12_000)
    (end,) = world.ended
    assert end.exit_code == exits.USAGE and not [said for said in world.told if isinstance(said, m.Acknowledged)]
    assert end.reason.startswith("lease_s 12 (--lease-s of the lighthouse) must be below outage_budget_s 10 (given)")


def test_a_member_is_told_of_such_a_lease_and_trains_on() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.start()
    world.disconnect()
    world.connect(lease_ms=12_000)
    assert not world.ended and isinstance(world.told[-1], m.Acknowledged)
    assert world.pushed(0, local.Say)[-1].line.startswith("lease_s 12 (--lease-s of the lighthouse) must be below")
