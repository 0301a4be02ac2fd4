"""A member that lives and does not get on: left out once another stands for it, and never if all are like that."""

from __future__ import annotations

from test_lighthouse_shares import Paced
from world import BEAT_S, World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Membership


def late(rank: int = 1, idle_s: float = 16.0) -> m.Overdue:
    return m.Overdue(rank, "compute", round(1000 * idle_s), 15_000, 5)


def test_a_stuck_member_is_left_out_once_another_stands_for_it() -> None:
    world = World()
    world.start()
    world.beat("g2", 5, overdue=late(), borne_ms=15_000, microbatch_ms=1)
    world.tick()
    assert not world.noted("group_lost"), "nobody stands"
    world.beat("g0", 5, waiting_ms=900, microbatch_ms=1)
    world.tick()
    assert not world.noted("group_lost"), "something that all share may just have answered again"
    world.beat("g0", 5, waiting_ms=7600, microbatch_ms=1)
    world.tick()
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"], lost["rank"], lost["since_s"]) == ("g2", "progress", 1, 16.0)
    assert lost["cause"] == "rank 1 lives and has made no progress in compute of step 5 for 16.0 s (15.0 s are borne)"
    assert world.is_asked("g0") and world.is_asked("g1") and not world.is_asked("g2")
    for name in ("g0", "g1"):
        world.promise(name, 4, held=tuple(range(12)) if name == "g0" else tuple(range(12, 24)))
    assert [f.reason for f in world.told("g2", m.Fence)] == [lost["cause"]]


def test_what_it_says_after_that_does_not_bring_it_back() -> None:
    world = World()
    world.start()
    world.beat("g2", 5, overdue=late(), microbatch_ms=1)
    world.beat("g0", 5, waiting_ms=900, microbatch_ms=1)
    world.tick()
    world.beat("g2", 5)
    world.tick()
    assert len(world.noted("group_lost")) == 1


def test_if_all_members_are_stuck_alike_it_is_nobodys_fault() -> None:
    world = World(groups=2, minimum=1)
    world.start()
    for name in ("g0", "g1"):
        world.beat(name, 5, overdue=late(), borne_ms=15_000, microbatch_ms=1)
    world.tick()
    assert not world.noted("group_lost")
    world.beat("g0", 6, waiting_ms=3000, microbatch_ms=1)
    world.tick()
    assert not world.noted("group_lost"), "g0 was the first to get on, and has stood for 3 s"


def test_a_spare_that_stands_for_all_workers_does_not_make_it_their_fault() -> None:
    world = World(groups=3, minimum=1, spares=1)
    world.start()
    for name in ("g0", "g1"):
        world.beat(name, 5, overdue=late(), borne_ms=15_000, microbatch_ms=1)
    world.beat("g2", 5, phase="reduce", waiting_ms=20_000)
    world.tick()
    assert not world.noted("group_lost")


def test_when_a_recovery_begins_it_is_said_what_all_ranks_did_last() -> None:
    world = World()
    world.start()
    doing = (m.Doing((0, 1, 2), "reduce", 5, waiting_ms=400), m.Doing((3,), "compute", 5, idle_ms=3100))
    world.beat("g0", 5, ranks=doing)
    world.beat("g1", 5, ranks=(m.Doing((0,), "reduce", 5, waiting_ms=20), m.Doing((1,), "compute", 5, stopped_ms=900)))
    world.die("g2", step=5)
    (said,) = world.noted("last_phases")
    assert said["phases"]["g0"] == "ranks 0-2 reduce of step 5 for 0.4 s, rank 3 compute of step 5 for 3.1 s"
    assert (
        said["phases"]["g1"]
        == "rank 0 reduce of step 5 for 0.0 s, rank 1 compute of step 5 (stopped by a signal) for 0.9 s"
    )
    assert set(said["silent_s"]) == {"g0", "g1"}


def test_while_members_stand_it_is_said_once_a_second_for_whom_and_since_when() -> None:
    world = World()
    world.start()
    for name in ("g0", "g1", "g2"):
        world.beat(name, 4)
    since = world.now
    while world.now < since + 3.0:
        world.now += BEAT_S
        for name in ("g0", "g1"):
            world.beat(name, 5, waiting_ms=round(1000 * (world.now - since)))
        world.beat("g2", 5, ranks=(m.Doing((0,), "reduce", 5), m.Doing((1,), "compute", 5, idle_ms=3000)))
        world.tick()
    said = world.noted("waiting")
    assert [one["whom"] for one in said] == ["g2"] * len(said) and 2 <= len(said) <= 3
    assert said[-1]["why"] == "rank 0 reduce of step 5, rank 1 compute of step 5 for 3.0 s"
    assert world.told("g0", m.Waiting)[-1].whom == ("g2",)


# ---------------------------------------------------------------- who is slow


class Watched(Paced):
    """Groups whose beats say how long they wait for the others: all for the slowest."""

    def __init__(self, groups: int = 3, evicts: bool = False, **given: int) -> None:
        super().__init__(groups, **given)
        self.evicts, self.total = evicts, 24

    def hello(self, speaker: str, reads: bool = True, **more: object) -> None:
        super().hello(speaker, reads, evicts_slow=self.evicts, **more)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            self.now += BEAT_S
            slowest = max(self.paces.values())
            for member in self.newest.members:
                pace = self.paces[member.group]
                wait_us = round(8000 * (slowest - pace)) + 100
                self.beat(member.group, self.step, microbatch_ms=pace, wait_us=wait_us, slowest=3, total=self.total)
            self.tick()


def test_a_slow_group_is_said_to_be_and_nobody_is_left_out_for_it() -> None:
    world = Watched(by_speed=False)
    world.start()
    world.steps(10)
    world.paces["g2"] = 13.0
    world.steps(20)
    (slow,) = world.noted("slow")
    assert (slow["group"], slow["rank"], slow["node"], slow["done"]) == ("g2", 3, "g2", "reported")
    assert slow["factor"] == 1.3 and 0.2 < slow["costs"] < 0.25 and slow["wait_s"] < slow["others_wait_s"]
    world.steps(100)
    assert not world.noted("quarantined") and not world.told("g2", m.Drain)
    world.paces["g2"] = 10.0
    world.steps(20)
    assert [one["group"] for one in world.noted("slow_ended")] == ["g2"]


def test_where_it_is_wanted_and_pays_it_is_asked_to_leave_and_its_node_is_noted() -> None:
    world = Watched(groups=3, evicts=True, by_speed=False, spares=1)
    world.total = 2
    world.start(total=2)
    world.paces["g1"] = 30.0
    world.steps(60)
    (drain,) = world.told("g1", m.Drain)
    assert drain.reason == "slow: 3.00 times what the others take for a microbatch, rank 3"
    (quarantined,) = world.noted("quarantined")
    assert (quarantined["group"], quarantined["node"]) == ("g1", "g1")
    assert [one["done"] for one in world.noted("slow")] == ["reported", "asked to leave"]


def test_nobody_is_asked_to_leave_below_the_minimum() -> None:
    world = Watched(groups=3, minimum=3, evicts=True, by_speed=False, spares=1)
    world.total = 2
    world.start(total=2)
    world.paces["g1"] = 30.0
    world.steps(60)
    assert world.noted("slow") and not world.told("g1", m.Drain)


def follower() -> tuple[World, Membership]:
    """g2 has come back and caught up; and the epoch that is to take it in."""
    world = World()
    world.start()
    world.die("g2", step=3)
    for name in ("g0", "g1"):
        world.promise(name, 2, held=tuple(range(12)) if name == "g0" else tuple(range(12, 24)))
    world.arrive("g2/i2")
    for name in ("g0", "g1"):
        world.beat(name, 4)
    world.beat("g2/i2", 4, phase="follow", epoch=0, borne_ms=15_000)
    return world, world.planned("g0")


def test_a_joiner_that_follows_no_more_is_left_out_though_an_entry_has_made_it_a_member() -> None:
    """It had caught up, was named in the next epoch, and is stuck since: all stand for it."""
    world, planned = follower()
    since = world.now
    while world.now < since + 17.0:
        world.now += BEAT_S
        for name in ("g0", "g1"):
            waiting_ms = round(1000 * (world.now - since))
            world.beat(name, 12, epoch=planned.epoch.number, waiting_ms=waiting_ms, microbatch_ms=1)
        world.beat("g2/i2", 4, phase="follow", epoch=0, borne_ms=15_000)
        world.tick()
        if world.now < since + 14.0:
            assert len(world.noted("group_lost")) == 1, "only the one that died"
    _, lost = world.noted("group_lost")
    assert (lost["group"], lost["incarnation"], lost["detected_by"]) == ("g2", "i2", "progress")


# ---------------------------------------------------------------- who is left behind


def behind(world: World, seconds: float, speaks: bool = True) -> None:
    """g0 stands in step 6; g2 has put in its part of step 5, stands there as far as it knows, and does not vote."""
    for name in ("g0", "g1"):
        world.beat(name, 6, waiting_ms=10)
    since = world.now
    while world.now < since + seconds:
        world.now += BEAT_S
        for name in ("g0", "g1"):
            world.beat(name, 6, waiting_ms=round(1000 * (world.now - since)))
        if speaks:
            world.beat("g2", 5, phase="reduce", waiting_ms=round(1000 * (world.now - since)), borne_ms=15_000)
        world.tick()


def test_who_has_not_committed_what_the_others_have_is_left_out_once_that_is_borne_no_more() -> None:
    """Its interpreter lock is held while the reduce ends: it looks as if it stood."""
    world = World()
    world.start()
    world.beat("g2", 5)
    behind(world, 14.5)
    assert not world.noted("group_lost"), "ten seconds of a held interpreter lock are borne"
    behind(world, 1.5)
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"], lost["phase"]) == ("g2", "progress", "reduce")
    assert lost["cause"].startswith("it lives and has not committed step 5, which the others have, for 15.")


def test_of_one_that_was_not_heard_lately_nobody_knows_where_it_is() -> None:
    """Silence is judged by the lease, and takes a stream that is there or not; it says nothing of steps."""
    world = World(lease_s=40.0)
    world.start()
    world.beat("g2", 5, phase="reduce", borne_ms=15_000)
    behind(world, 30.0, speaks=False)
    assert not world.noted("group_lost")


def test_of_one_whose_stream_has_just_broken_nobody_knows_where_it_is() -> None:
    """Its lease runs from the break; its last beat may be from long before that, through a cut."""
    world = World(lease_s=40.0)
    world.start()
    world.beat("g2", 5, phase="reduce", borne_ms=15_000)
    behind(world, 30.0, speaks=False)
    world.cut("g2")
    behind(world, 1.0, speaks=False)
    assert not world.noted("group_lost")


def test_who_stood_with_all_others_is_not_behind_because_one_of_them_is_the_first_to_go_on() -> None:
    """They stood below the minimum for longer than the floor; then one of them shows the next epoch first."""
    world = World()
    world.start()
    for name in ("g0", "g1", "g2"):
        world.beat(name, 5, phase="reduce", borne_ms=15_000, microbatch_ms=1)
    world.now += 30.0
    world.tick()
    for name in ("g1", "g2"):
        world.beat(name, 5, phase="reduce", borne_ms=15_000, microbatch_ms=1)
    world.beat("g0", 6, phase="reduce", waiting_ms=500, borne_ms=15_000, microbatch_ms=1)
    world.tick()
    assert not world.noted("group_lost")


def test_who_has_just_been_taken_in_is_not_behind_though_the_step_before_was_long() -> None:
    """Its last beat is from before the entry that made it a member, as are those of all others but the first."""
    world, planned = follower()
    for _ in range(120):
        world.now += BEAT_S
        world.beat("g0", 4)
        world.beat("g1", 4, phase="reduce", waiting_ms=29_000)
        world.beat("g2/i2", 4, phase="follow", epoch=0, borne_ms=15_000)
        world.tick()
    world.beat("g0", 5, epoch=planned.epoch.number)
    world.tick()
    assert world.newest == planned and len(world.noted("group_lost")) == 1, "only the one that died"


# ---------------------------------------------------------------- who hangs in an epoch that is over


def test_who_waits_to_form_the_epoch_is_not_behind_and_who_hangs_before_it_is_stuck() -> None:
    """Rank 0 of each has formed it; rank 1 of g1, one step behind, waits for that of g0, whose abort hangs."""
    world = World()
    world.start()
    since = world.now
    forming, hanging = m.Doing((1,), "recover", 5), m.Doing((1,), "reduce", 6)
    while world.now < since + 20.0 and not world.noted("group_lost"):
        world.now += BEAT_S
        waiting_ms = round(1000 * (world.now - since))
        stuck = m.Overdue(1, "reduce", waiting_ms, 15_000, 6) if waiting_ms > 16_000 else None
        world.beat(
            "g0", 6, phase="reduce", waiting_ms=waiting_ms, borne_ms=15_000, microbatch_ms=1, ranks=(hanging,),
            overdue=stuck,
        )  # fmt: skip
        world.beat("g1", 5, phase="vote", borne_ms=15_000, microbatch_ms=1, ranks=(m.Doing((0,), "vote", 5), forming))
        world.beat("g2", 6, phase="reduce", waiting_ms=waiting_ms, borne_ms=15_000, microbatch_ms=1)
        world.tick()
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"], lost["rank"]) == ("g0", "progress", 1)


def test_who_hangs_while_all_others_wait_to_form_is_left_out_when_they_say_that_it_failed() -> None:
    """Groups of one rank: nobody stands."""
    world = World()
    world.start()
    hangs = m.Overdue(0, "reduce", 30_000, 15_000, 5)
    world.beat("g0", 5, phase="reduce", borne_ms=15_000, microbatch_ms=1, overdue=hangs)
    for name in ("g1", "g2"):
        world.beat(name, 5, phase="recover", borne_ms=15_000, microbatch_ms=1)
    world.tick()
    assert not world.noted("group_lost"), "they may still form"
    world.fail("g1", 5)
    world.tick()
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"]) == ("g0", "progress")
