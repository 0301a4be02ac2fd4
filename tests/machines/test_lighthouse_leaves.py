"""Groups that leave, or are asked to: strangers, members, below the minimum, by an operator's word."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m


def leave(world: World, *groups: str, why: str = "SIGTERM") -> None:
    for group in groups:
        world.say(group, m.Leave(why))


def let_go(world: World, group: str) -> m.Stop:
    (stop,) = world.told(group, m.Stop)
    assert stop.ok
    return stop


# ---------------------------------------------------------------- strangers


def test_before_the_first_epoch_it_is_let_go_and_not_counted_on() -> None:
    world = World(groups=2)
    world.arrive("g0")
    leave(world, "g0")
    assert "before it was a member: SIGTERM" in let_go(world, "g0").reason
    world.arrive("g1")
    assert world.machine.recovery is None, "the job needs two"
    world.cut("g0")
    world.hello("g0/i2")
    world.join("g0/i2")
    assert world.is_asked("g0/i2") and world.is_asked("g1")


def test_one_that_leaves_while_the_first_epoch_is_promised_is_left_out_of_it() -> None:
    world = World(groups=3, minimum=2)
    world.arrive("g0", "g1", "g2")
    leave(world, "g2")
    let_go(world, "g2")
    assert world.machine.recovery is None and world.machine.newest is None, "the first epoch waits for a third group"


def test_a_joiner_is_let_go_while_it_heals() -> None:
    world = World(groups=3)
    world.start("g0", "g1", "g2")
    world.die("g2")
    world.promise_all(step=4)
    world.arrive("g2/i2")
    leave(world, "g2/i2")
    let_go(world, "g2/i2")
    assert not world.noted("group_lost")[1:]


def test_a_joiner_that_a_prepared_change_names_is_let_go_once_another_epoch_is_in_force() -> None:
    world = World(groups=3)
    world.start("g0", "g1", "g2")
    world.die("g2")
    world.promise_all(step=4)
    world.arrive("g2/i2")
    world.beat("g0", 5), world.beat("g1", 5)
    world.beat("g2/i2", 5, phase="follow", epoch=0)
    world.tick()
    assert world.planned("g0").groups == ("g0", "g1", "g2")
    leave(world, "g2/i2")
    assert not world.told("g2/i2", m.Stop), "the entries may make it a member at any moment"
    instead = world.planned("g0")
    assert instead.groups == ("g0", "g1")
    world.beat("g0", 7, epoch=instead.epoch.number)
    let_go(world, "g2/i2")
    assert len(world.noted("group_lost")) == 1


# ---------------------------------------------------------------- members


def test_where_it_left_is_known_whoever_speaks_first() -> None:
    for others_first in (True, False):
        world = World(groups=2)
        world.start("g0", "g1")
        leave(world, "g1")
        planned = world.planned("g0")
        if others_first:
            world.beat("g0", 8, epoch=planned.epoch.number)
        world.say("g1", m.Left(planned.epoch, 8))
        drained = world.machine.drained("g1", "g1i1")
        assert drained.left and drained.how == "left before step 8: SIGTERM"
        assert world.newest.groups == ("g0",) and not world.noted("group_lost")


def test_who_ended_because_it_was_asked_to_is_left_out_and_not_to_blame() -> None:
    world = World(groups=3)
    world.start("g0", "g1", "g2")
    leave(world, "g2")
    world.say("g2", m.Died("was asked to end at once (SIGTERM)", 0, "", 3, asked=True))
    assert not world.noted("group_lost")
    assert world.noted("left")[0]["reason"] == "was asked to end at once (SIGTERM)"
    world.promise_all(step=2)
    assert world.activate("g0").cause == "g2 was asked to end at once (SIGTERM)"
    assert world.newest.groups == ("g0", "g1")
    drained = world.machine.drained("g2", "g2i1")
    assert not drained.here and not drained.left
    world.cut("g2")
    world.arrive("g2/i2")
    assert world.machine.groups["g2"].deaths == (), "it may come back at once"


# ---------------------------------------------------------------- the minimum


def test_below_the_minimum_the_leaver_goes_and_the_others_stand_until_another_comes() -> None:
    world = World(groups=3, minimum=3)
    world.start("g0", "g1", "g2")
    leave(world, "g2")
    planned = world.planned("g0")
    assert planned.groups == ("g0", "g1")
    world.say("g2", m.Left(planned.epoch, 6))
    assert world.is_asked("g0") and world.is_asked("g1")
    world.promise_all(step=5)
    assert world.machine.recovery is not None, "two of at least three stand"
    assert world.machine.waiting(world.now)[:2] == (("any group",), "at least 3 groups")
    world.arrive("g2/i2")
    world.beat("g2/i2", 6, phase="follow", epoch=0)
    world.tick()
    for speaker in ("g0", "g1", "g2/i2"):
        world.promise(speaker, step=5)
    assert world.newest.groups == ("g0", "g1", "g2") and world.machine.recovery is None


def test_who_stands_below_the_minimum_may_leave_and_the_last_ends_the_job_well() -> None:
    world = World(groups=3, minimum=3)
    world.start("g0", "g1", "g2")
    world.die("g2")
    world.promise_all(step=5)
    assert world.machine.recovery is not None
    leave(world, "g0")
    assert "while the job stood below its minimum" in let_go(world, "g0").reason
    assert world.machine.recovery is not None and world.machine.recovery.asked == {"g1"}
    world.promise_all(step=5)
    leave(world, "g1")
    assert let_go(world, "g1").reason == "all groups asked to leave: SIGTERM"
    assert world.noted("job_stopped")[0]["ok"] and len(world.noted("group_lost")) == 1


def test_the_last_member_stays_until_one_whom_nobody_asked_to_leave_has_its_state() -> None:
    world = World(groups=2)
    world.start("g0", "g1")
    world.pass_s(0.25, {"g0": 5, "g1": 5})
    world.arrive("r0", role="reserve")
    world.tick()
    assert not world.told("r0", m.Heal), "it is parked"
    leave(world, "g0", "g1")
    world.tick()
    assert world.machine.stopped is None and world.planned("g0").groups == ("g0",), "g0 hands the state on"
    for group in ("g0", "g1"):
        world.beat(group, 6, epoch=world.planned("g0").epoch.number)
    world.beat("r0", 9, "follow", epoch=0)
    world.pass_s(1.5, {"g0": 9})
    both = world.planned("g0")
    assert both.groups == ("g0", "r0")
    for group in ("g0", "r0"):
        world.beat(group, 10, epoch=both.epoch.number)
    world.tick()
    assert world.planned("g0").groups == ("r0",), "now it may go"
    assert not world.noted("group_lost") and not world.noted("job_stopped")


def test_if_that_one_is_gone_too_the_job_ends() -> None:
    world = World(groups=2)
    world.start("g0", "g1")
    world.pass_s(0.25, {"g0": 5, "g1": 5})
    world.arrive("r0", role="reserve")
    leave(world, "g0", "g1")
    world.tick()
    assert world.machine.stopped is None
    world.cut("r0")
    world.tick()
    assert let_go(world, "g0").reason == "all groups asked to leave: SIGTERM"


# ---------------------------------------------------------------- an operator's word


def test_a_drain_is_handed_on_noted_once_and_repeated_on_a_new_stream_until_it_is_heard() -> None:
    world = World(groups=2)
    world.start("g0", "g1")
    actions, drained = world.machine.drain("g1", "ann", world.now, 30.0)
    world._carry_out(actions)
    assert drained.here and not drained.how
    assert world.told("g1", m.Drain) == [m.Drain("drained by ann", 30_000)]
    world.cut("g1")
    world.forget_sent()
    world.now += 10
    world.hello("g1", known=world.newest)
    assert world.told("g1", m.Drain) == [m.Drain("drained by ann", 20_000)]
    leave(world, "g1", why="drained by ann")
    world.forget_sent()
    world.hello("g1", known=world.newest)
    assert not world.told("g1", m.Drain)
    world._carry_out(world.machine.drain("g1", "ann", world.now, 30.0)[0])
    assert len(world.noted("operator_drained")) == 1


def test_a_second_operator_who_comes_when_it_has_left_is_told_so() -> None:
    world = World(groups=3)
    world.start("g0", "g1", "g2")
    world._carry_out(world.machine.drain("g2", "ann", world.now)[0])
    leave(world, "g2", why="drained by ann")
    planned = world.planned("g0")
    world.say("g2", m.Left(planned.epoch, 6))
    first = world.machine.drained("g2", "g2i1")
    actions, second = world.machine.drain("g2", "bob", world.now)
    assert first.left and second == first and not actions and not second.refused


def test_who_cannot_be_asked_is_not_drained() -> None:
    world = World(groups=2)
    world.start("g0", "g1")
    assert "has no group g7 here; it has g0, g1" in world.machine.drain("g7", "ann", world.now)[1].refused
    world.cut("g1")
    assert "`lightkeeper fence`" in world.machine.drain("g1", "ann", world.now)[1].refused
    world.hello("g1", known=world.newest)
    world.die("g1")
    assert "killed by SIGKILL" in world.machine.drain("g1", "ann", world.now)[1].refused
