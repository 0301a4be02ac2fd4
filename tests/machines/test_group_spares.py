"""A group that the job has no use for now, and a spare that stands in the reduce all day: their managers' side."""

from __future__ import annotations

import dataclasses

from groupworld import GroupWorld, membership

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import local
from lightkeeper.manager.machine import RankView

WHY = "parked: 2 groups are here, the job has 2; joins when one is lost"


def parked() -> GroupWorld:
    world = GroupWorld(outage_budget_s=1.0)
    world.connect(lease_ms=500)
    world.ready()
    world.hears(m.Outside(None, WHY))
    return world


def test_that_it_is_parked_is_said_in_one_line_and_once() -> None:
    world = parked()
    world.hears(m.Outside(None, WHY))
    world.disconnect()
    world.connect()
    world.hears(m.Outside(None, WHY))
    assert [say.line for say in world.pushed(0, local.Say)] == [WHY]


def test_to_be_parked_is_not_to_wait_too_long() -> None:
    world = parked()
    world.pass_s(100)
    assert not world.ended


def test_who_is_parked_no_more_waits_like_any_joiner() -> None:
    world = parked()
    world.pass_s(100)
    world.hears(m.Outside())
    world.pass_s(9)
    assert not world.ended
    world.pass_s(2)
    assert "longer than the outage budget" in world.ended[0].reason


def test_a_lighthouse_that_is_away_is_waited_for_as_long_as_by_any_joiner() -> None:
    world = parked()
    world.pass_s(100)
    world.disconnect()
    world.pass_s(0.75)
    assert not world.ended
    world.connect(lease_ms=500)
    world.hears(m.Outside(None, WHY))
    world.pass_s(50)
    world.disconnect()
    world.pass_s(1.5)
    assert "could not be reached for 1 s" in world.ended[0].reason


def test_a_parked_group_heals_when_it_is_told_to() -> None:
    world = parked()
    world.pass_s(100)
    world.hears(m.Heal(7, membership(2, "g0").members))
    assert world.answer().verdict == "heal" and not world.machine.parked


def test_a_parked_group_ends_well_with_the_job() -> None:
    world = parked()
    world.hears(m.Stop("finished: step 9 is final", True))
    assert (world.answer().verdict, world.answer().ok) == ("stop", True)
    world.rank_ends(0, 0)
    assert world.ended[0].exit_code == 0


def test_who_is_outside_says_to_any_lighthouse_that_a_job_runs() -> None:
    world = parked()
    running = membership(4, "g0", "g2")
    world.hears(m.Outside(running, WHY))
    world.disconnect()
    world.forget()
    world.connect()
    assert world.said(m.Hello)[0].seen == running
    world.hears(m.Outside())
    world.forget()
    world.connect()
    assert world.said(m.Hello)[0].seen is None, "that job has ended"


# ---------------------------------------------------------------- a spare


def standing(speeds: tuple[int, ...]) -> GroupWorld:
    """g1 of three, in epoch 1 with these speeds; in each of the first steps it stands for ten seconds."""
    world = GroupWorld()
    world.connect()
    world.ready()
    world.prepare(1)
    members = dataclasses.replace(membership(1, "g0", "g1", "g2"), speeds=speeds)
    shares = tuple(m.Share(group, ()) for group in members.groups)
    world.hears(m.Activate(members, 0, 24, shares))
    for step in range(3):
        for tenths in range(1, 101):
            look(world, step, tenths / 10)
        world.vote(0, "reduced", step, 1)
    return world


def look(world: GroupWorld, step: int, waiting_s: float) -> int:
    """A tenth of a second passes; what it says of standing, in milliseconds."""
    world.now += 0.1
    world.told.clear()
    world._carry_out(world.machine.tick({0: RankView("reduce", step, waiting_s, 0.0)}, world.now))
    world.hears(m.Ask())
    return int(world.said(m.Beat)[-1].waiting_ms)


def test_a_spare_that_stands_as_long_as_usual_waits_for_nobody() -> None:
    """Else every silence would last as long as somebody stands, and be taken for a death."""
    world = standing(speeds=(1000, 0, 1000))
    assert look(world, 3, 10.0) == 0 and look(world, 3, 15.0) == 0
    assert look(world, 3, 18.0) == 3000, "half as long again as usual, and from there on"


def test_a_group_that_works_and_stands_waits_for_others() -> None:
    world = standing(speeds=(1000, 900, 1000))
    assert look(world, 3, 10.0) == 10_000


def test_a_spare_is_dealt_nothing_and_a_promoted_one_what_is_left() -> None:
    world = standing(speeds=(1000, 0, 1000))
    assert world.answer().verdict == "go" and world.answer().share == ()
    world.prepare(2)
    members = dataclasses.replace(membership(2, "g0", "g1", base=1), speeds=())
    shares = (m.Share("g0", tuple(range(12))), m.Share("g1", tuple(range(12, 24))))
    world.hears(m.Activate(members, 3, 24, shares))
    world.vote(0, "failed", 3, 1)
    plan = world.answer().plan
    assert plan is not None and plan.share == tuple(range(12, 24)) and not plan.leads


def test_the_lowest_slot_that_works_leads() -> None:
    def leads(slot: int, *speeds: int) -> bool:
        return local.Plan(
            epoch=1, term=1, lighthouse="lh", members=("a", "b", "c"), slot=slot, step=0, share=(), total=1,
            speeds=speeds,
        ).leads  # fmt: skip

    assert [leads(slot) for slot in range(3)] == [True, False, False]
    assert [leads(slot, 0, 1, 1) for slot in range(3)] == [False, True, False]
    assert [leads(slot, 0, 0, 0) for slot in range(3)] == [True, False, False]
