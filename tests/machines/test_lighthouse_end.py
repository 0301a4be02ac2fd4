"""How a job ends: finished, by its own bug, by everybody's death; and what comes after."""

from __future__ import annotations

import pytest
from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.status import status

BUG = m.UserError(5, "ValueError", "loss is nan", "train.py:12 in loop")


def test_the_same_exception_in_all_groups_stops_the_job_and_says_so() -> None:
    world = World()
    world.start()
    world.die("g0", error=BUG)
    world.die("g1", error=BUG)
    assert not world.told("g2", m.Stop)
    world.die("g2", error=BUG)
    assert world.noted("job_stopped") == [
        {
            "reason": "the same exception in all groups at step 5, a bug of the job: "
            "ValueError: loss is nan (train.py:12 in loop)",
            "ok": False,
        }
    ]


def test_the_exception_of_a_job_of_one_group_is_not_that_of_all_groups_and_is_told_by_its_briefly() -> None:
    world = World(groups=1)
    world.start()
    world.die("g0", error=m.UserError(5, "ValueError", "loss is nan\nTraceback", BUG.where))
    (stopped,) = world.noted("job_stopped")
    assert stopped["reason"] == (
        "an exception at step 5, a bug of the job: ValueError: loss is nan (train.py:12 in loop)"
    )


def test_the_same_exception_one_after_another_with_recoveries_between_stops_it_too() -> None:
    world = World()
    world.start()
    for group in ("g0", "g1"):
        world.die(group, error=BUG)
        world.promise_all(4)
    world.die("g2", error=BUG)
    assert "the same exception in all groups at step 5" in world.noted("job_stopped")[0]["reason"]


def test_an_exception_in_one_group_is_only_that_groups_end() -> None:
    world = World()
    world.start()
    world.die("g0", "rank 0 exited 1 after ValueError: loss is nan", error=BUG)
    world.promise_all(4)
    assert world.newest.groups == ("g1", "g2") and not world.noted("job_stopped")


@pytest.mark.parametrize(
    "other",
    [m.UserError(6, "ValueError", "loss is nan", BUG.where), m.UserError(5, "KeyError", "'x'", BUG.where), None],
)
def test_different_ends_of_all_groups_are_not_one_bug(other: m.UserError | None) -> None:
    world = World(groups=2)
    world.start()
    world.die("g0", error=BUG)
    world.die("g1", "other end", error=other)
    (stopped,) = world.noted("job_stopped")
    assert stopped["reason"] == "no group is left (g0: rank 0 was killed by SIGKILL; g1: other end)"


def test_when_nobody_is_left_a_new_run_of_the_job_starts_with_higher_numbers() -> None:
    world = World(groups=2)
    world.start()
    world.die("g0")
    world.die("g1")
    world.cut("g0", "g1")
    world.arrive("g0/i2", "g1/i2")
    world.promise("g0/i2")
    world.promise("g1/i2")
    assert world.newest.epoch.number > 1 and world.activate("g0/i2").first_step == 0
    assert world.activate("g0/i2").cause == (
        "first epoch: the job before it ended (no group is left (g0: rank 0 was killed by SIGKILL; g1: rank 0 was "
        "killed by SIGKILL))"
    ), "all groups are told that the run begins anew"


def test_finished_tells_those_whose_closing_failed_to_stop_well() -> None:
    world = World()
    first = world.start()
    world.say("g0", m.Finished(first, 10))
    assert not world.told("g1", m.Stop), "it may still close by itself"
    world.fail("g1", 10)
    (stop,) = world.told("g1", m.Stop)
    assert stop.ok and stop.reason == "finished: step 10 is final"
    assert not world.told("g2", m.Stop) and not world.is_asked("g2")
    world.say("g2", m.Finished(first, 10))
    assert len(world.noted("finished")) == 1


def test_finished_ends_a_recovery_of_the_closing_reduce() -> None:
    world = World()
    first = world.start()
    world.fail("g1", 10)
    assert world.is_asked("g0")
    world.say("g0", m.Finished(first, 10))
    assert world.told("g1", m.Stop)[0].ok and world.told("g2", m.Stop)[0].ok


def test_the_job_is_forgotten_when_all_have_left_and_runs_again_with_higher_numbers() -> None:
    world = World(groups=2)
    first = world.start()
    world.say("g0", m.Finished(first, 10))
    world.hello("g9")
    assert world.told("g9", m.Refused)[0].retry and "has just ended" in world.reason("g9")
    world.say("g1", m.Finished(first, 10))
    world.cut("g0", "g1")
    assert world.machine.newest is None and world.history.membership is None
    world.arrive("g0/i2", "g1/i2", groups=2)
    world.promise("g0/i2")
    world.promise("g1/i2")
    assert world.newest.epoch.number == 2 and world.activate("g1/i2").first_step == 0


def test_a_late_death_after_the_end_does_not_begin_a_recovery() -> None:
    world = World(groups=2)
    first = world.start()
    world.say("g0", m.Finished(first, 10))
    world.cut("g0")
    world.die("g1", "rank 0 exited 1")
    assert not world.is_asked("g1") and not world.is_asked("g0")


def test_who_missed_the_stop_hears_it_when_it_returns() -> None:
    world = World()
    first = world.start()
    world.say("g0", m.Finished(first, 10))
    world.fail("g1", 10)  # the stop goes into a stream that is about to break
    world.cut("g1")
    world.forget_sent()
    world.hello("g1", known=world.newest)
    assert world.told("g1", m.Stop) and not world.told("g1", m.Fence)


def test_a_finished_job_is_not_forgotten_before_a_member_out_of_touch_had_its_lease() -> None:
    world = World(groups=2)
    first = world.start()
    membership = world.newest
    world.cut("g1")
    world.say("g0", m.Finished(first, 10))
    world.cut("g0")
    world.pass_s(0.5)
    world.hello("g1", known=membership)
    world.join("g1")
    world.say("g1", m.Failed(first, 10, "reported before the stream broke"))
    (stop,) = world.told("g1", m.Stop)
    assert stop.ok


def test_after_the_end_no_activation_is_repeated() -> None:
    world = World(groups=2)
    first = world.start()
    world.fail("g0")
    world.promise_all(9)
    world.say("g0", m.Finished(first, 10))
    world.forget_sent()
    world.pass_s(3)
    assert not world.told("g1", m.Activate)


def test_the_last_one_out_may_have_missed_the_stop_too() -> None:
    """g0 has said that it finished and is gone; the stop for g1 goes into a stream that is broken already."""
    world = World(groups=2)
    first = world.start()
    membership = world.newest
    world.say("g0", m.Finished(first, 10))
    world.cut("g0")
    world.fail("g1", 10)
    world.cut("g1")
    world.forget_sent()
    world.arrive("g1", known=membership)
    (stop,) = world.told("g1", m.Stop)
    assert stop.ok


def test_while_groups_wait_for_the_next_run_the_status_says_for_whom_and_how_the_last_one_ended() -> None:
    """All groups vanish; two are started again, and the third is fenced."""
    world = World()
    world.start()
    world.cut("g0", "g1", "g2")
    world.pass_s(5)
    world.arrive("g0/i2", "g2/i2")
    assert status(world.machine, world.now).waiting.startswith("g1 (") and world.fence("g1", "ann") == ""
    reply = status(world.machine, world.now)
    assert reply.waiting.startswith("1 more group (the first epoch needs 3) for ")
    assert "ann says that its processes are gone" in reply.ended and not reply.stopped
    world.cut("g0/i2", "g2/i2")
    reply = status(world.machine, world.now)
    assert "ann says that its processes are gone" in reply.stopped and not reply.waiting and not reply.ended


def test_the_status_counts_the_members_in_touch() -> None:
    world = World()
    world.start()
    world.cut("g2")
    world.pass_s(3, {"g0": 5, "g1": 5})
    world.arrive("g2/i2")
    assert status(world.machine, world.now).members_in_touch == 2, "g2/i2 is no member"
    states = {group.group: group.state for group in status(world.machine, world.now).groups}
    assert states == {"g0": "member", "g1": "member", "g2": "joining"}
