"""Planned changes: everybody consents in the entry, and the lighthouse only learns of it."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m


def leaving(world: World, group: str = "g2") -> None:
    world.say(group, m.Leave("SIGTERM"))


def test_a_planned_leave_is_prepared_for_all_and_in_force_when_a_beat_shows_it() -> None:
    world = World()
    first = world.start()
    leaving(world)
    planned = world.planned("g0")
    assert planned == world.planned("g1") == world.planned("g2")
    assert planned.groups == ("g0", "g1") and planned.base == first and planned.epoch.number == 2
    assert not world.is_asked("g0"), "a planned change asks for no promise"
    world.pass_s(5, {"g0": 3, "g1": 3, "g2": 3})
    assert world.newest.epoch == first
    world.beat("g0", 4, epoch=2)
    assert world.newest == planned
    assert world.history.membership == planned, "logged as in force"
    world.cut("g2")
    world.fail("g0")
    assert world.asked("g1").number == 3
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert world.newest.groups == ("g0", "g1") and not world.noted("group_lost")


def test_a_planned_leave_says_why_to_those_who_stay_and_briefly() -> None:
    world = World(groups=4)
    world.start()
    world.say("g2", m.Leave("drained by root"))
    assert world.told("g0", m.Prepare)[-1].why == "drained by root"
    world.say("g3", m.Leave("x" * 1000))
    assert world.told("g0", m.Prepare)[-1].why == f"g2: drained by root; g3: {'x' * 1000}"[:200]


def test_the_leaver_itself_may_be_the_first_to_show_it() -> None:
    world = World()
    world.start()
    leaving(world)
    world.beat("g2", 4, epoch=2)
    assert world.newest.groups == ("g0", "g1")


def test_a_newer_planned_change_replaces_the_one_that_is_not_in_force() -> None:
    world = World()
    first = world.start()
    leaving(world, "g2")
    leaving(world, "g1")
    planned = world.planned("g0")
    assert planned.groups == ("g0",) and planned.base == first and planned.epoch.number == 3
    world.beat("g0", 4, epoch=3)
    assert world.newest == planned


def test_the_replaced_planned_change_may_come_into_force_all_the_same() -> None:
    """All had built and carried its flag when the newer one arrived: the entry decides."""
    world = World()
    world.start()
    leaving(world, "g2")
    replaced = world.planned("g0")
    leaving(world, "g1")
    world.beat("g0", 4, epoch=replaced.epoch.number)
    assert world.newest == replaced, "the lighthouse does not know which epoch is in force"
    again = world.planned("g0")
    assert again.groups == ("g0",) and again.base == replaced.epoch


def test_asking_twice_prepares_once() -> None:
    world = World()
    world.start()
    leaving(world)
    leaving(world)
    world.pass_s(2, {"g0": 3, "g1": 3, "g2": 3})
    assert len(world.told("g0", m.Prepare)) == 1


def test_who_returns_is_told_of_the_planned_change_again() -> None:
    world = World()
    world.start()
    leaving(world)
    world.cut("g1")
    world.forget_sent()
    world.hello("g1")
    assert world.planned("g1").groups == ("g0", "g1")


def test_when_all_ask_to_leave_the_job_ends_well() -> None:
    world = World(groups=2)
    world.start()
    leaving(world, "g0")
    leaving(world, "g1")
    (stop,) = world.told("g0", m.Stop)
    assert stop.ok and stop.reason == "all groups asked to leave: SIGTERM"


def test_a_death_while_a_planned_change_is_prepared_drops_it_and_plans_it_anew() -> None:
    world = World()
    world.start()
    leaving(world)
    planned = world.planned("g0")
    world.die("g1")
    for group in ("g0", "g2"):
        world.promise(group, 4, prepared=(planned,))
    assert world.newest.groups == ("g0", "g2") and world.newest.epoch.number == 3
    world.pass_s(0.25, {"g0": 5, "g2": 5})
    anew = world.planned("g0")
    assert anew.groups == ("g0",) and anew.base == world.newest.epoch


def test_a_death_while_the_planned_change_is_in_force_for_one_promiser() -> None:
    """g0 committed the entry that activates it, g1 did not: the promises name the newer epoch, and it counts."""
    world = World(groups=4)
    first = world.start()
    leaving(world, "g3")
    planned = world.planned("g0")
    world.die("g2")
    world.promise("g0", 5, known=planned, entry=first)
    world.promise("g1", 4, prepared=(planned,))
    world.promise("g3", 4, prepared=(planned,))
    third = world.asked("g0")
    world.promise("g0", 5, known=planned, entry=first)
    world.promise("g1", 4, known=planned, entry=first)
    assert world.newest.groups == ("g0", "g1") and world.newest.epoch == third
    assert world.activate("g1").donors == (m.Donor("g1", "g0"),)
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g2"]


def test_a_beat_that_shows_the_planned_change_does_not_end_a_recovery() -> None:
    """g2 leaves and is killed on its way out; a beat that g0 sent before its promise arrives during the recovery."""
    world = World()
    first = world.start()
    leaving(world)
    planned = world.planned("g0")
    world.die("g2")
    assert world.is_asked("g0") and world.is_asked("g1")
    world.beat("g0", 5, epoch=planned.epoch.number)
    for group in ("g0", "g1"):
        world.promise(group, 4, known=planned, entry=first)
    assert world.newest.epoch.number > planned.epoch.number, "g0 and g1 have promised and wait for an epoch for ever"


def test_a_report_on_the_planned_epoch_may_come_before_the_first_beat_in_it() -> None:
    world = World()
    world.start()
    leaving(world)
    planned = world.planned("g0")
    world.say("g0", m.Failed(planned.epoch, 5, "connection closed by peer", ("g1",)))
    world.beat("g0", 5, epoch=planned.epoch.number)
    assert world.is_asked("g0") and world.is_asked("g1"), "it is told only once, and was not heard"


def test_a_query_on_the_base_of_a_planned_epoch_is_answered() -> None:
    """g1's manager stood still with its ranks' last votes in hand; they activate the planned epoch."""
    world = World()
    first = world.start()
    leaving(world)
    world.beat("g0", 5, epoch=2)
    world.say("g1", m.Query(first))
    assert world.told("g1", m.Stands), "g1 answers no vote until it hears that its epoch stands; all wait for it"


def test_a_query_on_the_epoch_in_force_is_answered_and_one_of_the_left_out_is_not() -> None:
    world = World()
    first = world.start()
    world.say("g1", m.Query(first))
    assert world.told("g1", m.Stands) == [m.Stands(first)]
    world.die("g2")
    world.promise("g0", 0)
    world.promise("g1", 0)
    world.forget_sent()
    world.say("g1", m.Query(first))
    assert not world.told("g1", m.Stands)


def test_who_left_in_good_order_is_not_called_fenced_later() -> None:
    world = World()
    world.start()
    leaving(world)
    world.beat("g0", 4, epoch=2)
    world.cut("g2")
    world.fail("g0")
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert not world.noted("fenced")


def test_a_leaver_whose_stream_breaks_on_its_way_out_does_not_end_the_job() -> None:
    """It closes the old epoch with the others, which may take a while, and connects again meanwhile."""
    world = World()
    world.start()
    leaving(world)
    planned = world.planned("g0")
    world.beat("g0", 4, epoch=2)
    world.cut("g2")
    world.hello("g2", known=planned)
    assert world.machine.newest == planned and not world.noted("job_stopped")
