"""Another lighthouse: with the log of the last one, with an empty disk, or beside one with a higher term."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Epoch, Membership, Term

FIRST = Term(1, "lh")


def running(groups: int = 3, minimum: int = 1) -> tuple[World, Membership]:
    """A job in its first epoch."""
    world = World(groups, minimum)
    world.start()
    return world, world.newest


def back(world: World, known: Membership, *groups: str, acknowledged: Term = FIRST) -> None:
    """Managers return to the new lighthouse, as `GroupMachine.connected` does."""
    for group in groups:
        world.arrive(group, known=known, acknowledged=acknowledged)


def test_with_its_log_it_takes_the_members_back_and_nothing_changes() -> None:
    world, membership = running()
    world.restart()
    back(world, membership, "g0", "g1", "g2")
    world.pass_s(10, {"g0": 5, "g1": 5, "g2": 5}, waiting_ms=30)
    assert world.newest == membership and not world.noted("group_lost")
    assert world.told("g0", m.Welcome)[0].term == Term(2, "lh")


def test_with_its_log_it_may_leave_out_who_does_not_return() -> None:
    world, membership = running()
    world.restart()
    back(world, membership, "g0", "g1")
    world.pass_s(2.25, {"g0": 5, "g1": 5}, waiting_ms=2500)
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert world.newest.groups == ("g0", "g1") and world.newest.epoch == Epoch(2, Term(2, "lh"))


def test_leases_count_from_its_own_start() -> None:
    world, membership = running()
    world.now += 60
    world.restart()
    back(world, membership, "g0", "g1")
    world.pass_s(2.0, {"g0": 5, "g1": 5}, waiting_ms=60_000)
    assert not world.noted("group_lost")
    world.pass_s(0.25, {"g0": 5, "g1": 5}, waiting_ms=60_000)
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g2"]


def test_a_member_that_has_not_come_back_yet_gets_its_lease_also_when_the_epoch_is_broken() -> None:
    world, membership = running()
    world.restart()
    back(world, membership, "g0", "g1")
    world.fail("g0", 5)
    assert not world.noted("group_lost"), "g2 is left out before it had time to connect to the new lighthouse"
    back(world, membership, "g2")
    world.promise_all(4)
    assert world.newest.groups == ("g0", "g1", "g2")


def test_it_died_between_logging_an_activation_and_sending_it() -> None:
    world, membership = running()
    world.fail("g0", 5)
    world.promise_all(4)
    assert world.history.membership == world.newest != membership
    world.restart()
    back(world, membership, "g0", "g1", "g2")  # none of them has seen the activation
    world.pass_s(10, {"g0": 5, "g1": 5, "g2": 5})
    assert world.is_asked("g0"), "all wait for an epoch that the log says is in force"
    world.promise_all(4)
    assert world.activate("g1").membership.epoch.number > 2


def test_who_was_left_out_after_a_restart_does_not_end_the_job_by_returning() -> None:
    """g2 had not come back to this lighthouse when it was left out, so it had joined nothing here."""
    world, membership = running()
    world.restart()
    back(world, membership, "g0", "g1")
    world.pass_s(2.25, {"g0": 5, "g1": 5}, waiting_ms=2500)
    world.promise("g0", 4)
    world.promise("g1", 4)
    running_now = world.newest
    assert running_now.groups == ("g0", "g1")
    back(world, membership, "g2")
    assert world.machine.newest == running_now, (
        "g0 and g1 are training in an epoch that the lighthouse has just forgotten"
    )
    assert world.told("g2", m.Fence)


def test_with_an_empty_disk_it_learns_the_epoch_from_the_members_and_goes_on() -> None:
    world, membership = running()
    world.restart(log=False)
    back(world, membership, "g0", "g1", "g2")
    assert world.newest == membership
    world.pass_s(5, {"g0": 5, "g1": 5, "g2": 5}, waiting_ms=30)
    assert not world.is_asked("g0")
    world.die("g2")  # all have acknowledged its term meanwhile
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert world.newest.groups == ("g0", "g1") and world.newest.epoch.number == 2


def test_with_an_empty_disk_it_leaves_nobody_out_until_every_member_was_in_touch() -> None:
    """The other lighthouse may still live, with the third member."""
    world, membership = running()
    world.restart(log=False)
    back(world, membership, "g0", "g1")
    world.fail("g0", 5)
    world.pass_s(30, {"g0": 5, "g1": 5}, waiting_ms=30_000)
    for group in ("g0", "g1"):
        world.promise(group, 4)
    world.pass_s(30, {"g0": 5, "g1": 5}, waiting_ms=60_000)
    assert not world.told("g0", m.Activate)
    assert world.reason("g0").startswith("g2: this lighthouse may not leave anybody out until they come")
    back(world, membership, "g2")
    for group in ("g0", "g1", "g2"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1", "g2")


def test_a_majority_is_not_enough_for_an_empty_disk() -> None:
    world, membership = running(groups=5)
    world.restart(log=False)
    back(world, membership, "g0", "g1", "g2", "g3")
    world.fail("g0", 5)
    world.pass_s(30, {"g0": 5, "g1": 5, "g2": 5, "g3": 5}, waiting_ms=30_000)
    for group in ("g0", "g1", "g2", "g3"):
        world.promise(group, 4)
    assert not world.told("g0", m.Activate)


def test_a_new_incarnation_of_a_member_does_not_consent_in_its_place() -> None:
    world, membership = running(groups=2)
    world.restart(log=False)
    world.arrive("g1/i2")  # the scheduler has started another; g1's first incarnation may live with the old lighthouse
    back(world, membership, "g0")
    world.fail("g0", 5)
    world.pass_s(10, {"g0": 5}, waiting_ms=10_000)
    if world.is_asked("g0"):
        world.promise("g0", 4)
    assert not world.told("g0", m.Activate), "g1 was left out without having acknowledged the new term"


def test_numbers_rise_above_the_epoch_that_members_know() -> None:
    world, membership = running()
    for _ in range(3):
        world.fail("g0", 5)
        world.promise_all(4)
    membership = world.newest
    world.restart(log=False)
    back(world, membership, "g0", "g1", "g2")
    world.fail("g0", 5)
    assert world.asked("g0").number == membership.epoch.number + 1


def test_numbers_rise_above_those_that_members_have_prepared() -> None:
    """Ranks keep what they build by the epoch's number: one number must not mean two memberships."""
    world, membership = running()
    prepared = Membership(Epoch(2, Term(1, "lh")), membership.members[:2], membership.epoch)
    world.restart(log=False)
    for group in ("g0", "g1", "g2"):
        world.arrive(group, known=membership, prepared=(prepared,), acknowledged=Term(1, "lh"))
    world.fail("g0", 5)
    assert world.asked("g0").number > 2


def test_who_meets_a_higher_term_takes_a_still_higher_one() -> None:
    world = World(groups=2)
    world.arrive("g0", acknowledged=Term(7, "elsewhere"))
    assert world.risen == [Term(8, "lh")]
    assert world.told("g0", m.Welcome)[0].term == Term(8, "lh")
    world.arrive("g1")
    assert world.told("g1", m.Welcome)[0].term == Term(8, "lh")
    assert world.asked("g0") == Epoch(1, Term(8, "lh"))


def test_a_lower_term_does_not_make_it_rise() -> None:
    world, membership = running()
    world.restart()
    back(world, membership, "g0", "g1", "g2")
    assert not world.risen


def test_a_job_that_began_after_a_restart_can_lose_a_group() -> None:
    """The groups waited at a lighthouse without a log when it was restarted: they had acknowledged its term."""
    world = World()
    for group in ("g0", "g1", "g2"):
        world.arrive(group, acknowledged=Term(1, "gone"))
    world.promise_all()
    world.die("g2")
    world.promise("g0", 0)
    world.promise("g1", 0)
    assert world.newest.groups == ("g0", "g1"), world.machine.waiting(world.now)


def test_members_that_are_not_back_yet_are_not_replaced_by_a_stranger() -> None:
    world, membership = running(groups=2)
    world.restart()
    world.hello("g2")
    (refused,) = world.told("g2", m.Refused)
    assert refused.retry and "their lease must pass first" in refused.reason
    assert world.newest == membership


def test_a_planned_change_is_still_prepared_after_a_restart() -> None:
    world, membership = running()
    world.say("g2", m.Leave("SIGTERM"))
    planned = world.planned("g0")
    world.restart()
    back(world, membership, "g0", "g1")
    assert world.planned("g0") == planned
    world.beat("g0", 5, epoch=planned.epoch.number)
    assert world.newest == planned


def test_members_keep_the_entries_until_a_group_that_an_earlier_lighthouse_healed_says_it_joins() -> None:
    world, _ = running()
    world.die("g2")
    world.promise("g0", 4)
    world.promise("g1", 4)
    membership = world.newest
    assert membership.groups == ("g0", "g1")
    world.restart()
    back(world, membership, "g0", "g1")
    world.pass_s(1, {"g0": 5, "g1": 5})
    world.hello("g2/i2", follows=True)
    world.pass_s(1, {"g0": 5, "g1": 5})
    assert not world.told("g0", m.Copy)
    world.join("g2/i2")
    world.pass_s(1, {"g0": 5, "g1": 5})
    assert not world.told("g0", m.Copy) and not world.told("g2/i2", m.Heal)
    world.die("g2/i2")
    world.pass_s(1, {"g0": 6, "g1": 6})
    assert [copy.step for copy in world.told("g0", m.Copy)] == [m.RELEASE]


def test_a_planned_change_that_came_into_force_meanwhile_is_taken_from_the_members() -> None:
    world, _ = running()
    world.say("g2", m.Leave("SIGTERM"))
    planned = world.planned("g0")
    world.restart()
    back(world, planned, "g0", "g1")
    assert world.newest == planned
    world.cut("g1")
    world.fail("g0", 5)
    world.pass_s(5, {"g0": 5}, waiting_ms=5000)
    world.promise("g0", 4)
    assert world.newest.groups == ("g0",), "prepared by its own log: it may leave out"


def test_who_was_left_out_of_a_job_that_ended_since_does_not_go_on_with_it() -> None:
    """g1 is cut off and left out; g0 dies, which ends the job. What g1 still knows is over, also after a restart."""
    for restarts in (False, True):
        world = World(groups=2)
        first = world.start()
        known = world.newest
        world.cut("g1")
        world.pass_s(5, {"g0": 3}, waiting_ms=5000)
        world.promise("g0", 2)
        assert world.newest.groups == ("g0",)
        world.die("g0")
        assert world.machine.newest is None and world.machine.broken_off > first
        if restarts:
            world.restart()
        world.arrive("g1", known=known, acknowledged=first.term)
        assert world.told("g1", m.Fence) and world.machine.newest is None
