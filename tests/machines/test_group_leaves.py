"""A group that is asked to leave: by whom, how often, until when, and in which state."""

from __future__ import annotations

import pytest
from groupworld import GroupWorld, epoch

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local


def asked(world: GroupWorld, reason: str = "SIGTERM", deadline_s: float | None = None, by: str = "launcher") -> None:
    world._carry_out(world.machine.asked_to_leave(reason, world.now, deadline_s, by))


def test_asked_once_it_asks_and_says_so() -> None:
    world = GroupWorld()
    world.start()
    asked(world)
    assert world.said(m.Leave) == [m.Leave("SIGTERM")] and not world.ended
    assert "asked to leave (SIGTERM)" in world.pushed(0, local.Say)[-1].line


def test_asked_twice_by_a_signal_to_the_same_process_it_ends_at_once_and_nobody_is_to_blame() -> None:
    world = GroupWorld()
    world.start()
    asked(world)
    asked(world, "SIGINT")
    assert world.ended[0].exit_code == exits.ASKED and world.killed
    (died,) = world.said(m.Died)
    assert died.cause == "was asked to end at once (SIGINT)" and died.asked


def test_launcher_and_all_ranks_asked_together_is_one_request() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    asked(world)
    for rank in (0, 1):
        world.rank_says(rank, local.AskLeave(reason=f"SIGTERM to rank {rank}", signal=True))
    assert world.said(m.Leave) == [m.Leave("SIGTERM")] and not world.ended
    world.rank_says(1, local.AskLeave(reason="SIGTERM to rank 1", signal=True))
    assert world.ended[0].exit_code == exits.ASKED


def test_asked_again_without_a_signal_only_the_earlier_deadline_counts() -> None:
    world = GroupWorld()
    world.start()
    asked(world, "notice", 30.0, by="")
    world.hears(m.Drain("drained by ann", 5_000))
    asked(world, "notice", 60.0, by="")
    assert len(world.said(m.Leave)) == 1
    world.pass_s(4.75)
    assert not world.ended
    world.pass_s(0.5)
    assert world.ended[0].exit_code == exits.ASKED
    assert world.said(m.Died)[0].cause == "was asked to leave within 5 s (notice) and did not make it"


def test_a_deadline_that_passes_in_good_order_is_nothing() -> None:
    world = GroupWorld()
    world.start()
    asked(world, deadline_s=5.0)
    world.plan(2, "g0", "g2", base=1)
    world.vote(0, "reduced", 0, at=1, activates=2)
    assert world.answer().verdict == "leave" and world.said(m.Left) == [m.Left(epoch(2), 1)]
    world.pass_s(5.25)
    assert [end.exit_code for end in world.ended] == [0] and not world.said(m.Died)


def test_a_group_that_has_left_ends_in_its_own_time_also_if_the_job_ends_first() -> None:
    """Its script may still save; that it is fenced says nothing new."""
    world = GroupWorld()
    world.start()
    asked(world)
    world.plan(2, "g0", "g2", base=1)
    world.vote(0, "reduced", 0, at=1, activates=2)
    assert world.answer().verdict == "leave"
    world.hears(m.Fence("left before step 1: SIGTERM"))
    assert not world.ended and not world.killed
    world.rank_ends(0, 0)
    assert [end.exit_code for end in world.ended] == [0]


def test_a_rank_may_ask_for_its_group() -> None:
    world = GroupWorld()
    world.start()
    for _ in range(2):
        world.rank_says(0, local.AskLeave(reason="spot instance"))
    assert world.said(m.Leave) == [m.Leave("spot instance")] and not world.ended


# ---------------------------------------------------------------- no member


def test_no_member_without_a_lighthouse_goes_at_once_and_well() -> None:
    world = GroupWorld()
    world.ready()
    asked(world)
    (answer,) = world.answers()
    assert answer.verdict == "stop" and answer.ok and "before it was a member: SIGTERM" in answer.reason
    assert answer.asked, "the job goes on without it"
    world.rank_ends(0, 0)
    assert [end.exit_code for end in world.ended] == [0] and not world.said(m.Died)


def test_no_member_with_a_lighthouse_waits_for_its_word() -> None:
    """It may be named in an epoch at this moment."""
    world = GroupWorld()
    world.connect()
    world.ready()
    asked(world)
    assert world.said(m.Leave) and not world.answers()
    world.hears(m.Stop("asked to leave before it was a member: SIGTERM", ok=True))
    assert world.answer().verdict == "stop" and world.answer().ok


def test_ranks_that_have_not_come_yet_are_not_waited_for() -> None:
    world = GroupWorld(ranks=2)
    world.connect()
    asked(world)
    world.hears(m.Stop("asked to leave before it was a member: SIGTERM", ok=True))
    assert [end.exit_code for end in world.ended] == [0] and world.killed


def test_a_group_that_waits_when_the_job_ends_was_not_asked() -> None:
    world = GroupWorld()
    world.connect()
    world.ready()
    world.hears(m.Stop("the run is finished", ok=True))
    assert world.answer().verdict == "stop" and world.answer().ok and not world.answer().asked


# ---------------------------------------------------------------- no lighthouse


@pytest.mark.parametrize(("deadline_s", "after_s"), [(None, 10.0), (4.0, 4.0)])
def test_a_member_waits_for_the_lighthouse_no_longer_than_the_budget_or_its_deadline(
    deadline_s: float | None, after_s: float
) -> None:
    world = GroupWorld(outage_budget_s=10, lighthouse="lh.example:29400")
    world.start()
    world.disconnect()
    world.pass_s(3)
    asked(world, deadline_s=deadline_s)
    world.pass_s(after_s - 0.25)
    assert not world.ended
    world.pass_s(0.5)
    assert world.ended[0].exit_code == exits.ASKED
    reason = world.ended[0].reason
    assert ("lh.example:29400 is away" in reason) == (deadline_s is None) and "(SIGTERM)" in reason


def test_a_lighthouse_that_comes_back_in_time_is_asked() -> None:
    world = GroupWorld(outage_budget_s=10)
    world.start()
    world.disconnect()
    asked(world)
    world.pass_s(9)
    world.forget()
    world.connect()
    assert world.said(m.Leave) == [m.Leave("SIGTERM")]
    world.pass_s(20)
    assert not world.ended, "in touch, a step may take as long as it takes"
