"""Too few groups are left: how long that is borne, how the job ends, and who keeps its last committed step."""

from __future__ import annotations

import pytest
from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.status import status

WAIT_S = 10.0


def running(groups: int = 3, minimum: int = 2, wait_s: float | None = WAIT_S) -> World:
    """A job in its first epoch."""
    world = World(groups, minimum)
    world.arrive(*(f"g{i}" for i in range(groups)), quorum_wait_s=wait_s)
    world.promise_all()
    world.sent.clear()
    return world


def lose(world: World, *groups: str) -> None:
    for group in groups:
        world.die(group)
        world.cut(group)


def stop(world: World, speaker: str) -> m.Stop:
    (told,) = world.told(speaker, m.Stop)
    assert isinstance(told, m.Stop)
    return told


def survivor(wait_s: float | None = WAIT_S) -> World:
    """g0 alone of three stands at step 5, below a minimum of two."""
    world = running(wait_s=wait_s)
    lose(world, "g1", "g2")
    world.promise("g0", step=4)
    return world


def test_before_the_wait_is_over_it_stands_and_says_for_whom_and_until_when() -> None:
    world = survivor()
    world.pass_s(WAIT_S - 1, {"g0": 5})
    assert not world.told("g0", m.Stop) and world.machine.recovery is not None
    assert world.reason("g0") == "any group: at least 2 groups; the job ends when there have been fewer for 10 s"
    said = status(world.machine, world.now).waiting
    assert said == "any group (at least 2 groups; the job ends when there have been fewer for 10 s) for 9.0 s"
    assert world.noted("waiting")[-1]["since_s"] == pytest.approx(WAIT_S - 1, abs=1.0)


def test_after_it_the_job_ends_and_the_survivor_keeps_its_last_step() -> None:
    world = survivor()
    world.pass_s(WAIT_S, {"g0": 5})
    told = stop(world, "g0")
    assert (told.ok, told.keep, told.quorum_lost) == (False, "g0", True)
    assert told.reason == (
        "quorum lost: g1, g2 lost: rank 0 was killed by SIGKILL; of at least 2 groups g0 alone was left for 10 s; "
        "g0 keeps the state after step 4, if its script saves checkpoints; start all groups again, and the job "
        "goes on from there"
    )
    assert world.noted("job_stopped") == [{"reason": told.reason, "ok": False, "keep": "g0"}]
    ended = world.logged[-1]
    assert ended == type(ended)(told.reason, False), "it is logged, so no later lighthouse goes on from that epoch"
    assert world.history.broken_off is not None and not world.told("g0", m.Activate)
    world.pass_s(5, {"g0": 5})
    assert len(world.told("g0", m.Stop)) == 1 and not world.told("g0", m.Fence), "it may take its time to save"


def test_who_was_lost_in_an_earlier_epoch_is_named_too() -> None:
    world = running()
    lose(world, "g1")
    world.promise_all(step=4)
    assert world.newest.groups == ("g0", "g2")
    world.die("g2", "rank 0 exited 1")
    world.promise("g0", step=7)
    world.pass_s(WAIT_S, {"g0": 8})
    reason = stop(world, "g0").reason
    assert reason.startswith(
        "quorum lost: g2 lost: rank 0 exited 1; g1 lost: rank 0 was killed by SIGKILL; of at least 2"
    )
    assert "g0 keeps the state after step 7, " in reason


def test_a_job_that_has_committed_nothing_has_nothing_to_keep() -> None:
    world = running()
    lose(world, "g1", "g2")
    world.promise("g0")
    world.pass_s(WAIT_S, {"g0": 0})
    told = stop(world, "g0")
    assert told.quorum_lost and not told.keep and "no step was committed since the job began" in told.reason


def test_with_nothing_to_wait_it_ends_at_once_and_if_nothing_was_said_never() -> None:
    assert stop(survivor(wait_s=0.0), "g0").keep == "g0"
    world = survivor(wait_s=None)
    world.pass_s(300, {"g0": 5})
    assert not world.told("g0", m.Stop) and world.reason("g0") == "any group: at least 2 groups"


def test_those_who_stand_bear_it_as_long_as_the_most_impatient() -> None:
    world = World(4, minimum=3)
    for group, wait_s in (("g0", 20.0), ("g1", 5.0), ("g2", 1.0), ("g3", 20.0)):
        world.arrive(group, quorum_wait_s=wait_s)
    world.promise_all()
    lose(world, "g2", "g3")  # that one would have waited less
    world.promise_all(step=4)
    world.pass_s(4.5, {"g0": 5, "g1": 5})
    assert not world.told("g0", m.Stop)
    world.pass_s(0.5, {"g0": 5, "g1": 5})
    assert stop(world, "g0").quorum_lost and "only g0, g1 were left for 5 s" in stop(world, "g1").reason


def test_a_group_that_returns_during_the_wait_ends_it() -> None:
    world = survivor()
    world.pass_s(WAIT_S - 2, {"g0": 5})
    world.arrive("g1/i2", quorum_wait_s=WAIT_S)
    world.beat("g1/i2", 5, "follow", epoch=0)
    world.tick()
    world.promise("g0", step=4)
    world.promise("g1/i2", step=4)
    assert world.newest.groups == ("g0", "g1") and world.machine.stood_s is None
    world.pass_s(WAIT_S + 5, {"g0": 6, "g1/i2": 6})
    assert not world.told("g0", m.Stop)
    world.die("g1/i2")
    world.promise("g0", step=9)
    world.pass_s(WAIT_S - 1, {"g0": 10})
    assert not world.told("g0", m.Stop), "the next one is counted from its own beginning"
    world.pass_s(1, {"g0": 10})
    assert stop(world, "g0").quorum_lost


def test_a_joiner_that_has_not_caught_up_does_not_end_it_and_is_told_too() -> None:
    world = survivor()
    world.pass_s(WAIT_S - 2, {"g0": 5})
    world.arrive("g1/i2", quorum_wait_s=WAIT_S)
    assert world.told("g1/i2", m.Heal)
    world.pass_s(2, {"g0": 5})
    assert stop(world, "g0").keep == "g0"
    told = stop(world, "g1/i2")
    assert not told.keep and told.quorum_lost and "g1 had not caught up" in told.reason
    assert not world.told("g1/i2", m.Heal)[1:], "nothing is healed any more"


def test_while_enough_groups_heal_it_waits_half_way_to_where_each_would_give_up_by_itself() -> None:
    world = World(3, minimum=2)
    world.arrive("g0", "g1", "g2", quorum_wait_s=WAIT_S, outage_budget_s=3 * WAIT_S)
    world.promise_all()
    lose(world, "g1", "g2")
    world.promise("g0", step=4)
    world.pass_s(WAIT_S - 2, {"g0": 5})
    world.arrive("g1/i2", quorum_wait_s=WAIT_S, outage_budget_s=3 * WAIT_S)
    assert world.told("g1/i2", m.Heal)
    world.pass_s(WAIT_S + 1, {"g0": 5, "g1/i2": 0})
    assert not world.told("g0", m.Stop), "19 s of 20"
    world.pass_s(1, {"g0": 5, "g1/i2": 0})
    assert "g0 alone was left for 20 s" in stop(world, "g0").reason


def test_if_the_one_that_healed_is_gone_it_ends_at_once() -> None:
    world = World(3, minimum=2)
    world.arrive("g0", "g1", "g2", quorum_wait_s=WAIT_S, outage_budget_s=3 * WAIT_S)
    world.promise_all()
    lose(world, "g1", "g2")
    world.promise("g0", step=4)
    world.arrive("g1/i2", quorum_wait_s=WAIT_S, outage_budget_s=3 * WAIT_S)
    world.pass_s(WAIT_S + 2, {"g0": 5, "g1/i2": 0})
    assert not world.told("g0", m.Stop)
    world.cut("g1/i2")
    assert stop(world, "g0").quorum_lost


def test_a_death_during_the_wait_does_not_begin_it_anew() -> None:
    world = running(groups=4, minimum=3)
    lose(world, "g2", "g3")
    world.promise_all(step=4)
    world.pass_s(WAIT_S - 2, {"g0": 5, "g1": 5})
    lose(world, "g0")
    world.promise("g1", step=4)
    world.pass_s(2, {"g1": 5})
    assert stop(world, "g1").keep == "g1" and "g0, g2, g3 lost: rank 0 was killed" in stop(world, "g1").reason


def test_of_two_survivors_the_lower_slot_keeps_it_and_both_are_told() -> None:
    world = running(groups=4, minimum=3)
    lose(world, "g0", "g2")
    world.promise_all(step=4)
    world.pass_s(WAIT_S, {"g1": 5, "g3": 5})
    assert stop(world, "g1").keep == "g1"
    assert stop(world, "g3").quorum_lost and stop(world, "g3").reason == stop(world, "g1").reason
    assert not stop(world, "g3").keep, "it keeps nothing"


def test_the_lower_slot_that_is_one_entry_behind_does_not_keep_it() -> None:
    world = running(groups=4, minimum=3)
    lose(world, "g1", "g3")
    world.promise("g0", step=4)
    world.promise("g2", step=5)
    world.pass_s(WAIT_S, {"g0": 5, "g2": 6})
    assert stop(world, "g2").keep == "g2" and "g2 keeps the state after step 5, " in stop(world, "g2").reason
    assert not stop(world, "g0").keep


def test_before_everybody_who_must_has_promised_nothing_ends() -> None:
    world = running(groups=4, minimum=3)
    lose(world, "g2", "g3")
    world.promise("g0", step=4)
    world.pass_s(2 * WAIT_S, {"g0": 5, "g1": 5})
    assert not world.told("g0", m.Stop) and world.reason("g0") == "g1: their promise"
    world.promise("g1", step=5)
    world.pass_s(WAIT_S - 0.5, {"g0": 5, "g1": 6})
    assert not world.told("g0", m.Stop), "it has stood for less"
    world.pass_s(0.5, {"g0": 5, "g1": 6})
    assert stop(world, "g1").keep == "g1"


def test_while_a_silent_member_may_live_nothing_ends() -> None:
    world = running(groups=2, minimum=2)
    world.fail("g0", 5)
    world.promise("g0", step=4)
    world.pass_s(WAIT_S + 5, {"g0": 5, "g1": 5})
    assert not world.told("g0", m.Stop) and not world.noted("group_lost"), "it has not promised, and beats"
    world.pass_s(3, {"g0": 5})
    assert world.noted("group_lost") and not world.told("g0", m.Stop), "the wait begins when it is left out"
    world.promise("g0", step=4)
    world.pass_s(WAIT_S, {"g0": 5})
    assert "g1 lost: " in stop(world, "g0").reason


def test_a_lighthouse_that_does_not_reign_ends_nothing() -> None:
    world = running()
    membership = world.newest
    world.restart(log=False)
    world.hello("g0", known=membership, quorum_wait_s=WAIT_S)
    world.join("g0")
    world.fail("g0", 5)
    world.promise("g0", step=4, known=membership)
    world.pass_s(3 * WAIT_S, {"g0": 5})
    assert not world.told("g0", m.Stop)
    assert "this lighthouse may not leave anybody out" in world.reason("g0")
    assert world.fence("g1", "ann") == "" and world.fence("g2", "ann") == ""
    world.promise("g0", step=4, known=membership)
    world.pass_s(WAIT_S, {"g0": 5})
    assert stop(world, "g0").quorum_lost and "ann says that its processes are gone" in stop(world, "g0").reason


def test_one_that_was_started_again_with_its_log_counts_from_its_own_start() -> None:
    world = running()
    membership = world.newest
    lose(world, "g1", "g2")
    world.promise("g0", step=4)
    world.pass_s(WAIT_S - 1, {"g0": 5})
    world.restart()
    world.hello("g0", known=membership, promised=2, quorum_wait_s=WAIT_S)
    world.join("g0")
    assert world.is_asked("g0"), "what the other one began is begun anew"
    world.promise("g0", step=4, known=membership)
    world.pass_s(5, {"g0": 5})
    assert world.noted("group_lost")[-1]["detected_by"] == "lease" and not world.told("g0", m.Stop)
    world.promise("g0", step=4, known=membership)
    world.pass_s(WAIT_S, {"g0": 5})
    assert stop(world, "g0").keep == "g0"


def test_the_keeper_that_comes_back_on_another_stream_is_told_again_and_a_new_start_of_it_is_not() -> None:
    world = survivor()
    world.pass_s(WAIT_S, {"g0": 5})
    membership = world.newest
    world.cut("g0")
    world.forget_sent()
    world.hello("g0", known=membership, promised=2, quorum_wait_s=WAIT_S)
    assert stop(world, "g0").keep == "g0" and not world.told("g0", m.Fence)
    world.hello("g0/i2")
    (refused,) = world.told("g0/i2", m.Refused)
    assert refused.retry and "has just ended (quorum lost: " in refused.reason
    assert not world.told("g0/i2", m.Stop)


def test_a_lighthouse_that_stood_still_itself_hears_first_who_has_come_meanwhile() -> None:
    world = survivor()
    world.pass_s(2, {"g0": 5})
    world.now += WAIT_S
    world.tick()
    assert not world.told("g0", m.Stop)
    world.arrive("g1/i2", quorum_wait_s=WAIT_S)
    world.beat("g1/i2", 5, "follow", epoch=0)
    world.tick()
    world.promise("g0", step=4)
    world.promise("g1/i2", step=4)
    assert world.newest.groups == ("g0", "g1")


def test_it_ends_a_lease_after_such_a_standstill_if_nobody_has() -> None:
    world = survivor()
    world.pass_s(2, {"g0": 5})
    world.now += WAIT_S
    world.pass_s(1.75, {"g0": 5})
    assert not world.told("g0", m.Stop)
    world.pass_s(0.5, {"g0": 5})
    assert stop(world, "g0").quorum_lost


def test_a_keeper_whose_host_is_gone_does_not_hold_the_next_start_up_for_ever() -> None:
    world = survivor()
    world.pass_s(WAIT_S, {"g0": 5})
    world.pass_s(9, {"g0": 5})
    assert world.machine.stopped is not None, "it beats, and may be saving"
    world.pass_s(9)
    assert world.machine.stopped is not None
    world.pass_s(2)
    assert world.machine.stopped is None and world.machine.newest is None
    world.hello("g0/i2")
    assert not world.told("g0/i2", m.Refused)


def test_who_was_left_out_and_comes_back_keeps_nothing() -> None:
    """Frozen, it may be alone with an entry that nobody else has."""
    world = running(groups=2, minimum=2)
    membership = world.newest
    world.cut("g0")
    world.fail("g1", 5)
    world.promise("g1", step=4)
    world.pass_s(5 + WAIT_S, {"g1": 5})
    assert stop(world, "g1").keep == "g1"
    world.forget_sent()
    world.hello("g0", known=membership)
    assert stop(world, "g0").quorum_lost and not stop(world, "g0").keep
    world.cut("g0", "g1")
    world.pass_s(3)
    world.hello("g0", known=membership)
    assert world.told("g0", m.Fence), "later the job is over for it"


def test_after_the_end_the_groups_that_are_started_again_begin_a_job_with_higher_numbers() -> None:
    world = survivor()
    world.pass_s(WAIT_S, {"g0": 5})
    world.cut("g0")
    world.pass_s(3)
    assert world.machine.newest is None and world.machine.ended.startswith("quorum lost: ")
    for group in ("g0/i2", "g1/i2", "g2/i2"):
        world.hello(group, quorum_wait_s=WAIT_S)
        world.join(group, step=5)
    for group in ("g0/i2", "g1/i2", "g2/i2"):
        world.promise(group, begins=5)
    assert world.newest.epoch.number > 2 and world.activate("g0/i2").first_step == 5
    assert world.activate("g0/i2").cause.startswith("first epoch: the job before it ended (quorum lost: g1, g2 lost")


def test_if_those_who_are_missing_left_as_asked_nobody_is_called_lost() -> None:
    world = running(groups=3, minimum=3)
    world.say("g2", m.Leave("SIGTERM"))
    world.say("g2", m.Left(world.planned("g0").epoch, 6))
    world.promise_all(step=5)
    world.pass_s(WAIT_S, {"g0": 6, "g1": 6})
    told = stop(world, "g0")
    assert told.quorum_lost and told.keep == "g0" and not world.noted("group_lost")
    assert told.reason.startswith(
        "quorum lost: g2 left before step 6: SIGTERM; of at least 3 groups only g0, g1 were left"
    )


# ---------------------------------------------------------------- all asked to leave


def test_when_all_are_asked_to_leave_one_keeps_it_that_no_planned_change_has_leave() -> None:
    world = running(groups=3, minimum=1)
    for group in ("g0", "g1", "g2"):
        world.beat(group, 6)
    world.say("g2", m.Leave("SIGTERM"))
    assert world.planned("g1").groups == ("g0", "g1"), "the entries may put it in force at any moment"
    world.say("g0", m.Leave("SIGTERM"))
    assert world.planned("g1").groups == ("g1",)
    world.say("g1", m.Leave("SIGTERM"))
    told = {group: stop(world, group) for group in ("g0", "g1", "g2")}
    assert all(one.ok and not one.quorum_lost for one in told.values())
    assert {group: one.keep for group, one in told.items()} == {"g0": "", "g1": "g1", "g2": ""}
    assert world.noted("job_stopped")[0]["keep"] == "g1"


@pytest.mark.parametrize(("steps", "keeper"), [((6, 6, 6), "g0"), ((5, 6, 6), "g1"), ((6, 5, 6), "g0")])
def test_if_none_was_prepared_the_lowest_slot_of_those_furthest_on_does(steps: tuple[int, ...], keeper: str) -> None:
    world = running(groups=3, minimum=1)
    for i, step in enumerate(steps):
        world.beat(f"g{i}", step)
    for group in ("g2", "g0"):
        world.machine.groups[group].leaving = "SIGTERM"  # by another lighthouse's streams: nothing was prepared here
    world.say("g1", m.Leave("SIGTERM"))
    assert world.noted("job_stopped")[0]["keep"] == keeper == stop(world, keeper).keep


def test_who_has_said_nothing_of_this_epoch_is_not_furthest() -> None:
    world = running(groups=2, minimum=1)
    world.beat("g0", 40, epoch=0)
    world.beat("g1", 6)
    world.machine.groups["g0"].leaving = "SIGTERM"
    world.say("g1", m.Leave("SIGTERM"))
    assert stop(world, "g1").keep == "g1"


def test_the_last_of_those_that_stand_below_the_minimum_keeps_it_when_it_is_asked_to_leave() -> None:
    world = running(groups=3, minimum=3)
    lose(world, "g2")
    world.promise("g0", step=5)
    world.promise("g1", step=5)
    world.say("g0", m.Leave("SIGTERM"))
    assert not stop(world, "g0").keep, "the job goes on standing"
    world.promise("g1", step=5)
    world.say("g1", m.Leave("SIGTERM"))
    told = stop(world, "g1")
    assert told.ok and told.keep == "g1"


def test_who_could_not_follow_and_lives_is_told_of_the_end_too() -> None:
    """Nobody else speaks to it any more: it would wait for ever, and whoever comes after the end for it."""
    world = running(minimum=3)
    world.say("g2", m.Lost("no donor has the entry that follows"))
    for group in ("g0", "g1"):
        world.promise(group, step=4)
    world.pass_s(WAIT_S, {"g0": 5, "g1": 5})
    assert stop(world, "g0").quorum_lost and stop(world, "g2").quorum_lost and not stop(world, "g2").keep


def test_who_was_fenced_is_told_of_no_end() -> None:
    """It was frozen, and thaws as the others finish: it would take their end for its own."""
    world = running()
    world.fail("g0", 5)
    world.pass_s(6, {"g0": 5, "g1": 5}, waiting_ms=6000)
    for group in ("g0", "g1"):
        world.promise(group, step=4)
    assert world.newest.groups == ("g0", "g1") and world.told("g2", m.Fence)
    for group in ("g0", "g1"):
        world.say(group, m.Finished(world.newest.epoch, 9))
    world.pass_s(1)
    assert not world.told("g2", m.Stop)
