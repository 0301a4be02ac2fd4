"""New shares: when they are planned, what they give way to, and what is said of them."""

from __future__ import annotations

from world import BEAT_S, World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Membership

FAST, SLOW = 10.0, 14.3


class Paced(World):
    """A job that deals by speed, whose groups beat with the milliseconds that they take for a microbatch."""

    def __init__(self, groups: int = 3, by_speed: bool = True, **given: int) -> None:
        super().__init__(groups, **given)
        self.by_speed = by_speed
        self.paces = {f"g{i}": FAST for i in range(groups)}
        self.step = 0

    def hello(self, speaker: str, reads: bool = True, **more: object) -> None:
        super().hello(speaker, reads, by_speed=self.by_speed, **more)

    def steps(self, count: int) -> None:
        """So many steps are committed; every group in it beats at each."""
        for _ in range(count):
            self.step += 1
            self.now += BEAT_S
            for member in self.newest.members:
                if member.group in self.paces:
                    self.beat(member.group, self.step, microbatch_ms=self.paces[member.group])
            self.tick()

    def shares_planned(self) -> list[Membership]:
        """What was planned with the members that were in force."""
        planned = [p.planned for p in self.told("g0", m.Prepare) if p.planned is not None]
        return [p for p in planned if len(p.members) == len(self.newest.members)]

    def switch(self) -> None:
        """All members have committed the entry that activates what was planned last."""
        planned = self.planned("g0")
        for member in planned.members:
            self.beat(member.group, self.step, epoch=planned.epoch.number)


def test_a_slow_group_gets_a_planned_epoch_with_another_speed() -> None:
    world = Paced()
    world.start()
    world.paces["g2"] = SLOW
    world.steps(60)
    (planned,) = world.shares_planned()
    assert planned.speeds == (1000, 1000, 700) and planned.base == world.newest.epoch
    world.switch()
    assert world.newest == planned
    (note,) = [n for n in world.noted("activated") if n["cause"] != "first epoch"]
    assert note["cause"] == "new shares: g2 1.00 -> 0.70 of the median"
    assert not world.noted("group_lost")


def test_it_is_not_planned_twice_and_not_again_for_twenty_steps() -> None:
    world = Paced()
    world.start()
    world.paces["g2"] = SLOW
    world.steps(60)
    world.switch()
    first = world.step
    world.paces["g2"] = FAST
    world.steps(19)
    assert len(world.shares_planned()) == 1
    world.steps(10)
    assert [p.speeds for p in world.shares_planned()] == [(1000, 1000, 700), ()] and world.step - first >= 20


def test_no_other_shares_if_the_groups_say_so_or_nothing_is_slow() -> None:
    for by_speed, slow in ((False, SLOW), (True, 1.04 * FAST)):
        world = Paced(by_speed=by_speed)
        world.start()
        world.paces["g2"] = slow
        world.steps(60)
        assert not world.shares_planned()


def test_a_leaver_does_not_wait_for_new_shares() -> None:
    world = Paced()
    world.start()
    world.paces["g2"] = SLOW
    world.steps(60)
    world.say("g1", m.Leave("SIGTERM"))
    assert world.planned("g0").groups == ("g0", "g2") and world.planned("g0").speeds == ()
    world.switch()
    assert world.newest.groups == ("g0", "g2")


def test_a_joiner_replaces_new_shares_and_counts_as_the_usual_one() -> None:
    world = Paced()
    world.start()
    world.die("g2")
    world.promise_all(step=0)
    world.paces["g1"] = 2 * FAST
    world.arrive("g2/i2")
    world.cut("g2/i2")  # so that no heal is under way while the shares are planned
    world.steps(60)
    planned = world.planned("g0")
    assert planned.groups == ("g0", "g1") and planned.speeds
    world.hello("g2/i2", follows=True)
    world.join("g2/i2")
    world.beat("g2/i2", world.step, phase="follow", epoch=0)
    world.tick()
    assert world.planned("g0").groups == ("g0", "g1", "g2") and world.planned("g0").speeds == ()
    world.beat("g0", world.step, epoch=planned.epoch.number)  # but the other was faster
    world.tick()
    slow = min(planned.speeds)
    assert world.planned("g0").speeds == (*planned.speeds, slow), "the lower of the two in the middle"


def test_none_while_somebody_heals_and_none_in_a_recovery() -> None:
    world = Paced()
    world.start()
    world.die("g2")
    world.promise_all(step=0)
    world.paces["g1"] = 2 * FAST
    world.arrive("g2/i2")
    world.steps(60)
    assert world.told("g0", m.Copy) and not world.shares_planned()
    world.cut("g2/i2")
    world.fail("g0", world.step)
    world.steps(60)
    assert world.machine.recovery is not None and not world.shares_planned()


def test_a_recovery_voids_new_shares_and_keeps_the_speeds_that_are_in_force() -> None:
    world = Paced()
    world.start()
    world.paces["g2"] = SLOW
    world.steps(60)
    world.switch()
    world.die("g0", step=world.step)
    world.promise_all(step=world.step - 1)
    assert world.newest.groups == ("g1", "g2") and world.newest.speeds == (1000, 700)
    assert [len(share) for share in world.shares("g1").values()] == [14, 10]


def test_a_lighthouse_that_was_started_again_looks_for_twenty_steps_first() -> None:
    world = Paced()
    world.start()
    world.paces["g2"] = SLOW
    world.steps(60)
    world.switch()
    in_force = world.newest
    world.restart()
    for group in in_force.groups:
        world.hello(group, known=in_force)
        world.join(group)
    world.paces["g2"] = FAST
    world.steps(19)
    assert world.newest == in_force and not world.shares_planned()
    world.steps(10)
    assert world.shares_planned()[-1].speeds == ()
