"""Spares that take over in the step in which a group is lost, groups that are parked, and joins that are batched."""

from __future__ import annotations

from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Superseded
from lightkeeper.lighthouse.names import EVEN, Term
from lightkeeper.lighthouse.status import status
from tests.machines.world import FIRST, World

QUARTERS = {f"g{i}": tuple(range(6 * i, 6 * i + 6)) for i in range(4)}


def job(spares: int = 1, **more: Any) -> World:
    """Four members and a spare, at step 5."""
    world = World(groups=4 + spares, spares=spares, **more)
    world.start()
    world.pass_s(0.25, {f"g{i}": 5 for i in range(4 + spares)})
    world.forget_sent()
    return world


def lose(world: World, group: str, step: int = 5) -> None:
    """A group is killed in a reduce, and the others promise."""
    world.die(group, step=step)
    held = {name: share for name, share in QUARTERS.items() if name != group}
    world.promise_all(step - 1, held)


def taken_in(world: World, speaker: str, step: int) -> None:
    """A joiner has caught up, and the entry with all flags makes it a member."""
    world.beat(speaker, step, "follow", epoch=0)
    planned = world.planned(speaker)
    for member in planned.members:
        name = speaker if speaker.startswith(member.group) else member.group
        world.beat(name, step, epoch=planned.epoch.number)


def states(world: World) -> dict[str, str]:
    return {group.group: group.state for group in status(world.machine, world.now).groups}


def test_the_last_slot_is_the_spare_of_the_first_epoch() -> None:
    world = job()
    assert world.newest.speeds == (EVEN, EVEN, EVEN, EVEN, 0) and world.newest.spares == ("g4",)
    assert world.noted("activated")[0]["spares"] == ["g4"] and not world.noted("promoted")
    assert states(world) == {**dict.fromkeys(QUARTERS, "member"), "g4": "spare"}


def test_a_group_that_was_set_up_as_a_spare_is_one() -> None:
    world = World(groups=3, spares=1)
    world.arrive("g0", role="spare")
    world.arrive("g1", "g2")
    world.promise_all()
    assert world.newest.spares == ("g0",)


def test_the_spare_gets_the_orphans_of_that_step() -> None:
    world = job()
    lose(world, "g1")
    assert world.shares("g4") == {**{g: QUARTERS[g] for g in ("g0", "g2", "g3")}, "g4": QUARTERS["g1"]}
    assert world.newest.groups == ("g0", "g2", "g3", "g4") and not world.newest.spares
    (promoted,) = world.noted("promoted")
    assert (promoted["group"], promoted["step"]) == ("g4", 5)


def test_who_returns_is_the_spare() -> None:
    world = job()
    lose(world, "g1")
    world.pass_s(1, dict.fromkeys(("g0", "g2", "g3", "g4"), 7))
    world.arrive("g1/i2")
    taken_in(world, "g1/i2", 12)
    assert world.newest.groups[-1] == "g1" and world.newest.spares == ("g1",)
    assert world.noted("activated")[-1]["spares"] == ["g1"]


def test_a_group_that_was_set_up_as_a_spare_makes_way_for_one_that_comes_in_and_never_later() -> None:
    world = World(groups=3, spares=1)
    world.arrive("g2", role="spare")
    world.arrive("g0", "g1")
    world.promise_all()
    world.die("g1", step=5)
    world.promise_all(4)
    assert not world.newest.spares, "the spare works"
    world.pass_s(1, {"g0": 7, "g2": 7})
    world.arrive("g1/i2")
    taken_in(world, "g1/i2", 12)
    assert world.newest.spares == ("g2",)
    world.pass_s(5, {"g0": 20, "g1/i2": 20, "g2": 20})
    assert world.newest.spares == ("g2",) and len(world.noted("activated")) == 3


def test_a_worker_that_leaves_is_replaced_in_the_same_change() -> None:
    world = job()
    world.say("g2", m.Leave("SIGTERM"))
    planned = world.planned("g4")
    assert planned.groups == ("g0", "g1", "g3", "g4") and not planned.spares
    for group in ("g0", "g1", "g3", "g4"):
        world.beat(group, 8, epoch=planned.epoch.number)
    assert [note["group"] for note in world.noted("promoted")] == ["g4"]


def test_a_spare_that_leaves_or_dies_changes_no_share() -> None:
    world = job()
    world.die("g4", step=5)
    world.promise_all(4, QUARTERS)
    assert world.shares("g0") == QUARTERS and not world.noted("promoted")


def test_a_lone_spare_does_all_of_the_step() -> None:
    world = job()
    for i in range(4):
        world.die(f"g{i}", step=5)
    world.promise("g4", 4)
    assert world.shares("g4") == {"g4": tuple(range(24))}
    assert world.activate("g4").first_step == 5, "nothing is lost"


def test_spares_count_for_the_minimum() -> None:
    world = job(spares=2, minimum=4)
    for i in (0, 1):
        world.die(f"g{i}", step=5)
    world.promise_all(4, {"g2": QUARTERS["g2"], "g3": QUARTERS["g3"]})
    assert world.newest.groups == ("g2", "g3", "g4", "g5")
    world.die("g2", step=5)
    for group in ("g3", "g4", "g5"):
        world.promise(group, 4)
    assert len(world.newest.groups) == 4, "three are too few"


# ---------------------------------------------------------------- parked


def test_a_group_beyond_members_and_spares_is_parked_and_costs_nothing() -> None:
    world = job()
    world.arrive("g5")
    (parked,) = world.told("g5", m.Outside)
    assert parked.why == "parked: 5 groups are here, the job has 4 + 1; joins when one is lost"
    world.pass_s(5, {f"g{i}": 30 for i in range(5)})
    assert not world.told("g5", m.Heal) and not world.told("g0", m.Copy) and len(world.told("g5", m.Outside)) == 1
    assert states(world)["g5"] == "parked" and [note["group"] for note in world.noted("parked")] == ["g5"]
    assert world.machine._quiet, "nobody looks at all members for its sake"


def test_a_parked_group_takes_the_place_of_one_that_is_lost() -> None:
    world = job()
    world.arrive("g5", "g6")
    lose(world, "g1")
    world.pass_s(1, dict.fromkeys(("g0", "g2", "g3", "g4"), 7))
    assert world.told("g5", m.Heal) and world.told("g5", m.Outside)[-1].why == "" and not world.told("g6", m.Heal)
    world.arrive("g1/i2")
    assert world.told("g1/i2", m.Outside) and not world.told("g1/i2", m.Heal), "its place is taken"
    taken_in(world, "g5", 12)
    assert world.newest.spares == ("g5",)
    world.pass_s(1, dict.fromkeys(world.newest.groups, 13))
    assert world.told("g0", m.Copy)[-1].step == m.RELEASE, "nobody keeps entries for who is parked"


def test_where_no_hot_spare_is_a_parked_group_works() -> None:
    world = job(spares=0)
    world.arrive("g4")
    lose(world, "g1")
    world.pass_s(1, dict.fromkeys(("g0", "g2", "g3"), 7))
    taken_in(world, "g4", 12)
    assert world.newest.groups == ("g0", "g2", "g3", "g4") and not world.newest.spares


def test_a_parked_group_is_told_again_on_another_stream() -> None:
    world = job()
    world.arrive("g5")
    world.cut("g5")
    world.arrive("g5")
    assert len(world.told("g5", m.Outside)) == 2


def test_a_parked_group_ends_well_with_the_job() -> None:
    world = job()
    world.arrive("g5")
    world.say("g0", m.Finished(world.newest.epoch, 40))
    world.tick()
    (stop,) = world.told("g5", m.Stop)
    assert stop.ok and stop.reason == "finished: step 40 is final"


def test_a_parked_group_takes_over_if_all_others_leave() -> None:
    world = job()
    world.arrive("g5")
    for i in range(5):
        world.say(f"g{i}", m.Leave("SIGTERM"))
    world.pass_s(0.25, {f"g{i}": 6 for i in range(5)})
    assert not world.told("g5", m.Stop) and world.told("g5", m.Heal), "one stays to hand its state on"


def test_whoever_heals_is_not_sent_back_for_one_that_returns_from_the_dead() -> None:
    """g1 was called gone for its silence, and a parked group healed in its place."""
    world = job()
    world.arrive("g5")
    lose(world, "g1")
    world.pass_s(1, dict.fromkeys(("g0", "g2", "g3", "g4"), 7))
    world.arrive("g6")
    assert world.told("g5", m.Heal)
    world.say("g4", m.Leave("SIGTERM"))
    assert world.told("g6", m.Heal), "a second seat"
    world.machine.groups["g4"].leaving = ""
    world.tick()
    assert [bool(parked.why) for parked in world.told("g6", m.Outside)] == [True, False], "and it is not parked again"


def test_a_flapping_group_leaves_its_seat_to_a_parked_one() -> None:
    world = job()
    lose(world, "g1")
    world.pass_s(1, dict.fromkeys(("g0", "g2", "g3", "g4"), 7))
    world.arrive("g1/i2")
    world.die("g1/i2")
    world.pass_s(1, dict.fromkeys(("g0", "g2", "g3", "g4"), 8))
    world.arrive("g1/i3")
    assert not world.told("g1/i3", m.Heal), "it is held back"
    world.arrive("g5")
    assert world.told("g5", m.Heal) and world.told("g1/i3", m.Outside)


def test_who_waits_for_a_job_whose_members_are_all_gone_is_parked_no_more() -> None:
    world = World(groups=1)
    world.start()
    world.arrive("g1")
    assert world.told("g1", m.Outside)
    world.die("g0")
    assert world.told("g1", m.Outside)[-1].why == ""
    world.tick()
    assert world.is_asked("g1"), "it is the first group of the next run"


def test_the_first_epoch_takes_those_that_came_first() -> None:
    world = World(groups=2)
    world.hello("g0")
    world.arrive("g2", "g1")
    assert world.is_asked("g1") and world.is_asked("g2")
    world.now += 0.1
    world.join("g0")
    world.promise_all()
    world.tick()
    assert world.newest.groups == ("g1", "g2") and world.told("g0", m.Outside)


def test_so_many_groups_outside_do_not_begin_the_job_anew_at_a_lighthouse_that_lost_its_log() -> None:
    """They are as many as the job has, but they are not the job's: its members go on, and cannot call just now."""
    world = World(groups=2)
    world.start()
    world.arrive("g2", "g3")
    (outside,) = world.told("g2", m.Outside)
    assert outside.membership == world.newest
    known = world.newest
    world.restart(log=False)
    world.arrive("g2", seen=outside.membership)
    world.arrive("g3")
    world.pass_s(30, {"g2": 0, "g3": 0})
    assert not world.is_asked("g2") and world.newest == known
    assert "they may be training without this lighthouse" in world.reason("g2")
    world.arrive("g0", "g1", known=known, acknowledged=Term(1, "lh"))
    world.tick()
    assert world.noted("took_over") and [bool(o.why) for o in world.told("g2", m.Outside)][-1]


def test_what_was_seen_of_an_epoch_that_the_log_has_outlived_is_no_news() -> None:
    world = World(groups=1)
    world.start()
    world.arrive("g1")
    (outside,) = world.told("g1", m.Outside)
    world.say("g0", m.Finished(world.newest.epoch, 9))
    world.pass_s(1)
    world.restart()
    world.arrive("g1", seen=outside.membership)
    world.tick()
    assert world.is_asked("g1"), "it is the first group of the next run"


def test_a_reserve_begins_no_job_and_counts_for_none() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.arrive("g1", role="reserve")
    world.pass_s(5, {"g0": 0, "g1": 0})
    assert not world.is_asked("g0") and "1 more group: the first epoch needs 2" in world.reason("g1")
    world.arrive("g2")
    world.promise_all()
    world.tick()
    assert world.newest.groups == ("g0", "g2") and world.told("g1", m.Outside)[-1].why.startswith("parked: 2 groups")


def test_a_reserve_that_is_given_a_place_makes_way_for_a_member() -> None:
    world = World(groups=2)
    world.start()
    world.arrive("g2", role="reserve")
    world.die("g1")
    world.promise_all(4)
    world.pass_s(0.25, {"g0": 5})
    taken_in(world, "g2", 8)
    assert world.newest.groups == ("g0", "g2") and not world.newest.spares


def test_a_reserve_is_sent_on_to_where_the_job_runs() -> None:
    """Else reserves and half of the groups would be as many as begin it a second time."""
    world = World(groups=2)
    for group, role in (("g0", "member"), ("g1", "reserve"), ("g2", "reserve")):
        world.hello(group, role=role, place=2)
        world.pass_s(1)
    assert "it knows no such job, and begins one once it has heard 1 more group" in world.reason("g0")
    assert world.reason("g2") == "standby: no job runs here that g2 could be a reserve of"


def test_a_reserve_that_obeyed_a_lighthouse_whose_log_is_lost_comes_in_and_ends_no_reign() -> None:
    """All members obey this one: the reserve's word of the one before is no news, however often it is said."""
    world = World(groups=2)
    world.start()
    known = world.newest
    world.restart(log=False)
    for _ in range(2):
        world.arrive("g0", "g1", known=known, acknowledged=FIRST)
        world.logged.clear()
        world.arrive_if_taken("g2", role="reserve", place=1, acknowledged=FIRST, seen=known)
        assert not world.told("g2", m.Refused) and not world.logged and world.machine.reigns
        world.cut("g2")


def test_who_comes_while_a_recovery_waits_is_told_that_the_job_runs() -> None:
    """Else those who came meanwhile begin it anew at a lighthouse whose log is lost, and who is waited for lives."""
    world = World(groups=3)
    world.start()
    known = world.newest
    world.die("g0")
    world.die("g1")
    world.arrive("g0/i2", "g1/i2")
    assert world.told("g0/i2", m.Outside)[-1].membership == known == world.told("g1/i2", m.Outside)[-1].membership
    assert world.is_asked("g2") and not world.told("g2", m.Activate)


def test_a_reserve_that_obeys_a_higher_term_ends_the_reign() -> None:
    """Whoever has that term may have taken the job over."""
    world = World(groups=2)
    world.start()
    world.hello("g2", role="reserve", place=1, acknowledged=Term(2, "other"), seen=world.newest)
    assert Superseded() in world.logged


def test_a_job_is_not_over_while_one_that_a_planned_change_took_in_may_train() -> None:
    """The entry with all flags came, the members died and were started again, and only a reserve is in that epoch."""
    world = World(groups=2)
    world.start()
    world.arrive("g2", role="reserve")
    world.die("g1")
    world.promise_all(4)
    world.pass_s(0.25, {"g0": 5})
    world.beat("g2", 8, "follow", epoch=0)
    planned = world.planned("g2")
    world.restart()
    world.pass_s(5)
    world.arrive("g0/i2", "g1/i2")
    world.pass_s(5, {"g0/i2": 0, "g1/i2": 0})
    assert not world.is_asked("g0/i2"), "g2 may go on in the planned epoch"
    assert "g2" in world.machine.waiting(world.now)[0], "whoever is on call is told for whom it waits"
    world.arrive("g2", known=planned, acknowledged=FIRST, role="reserve")
    world.pass_s(1, {"g0/i2": 0, "g1/i2": 0, "g2": 9})
    assert world.newest.groups[-1] == "g2"


def test_the_operators_word_on_one_that_a_planned_change_took_in_and_that_no_stream_names() -> None:
    world = World(groups=2)
    world.start()
    world.arrive("g2", role="reserve")
    world.die("g1")
    world.promise_all(4)
    world.pass_s(0.25, {"g0": 5})
    world.beat("g2", 8, "follow", epoch=0)
    world.restart()
    world.pass_s(5)
    world.arrive("g0/i2", "g1/i2")
    world.pass_s(5, {"g0/i2": 0, "g1/i2": 0})
    assert not world.is_asked("g0/i2") and "g2" not in world.machine.groups
    assert not world.fence("g0", "ann") and not world.fence("g2", "ann")
    world.tick()
    assert world.is_asked("g0/i2") and world.is_asked("g1/i2"), "the job begins anew"


# ---------------------------------------------------------------- joins


def two_return(**more: Any) -> World:
    """g2 and g3 of four are away, and come back; g2 has caught up."""
    world = World(groups=4, **more)
    world.start()
    for group in ("g2", "g3"):
        world.die(group)
    world.promise_all(4)
    world.pass_s(0.25, {"g0": 5, "g1": 5})
    world.arrive("g2/i2", "g3/i2")
    world.forget_sent()
    return world


def test_who_is_ready_together_is_taken_in_together() -> None:
    world = two_return()
    world.machine.planned_s = world.now  # there was a change just now
    for speaker in ("g2/i2", "g3/i2"):
        world.beat(speaker, 8, "follow", epoch=0)
    assert not world.told("g0", m.Prepare)
    world.pass_s(1.25, {"g0": 8, "g1": 8})
    assert [p.planned.groups for p in world.told("g0", m.Prepare)] == [("g0", "g1", "g2", "g3")]


def test_there_is_one_planned_change_in_an_interval() -> None:
    world = two_return()
    taken_in(world, "g2/i2", 8)
    assert world.newest.groups == ("g0", "g1", "g2")
    world.beat("g3/i2", 9, "follow", epoch=0)
    world.pass_s(0.5, {"g0": 9, "g1": 9, "g2/i2": 9})
    assert len(world.told("g0", m.Prepare)) == 1
    world.pass_s(1, {"g0": 9, "g1": 9, "g2/i2": 9})
    assert world.planned("g0").groups == ("g0", "g1", "g2", "g3")


def test_without_an_interval_each_is_taken_in_as_it_comes() -> None:
    world = two_return()
    world.machine.bounds = type(world.machine.bounds)(2.0, 0.25, admit_interval_s=0.0)
    taken_in(world, "g2/i2", 8)
    world.beat("g3/i2", 9, "follow", epoch=0)
    assert len(world.told("g0", m.Prepare)) == 2


def test_who_leaves_does_not_wait_for_the_interval() -> None:
    world = two_return()
    taken_in(world, "g2/i2", 8)
    world.beat("g3/i2", 9, "follow", epoch=0)
    world.say("g1", m.Leave("SIGTERM"))
    assert world.planned("g0").groups == ("g0", "g2", "g3"), "and whoever is ready comes in with it"
