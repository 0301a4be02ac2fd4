"""Who is gone and who only seems to be: deaths, broken streams, silence, frozen ranks, a frozen lighthouse."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m


def test_a_killed_trainer_is_left_out_at_once_and_named() -> None:
    world = World()
    world.start()
    world.die("g2", step=5)
    assert world.noted("group_lost") == [
        {
            "group": "g2",
            "incarnation": "g2i1",
            "cause": "rank 0 was killed by SIGKILL",
            "detected_by": "manager",
            "phase": "reduce",
            "step": 5,
            "rank": 0,
        }
    ]
    assert world.is_asked("g0") and world.is_asked("g1") and not world.is_asked("g2")
    world.promise("g0", 4, held=tuple(range(8)))
    world.promise("g1", 4, held=tuple(range(8, 16)))
    activate = world.activate("g0")
    assert activate.cause == "g2 lost: rank 0 was killed by SIGKILL"
    assert (activate.membership.groups, activate.first_step) == (("g0", "g1"), 5)
    assert world.shares("g1") == {"g0": (*range(8), *range(16, 20)), "g1": (*range(8, 16), *range(20, 24))}


def test_a_member_that_is_started_again_before_anybody_missed_it_is_lost_and_named() -> None:
    world = World(3)
    world.start()
    world.cut("g1")
    world.pass_s(3, {"g0": 3, "g2": 3})
    world.arrive("g1/i2")
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["incarnation"]) == ("g1", "g1i1")
    world.promise("g0", 3)
    world.promise("g2", 3)
    assert world.newest.groups == ("g0", "g2")
    assert world.activate("g0").cause == "g1 lost: its process ended and the group was started again"


def test_a_report_before_the_death_first_asks_all_and_then_the_rest() -> None:
    world = World()
    world.start()
    world.fail("g0", 5, suspects=("g2",))
    first = world.asked("g2")
    world.promise("g0", 4)
    world.promise("g1", 4)
    world.die("g2")
    second = world.asked("g0")
    assert second.number == first.number + 1
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert world.newest.groups == ("g0", "g1") and world.newest.epoch == second
    assert world.activate("g0").cause == "g2 lost: rank 0 was killed by SIGKILL"


def test_whoever_reports_and_whenever_the_line_names_who_is_left_out() -> None:
    """g2's host died while no lighthouse was there: the reports come first, and begin the recovery."""
    world = World(3)
    world.start()
    world.restart()
    world.hello("g0", known=world.newest)
    world.hello("g1", known=world.newest)
    for survivor in ("g0", "g1"):
        world.join(survivor)
        world.fail(survivor, 7)
    assert world.is_asked("g0") and not world.noted("group_lost")
    for survivor in ("g0", "g1"):
        world.promise(survivor, 6)
    for _ in range(40):
        world.pass_s(0.2, {"g0": 7, "g1": 7})
    assert world.noted("group_lost")[0]["group"] == "g2"
    cause = world.activate("g0").cause
    assert cause.startswith("g2 lost: its manager's stream broke"), cause
    assert world.noted("activated")[-1]["cause"] == cause


def test_a_report_is_the_cause_only_if_nobody_is_left_out() -> None:
    world = World(3)
    world.start()
    world.fail("g0", 5, suspects=("g2",))
    for group in ("g0", "g1", "g2"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1", "g2")
    assert world.activate("g0").cause == "g0 reported: connection closed by peer"


def test_who_lags_is_named_too() -> None:
    world = World(4)
    world.start()
    world.fail("g0", 5)
    for group, step in (("g0", 4), ("g1", 4), ("g2", 2), ("g3", 2)):
        world.promise(group, step)
    assert world.activate("g0").cause == "g2, g3 left out: it lags by more than one entry"


def test_a_report_after_the_death_does_not_start_over() -> None:
    world = World()
    world.start()
    world.die("g2")
    epoch = world.asked("g0")
    world.fail("g0", suspects=("g2",))
    world.fail("g1", suspects=("g2",))
    assert world.asked("g0") == epoch == world.asked("g1")


def test_a_broken_stream_and_a_broken_epoch_are_a_death() -> None:
    """SIGKILL of the whole process tree: nobody says Died, but the kernel closes the manager's stream."""
    world = World()
    world.start()
    world.cut("g2")
    assert not world.is_asked("g0")
    world.fail("g0", suspects=("g2",))
    assert world.noted("group_lost")[0]["detected_by"] == "stream"
    world.promise("g0", 0)
    world.promise("g1", 0)
    assert world.newest.groups == ("g0", "g1")


def test_a_broken_stream_alone_costs_nothing() -> None:
    world = World()
    world.start()
    world.cut("g2")
    world.pass_s(30, {"g0": 3, "g1": 3})
    assert not world.noted("group_lost") and not world.is_asked("g0")
    world.hello("g2")
    assert world.told("g2", m.Welcome) and not world.told("g2", m.Fence)
    world.pass_s(5, {"g0": 4, "g1": 4, "g2": 4}, waiting_ms=30)
    assert not world.noted("group_lost") and world.newest.groups == ("g0", "g1", "g2")


def test_the_silent_are_left_out_after_the_lease_and_not_before_if_somebody_stands() -> None:
    world = World()
    world.start()
    world.pass_s(1.0, {"g0": 3, "g1": 3, "g2": 3})
    world.pass_s(2.0, {"g0": 3, "g1": 3}, waiting_ms=2500)
    assert not world.noted("group_lost")
    world.pass_s(0.2, {"g0": 3, "g1": 3}, waiting_ms=2500)
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"]) == ("g2", "lease")
    world.promise("g0", 2)
    world.promise("g1", 2)
    assert world.newest.groups == ("g0", "g1")
    assert world.told("g2", m.Fence)[0].reason.startswith("its manager has been silent for 2.")


def test_the_silent_are_not_left_out_while_nobody_stands() -> None:
    world = World()
    world.start()
    world.pass_s(30, {"g0": 3, "g1": 3})
    assert not world.noted("group_lost")


def test_a_member_whose_beats_are_missing_while_others_commit_is_unseen_but_not_dead() -> None:
    """Every member takes part in every reduce: a commit by any member is proof of life of all."""
    world = World()
    world.start()
    world.cut("g2")
    for step in range(1, 40):
        world.pass_s(0.2, {"g0": step, "g1": step}, waiting_ms=50)
    assert not world.noted("group_lost"), "left out although the job went on with it"


def test_who_waits_for_promises_waits_for_the_silent() -> None:
    world = World()
    world.start()
    world.fail("g0")
    world.promise("g0", 0)
    world.promise("g1", 0)
    world.pass_s(2.0, {"g0": 1, "g1": 1})
    assert world.machine.recovery is not None
    world.pass_s(0.4, {"g0": 1, "g1": 1})
    world.promise("g0", 0)
    world.promise("g1", 0)
    assert world.newest.groups == ("g0", "g1")


def test_a_frozen_rank_is_left_out_after_the_lease_although_its_manager_beats() -> None:
    world = World()
    world.start()
    for stopped_ms in (0, 1000, 2000):
        world.beat("g2", 3, stopped_ms=stopped_ms)
        world.pass_s(0.2, {"g0": 3, "g1": 3}, waiting_ms=500)
        assert not world.noted("group_lost")
    world.beat("g2", 3, stopped_ms=2001)
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"]) == ("g2", "frozen")


def test_a_frozen_rank_for_whom_nobody_waits_is_left_alone() -> None:
    world = World()
    world.start()
    world.pass_s(0.2, {"g0": 3, "g1": 3})
    world.beat("g2", 3, stopped_ms=60_000)
    assert not world.noted("group_lost")


def test_the_sole_member_is_never_gone_for_being_silent() -> None:
    world = World(groups=1)
    world.start()
    world.beat("g0", 3, "reduce", waiting_ms=5000)
    world.cut("g0")
    world.pass_s(300)
    assert not world.noted("group_lost") and world.newest.groups == ("g0",)
    world.hello("g0")
    assert world.told("g0", m.Welcome)


def test_the_last_member_left_is_never_gone_for_being_silent_either() -> None:
    """g1 was killed; g0's manager stands still for a while and then promises."""
    world = World(groups=2)
    world.start()
    world.die("g1")
    world.pass_s(3)
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g1"]
    world.promise("g0", 4)
    assert world.newest.groups == ("g0",)


def test_with_fewer_than_half_in_touch_it_waits_two_leases() -> None:
    world = World(groups=5)
    world.start()
    world.pass_s(1.0, {f"g{i}": 3 for i in range(5)})
    world.cut("g2", "g3", "g4")
    world.fail("g0", suspects=("g2",))
    world.pass_s(4.0, {"g0": 3, "g1": 3}, waiting_ms=3000)
    assert not world.noted("group_lost")
    world.pass_s(0.4, {"g0": 3, "g1": 3}, waiting_ms=3000)
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g2", "g3", "g4"]
    world.promise("g0", 2)
    world.promise("g1", 2)
    assert world.newest.groups == ("g0", "g1")


def test_the_lighthouses_own_gap_forgives_silence() -> None:
    world = World()
    world.start()
    world.pass_s(1.0, {"g0": 3, "g1": 3, "g2": 3}, waiting_ms=50)
    world.now += 10  # this process stood still
    world.tick()
    assert not world.noted("group_lost")
    world.pass_s(1.8, {"g0": 3, "g1": 3}, waiting_ms=12_000)
    assert not world.noted("group_lost")
    world.pass_s(0.4, {"g0": 3, "g1": 3}, waiting_ms=12_000)
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g2"]


def test_the_first_message_after_the_lighthouses_own_gap_evicts_nobody() -> None:
    """After a thaw the messages that piled up are read before the timer of the tick runs."""
    world = World()
    world.start()
    world.pass_s(1.0, {"g0": 3, "g1": 3, "g2": 3}, waiting_ms=50)
    world.now += 10
    world.beat("g0", 3, "reduce", waiting_ms=10_000)
    assert not world.noted("group_lost"), "g1 and g2 are left out because the lighthouse was frozen"


def test_a_fenced_incarnation_that_returns_is_fenced_again() -> None:
    world = World()
    world.start()
    world.cut("g2")
    world.fail("g0")
    world.promise("g0", 0)
    world.promise("g1", 0)
    world.hello("g2", known=world.newest)
    (fence,) = world.told("g2", m.Fence)
    assert fence.reason == "its manager's stream broke and a member found the epoch broken"
    assert world.closed == ["g2"] and world.newest.groups == ("g0", "g1")
    world.say("g2", m.Failed(world.newest.epoch, 3, "late", ()))
    assert world.machine.recovery is None


def test_a_silent_member_that_beats_again_before_the_activation_is_back() -> None:
    """Its manager stood still for longer than the lease; its stream never broke, so it says no second hello."""
    world = World(groups=2, minimum=2)
    world.start()
    world.pass_s(2.4, {"g0": 3}, waiting_ms=2500)
    assert world.noted("group_lost")[0]["group"] == "g1"
    world.promise("g0", 2)
    world.forget_sent()
    world.pass_s(1.0, {"g0": 3, "g1": 3})
    assert world.is_asked("g1"), "g1 lives and beats, but the job waits for a second group for ever"
    world.promise("g0", 2)
    world.promise("g1", 2)
    assert world.newest.groups == ("g0", "g1")
