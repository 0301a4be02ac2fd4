"""The group that keeps the job's last committed step: what its ranks are told, and how long they may take over it."""

from __future__ import annotations

import pytest
from groupworld import GroupWorld, epoch

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits
from lightkeeper.manager.machine import RankView

LOST = m.Stop("quorum lost: g0, g2 lost", ok=False, keep="g1", quorum_lost=True)
ASKED = m.Stop("all groups asked to leave: SIGTERM", ok=True, keep="g1")
SAVING = {rank: RankView("checkpoint", 1, 0.0, 0.0, idle_s=100.0, expected_s=300.0) for rank in range(2)}


def told(stop: m.Stop, ranks: int = 2, **settings: float) -> GroupWorld:
    """The group has committed step 0, stands at step 1, and all of its ranks are told to stop."""
    world = GroupWorld(ranks=ranks, **settings)
    world.start()
    world.vote_all("reduced", 0, at=1)
    world.prepare(2)
    world.forget()
    world.hears(stop)
    world.vote_all("failed", 1, at=1, error="aborted")
    return world


@pytest.mark.parametrize("stop", [LOST, ASKED], ids=["lost", "asked"])
def test_all_ranks_of_the_keeper_are_told_to_keep_it_and_no_others(stop: m.Stop) -> None:
    world = told(stop)
    assert [(a.verdict, a.ok, a.keep, a.reason) for r in range(2) for a in world.answers(r)] == [
        ("stop", stop.ok, True, stop.reason)
    ] * 2
    other = told(m.Stop(stop.reason, stop.ok, "", stop.quorum_lost))
    assert not other.answer().keep and other.answer().reason == stop.reason


@pytest.mark.parametrize(
    ("stop", "rank_exit", "code"), [(LOST, 1, exits.GAVE_UP), (LOST, 0, exits.GAVE_UP), (ASKED, 0, 0)]
)
def test_it_ends_once_all_of_its_ranks_have(stop: m.Stop, rank_exit: int, code: int) -> None:
    world = told(stop)
    world.rank_ends(1, rank_exit)
    assert not world.ended and not world.killed, "rank 0 may still be saving its part"
    world.rank_ends(0, rank_exit)
    assert [end.exit_code for end in world.ended] == [code]
    assert not world.said(m.Died), "nobody is called lost"


def test_a_group_that_does_not_keep_it_ends_with_its_first_rank() -> None:
    world = told(m.Stop(LOST.reason, False, "", True))
    world.rank_ends(1, 1)
    assert [end.exit_code for end in world.ended] == [exits.GAVE_UP] and world.killed


def test_one_that_loses_a_rank_meanwhile_has_nothing_whole_to_save_and_ends() -> None:
    world = told(LOST)
    world.rank_ends(1, -9)
    assert [end.exit_code for end in world.ended] == [exits.GAVE_UP] and world.killed


@pytest.mark.parametrize(("stop", "code"), [(LOST, exits.GAVE_UP), (ASKED, exits.GAVE_UP)])
def test_a_save_that_takes_too_long_ends_at_the_deadline_and_says_so(stop: m.Stop, code: int) -> None:
    world = told(stop, stop_deadline_s=200.0)
    world.rank_ends(0, 0)
    world.pass_s(199, {1: SAVING[1]})
    assert not world.ended
    world.pass_s(2, {1: SAVING[1]})
    (end,) = world.ended
    assert end.exit_code == code and world.killed
    assert end.reason == "rank 1 has not ended 200 s after it was told to keep step 0 (stop_deadline_s)"


def test_nothing_that_takes_long_meanwhile_is_held_against_it() -> None:
    """Neither a phase without a declared time, nor a lighthouse that is away, nor the next job."""
    world = told(LOST, outage_budget_s=60.0)
    quiet = {rank: RankView("vote", 1, 0.0, 0.0, idle_s=250.0, asks_s=250.0) for rank in range(2)}
    world.disconnect()
    world.pass_s(200, quiet)
    world.connect()
    assert not world.said(m.Join) and not world.said(m.Failed)
    world.hears(m.Fence("the job that it was in has ended"))
    world.hears(m.Refused("no place"))
    world.hears(m.Drain("drained by ann", 1000))
    asked_s = len(world.said(m.Promise))
    world.hears(m.Prepare(epoch(7)))
    world.pass_s(50, quiet)
    assert not world.ended and not world.killed and len(world.said(m.Promise)) == asked_s


def test_a_person_who_asks_twice_need_not_wait_for_it() -> None:
    world = told(LOST)
    world._carry_out(world.machine.asked_to_leave("SIGTERM", world.now, by="launcher"))
    assert not world.ended
    world._carry_out(world.machine.asked_to_leave("SIGTERM", world.now, by="launcher"))
    assert [end.exit_code for end in world.ended] == [exits.ASKED]


def test_a_notice_of_its_machine_ends_the_save_when_its_time_is_over() -> None:
    world = GroupWorld(ranks=1)
    world.start()
    world._carry_out(world.machine.asked_to_leave("notice", world.now, deadline_s=20.0))
    world.hears(ASKED)
    world.vote(0, "failed", 0, at=1, error="aborted")
    world.pass_s(15, {0: SAVING[0]})
    assert not world.ended
    world.pass_s(6, {0: SAVING[0]})
    assert world.ended and world.killed


def test_a_rank_that_is_still_in_its_step_is_watched_until_it_hears_of_it() -> None:
    world = GroupWorld(ranks=1, stall_floor_s=5.0, outage_budget_s=20.0)
    world.start()
    world.hears(LOST)
    assert not world.answers()
    stuck = {0: RankView("compute", 0, 0.0, 0.0, idle_s=250.0)}
    world.pass_s(1, stuck)
    assert world.ended and "rank 0 has made no progress in compute" in world.ended[0].reason


def test_a_hello_says_how_long_the_group_bears_it_below_the_minimum() -> None:
    assert GroupWorld().machine.hello().quorum_wait_s == 30.0
    assert GroupWorld(quorum_wait_s=0.0).machine.hello().quorum_wait_s == 0.0
