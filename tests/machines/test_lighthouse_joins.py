"""A group that returns: it heals from the members, follows, and is switched in by a planned change."""

from __future__ import annotations

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Term
from tests.machines.world import FIRST, World


def without_g2() -> World:
    """g2 was killed at step 5; g0 and g1 go on."""
    world = World()
    world.start()
    world.die("g2", step=5)
    for group in ("g0", "g1"):
        world.promise(group, 4)
    world.pass_s(1, {"g0": 6, "g1": 6})
    world.forget_sent()
    return world


def test_who_returns_is_told_where_to_heal_and_members_what_to_copy() -> None:
    world = without_g2()
    world.arrive("g2/i2")
    (copy,) = world.told("g0", m.Copy)
    assert world.told("g1", m.Copy) == [copy] and copy.epoch == world.newest.epoch
    (heal,) = world.told("g2/i2", m.Heal)
    assert heal.step == copy.step and copy.step > 7, "a boundary that nobody has passed when the word arrives"
    assert [donor.group for donor in heal.donors] == ["g0", "g1"]
    assert not world.told("g2/i2", m.Refused) and not world.is_asked("g0")


def test_a_joiner_that_has_caught_up_is_prepared_and_switched_in() -> None:
    world = without_g2()
    world.arrive("g2/i2")
    world.beat("g2/i2", 8, "heal", epoch=0)
    world.beat("g2/i2", 9, "replay", epoch=0)
    assert not world.told("g2/i2", m.Prepare), "it does not lag by one step yet"
    world.beat("g2/i2", 12, "follow", epoch=0)
    planned = world.planned("g2/i2")
    assert planned.groups == ("g0", "g1", "g2") and planned.members[2].incarnation == "i2"
    assert world.planned("g0") == planned and planned.base == world.newest.epoch
    world.beat("g0", 14, epoch=planned.epoch.number)
    assert world.newest == planned
    for group in ("g1", "g2/i2"):
        world.beat(group, 14, epoch=planned.epoch.number)
    assert world.told("g0", m.Copy)[-1].step == m.RELEASE, "nobody needs the copy any more"


def test_two_joiners_share_a_boundary() -> None:
    world = World(groups=4)
    world.start()
    world.die("g2")
    world.die("g3")
    for group in ("g0", "g1"):
        world.promise(group, 4)
    world.pass_s(0.25, {"g0": 5, "g1": 5})
    world.forget_sent()
    world.arrive("g2/i2")
    world.arrive("g3/i2")
    assert world.told("g2/i2", m.Heal)[0].step == world.told("g3/i2", m.Heal)[0].step
    assert len(world.told("g0", m.Copy)) == 1


def test_a_joiner_whose_donors_are_gone_gets_another_boundary() -> None:
    world = without_g2()
    world.arrive("g2/i2")
    first = world.told("g2/i2", m.Heal)[0].step
    world.pass_s(2, {"g0": 20, "g1": 20})
    world.say("g2/i2", m.Lost("no donor holds the state before step 8"))
    assert len(world.told("g2/i2", m.Heal)) == 1, "after a breath"
    world.pass_s(1, {"g0": 20, "g1": 20})
    assert world.told("g2/i2", m.Heal)[-1].step > first
    assert world.noted("heal_failed")[0]["group"] == "g2"
    assert [note["attempt"] for note in world.noted("healing")] == [1, 2]


def test_a_joiner_whose_stream_breaks_while_it_is_prepared_is_told_again() -> None:
    world = without_g2()
    world.arrive("g2/i2")
    world.beat("g2/i2", 12, "follow", epoch=0)
    assert world.planned("g2/i2").groups == ("g0", "g1", "g2")
    world.forget_sent()
    world.arrive("g2/i2", follows=True)  # a new stream: what was under way on the old one may be lost
    assert world.planned("g2/i2").groups == ("g0", "g1", "g2")


def test_a_joiner_that_dies_while_it_is_prepared_is_planned_out_again() -> None:
    world = without_g2()
    world.arrive("g2/i2")
    world.beat("g2/i2", 12, "follow", epoch=0)
    world.die("g2/i2")
    assert world.planned("g0").groups == ("g0", "g1")
    assert not world.is_asked("g0"), "its death costs the members nothing"


def test_a_death_among_the_members_does_not_disturb_the_joiner() -> None:
    world = World(groups=4)
    world.start()
    world.die("g3")
    for group in ("g0", "g1", "g2"):
        world.promise(group, 4)
    world.arrive("g3/i2")
    world.beat("g3/i2", 8, "heal", epoch=0)
    world.forget_sent()
    world.die("g2")
    for group in ("g0", "g1"):
        world.promise(group, 7)
    assert world.newest.groups == ("g0", "g1") and not world.told("g3/i2", m.Fence)
    world.beat("g3/i2", 12, "follow", epoch=0)
    assert world.planned("g0").groups == ("g0", "g1", "g3")


def test_below_the_minimum_a_joiner_heals_from_those_who_stand_and_is_named_in_the_recovery() -> None:
    world = World(groups=2, minimum=2)
    world.start()
    world.die("g1", step=5)
    world.promise("g0", 4, tuple(range(12)))
    assert not world.told("g0", m.Activate)
    world.arrive("g1/i2")
    (copy,) = world.told("g0", m.Copy)
    assert copy.step == 5, "the boundary at which g0 stands"
    world.beat("g1/i2", 5, "follow", epoch=0)
    world.promise("g0", 4, tuple(range(12)))
    world.promise("g1/i2", 4, entry=world.newest.epoch)
    activate = world.activate("g1/i2")
    assert activate.first_step == 5 and activate.membership.groups == ("g0", "g1")
    assert world.shares("g0")["g1"] == tuple(range(12, 24))


def test_groups_that_start_with_another_state_join_from_the_lowest_slot() -> None:
    world = World(groups=3)
    for group, state in (("g0", "a"), ("g1", "b"), ("g2", "a")):
        world.hello(group)
        world.say(group, m.Join((f"{group}:2",), {"w": "float32[2]"}, state))
    world.promise_all()
    assert world.newest.groups == ("g0", "g2")
    world.pass_s(0.25, {"g0": 0, "g2": 0})
    assert world.told("g1", m.Heal)[0].donors[0].group == "g0"


def test_a_group_that_died_twice_within_ten_minutes_is_held_back() -> None:
    world = without_g2()
    world.arrive("g2/i2")
    assert world.told("g2/i2", m.Heal)
    world.die("g2/i2")
    world.pass_s(1, {"g0": 8, "g1": 8})
    world.arrive("g2/i3")
    assert not world.told("g2/i3", m.Heal)
    (waiting,) = world.told("g2/i3", m.Waiting)
    assert (waiting.whom, waiting.why) == (("g2",), "lost 2 times within 10 minutes: held back for 5 s")
    world.pass_s(6, {"g0": 30, "g1": 30, "g2/i3": 0})
    assert world.told("g2/i3", m.Heal)


def test_a_joiner_that_could_not_follow_is_told_when_the_last_member_dies() -> None:
    """It was taken in, lost the entries, and is no member that anybody can heal from: else it waits for ever."""
    world = without_g2()
    world.arrive("g2/i2")
    world.beat("g2/i2", 12, "follow", epoch=0)
    planned = world.planned("g0")
    world.beat("g0", 13, epoch=planned.epoch.number)
    world.say("g2/i2", m.Lost("no donor is left"))
    for group in ("g0", "g1"):
        world.die(group)
    assert world.machine.newest is None and world.told("g2/i2", m.Fence)


def test_no_boundary_is_named_before_every_member_in_touch_has_said_where_it_is() -> None:
    """Another lighthouse takes over at step 500: a boundary counted from nothing would lie far in the past."""
    world = World(groups=3)
    world.start()
    known = world.newest
    world.die("g2", step=499)
    for group in ("g0", "g1"):
        world.promise(group, 498)
    known = world.newest
    world.restart(log=False)
    world.arrive("g0", "g1", known=known, acknowledged=Term(1, "lh"))
    world.arrive("g2/i2")
    world.tick()
    world.beat("g0", 500)
    world.tick()
    assert not world.told("g2/i2", m.Heal) and not world.told("g0", m.Copy), "g1 may be a step ahead of it"
    world.beat("g1", 501)
    world.tick()
    assert world.told("g2/i2", m.Heal)[0].step > 502 and world.told("g1", m.Copy)


def test_a_member_whose_stream_broke_says_anew_where_it_is() -> None:
    world = without_g2()
    known = world.newest
    world.cut("g0", "g1")
    world.now += 60
    world.arrive("g0", "g1", known=known, acknowledged=FIRST)
    world.arrive("g2/i2")
    assert not world.told("g2/i2", m.Heal), "what they said a minute ago is no word of where they are"
    world.pass_s(0.25, {"g0": 300, "g1": 300})
    assert world.told("g2/i2", m.Heal)[0].step > 300


def test_followers_that_outlive_all_members_begin_the_next_job_with_what_they_hold() -> None:
    """Below the minimum a follower is asked with the members; once all of those are gone it cannot speak for them."""
    world = World(groups=2)
    world.start()
    world.die("g1", step=5)
    world.promise("g0", 4)
    world.arrive("g1/i2")
    world.beat("g1/i2", 5, "follow", epoch=0)
    world.die("g0", step=6)
    assert world.machine.newest is None
    world.arrive("g0/i2")
    world.promise("g0/i2", -1)
    world.promise("g1/i2", 5, entry=world.machine.broken_off)
    assert world.newest.groups == ("g1",) and world.activate("g1/i2").first_step == 6
    world.tick()
    assert world.told("g0/i2", m.Heal), "it takes the state that there is"
