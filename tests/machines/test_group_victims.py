"""A rank's end breaks the collectives of the group's other ranks: it is the cause, and they are victims."""

from __future__ import annotations

from groupworld import GroupWorld

from lightkeeper.events import schema
from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local
from lightkeeper.manager.ends import CAUSE_S_MAX
from lightkeeper.manager.restarts import GroupEnd, may_restart


def broken(rank_error: str = "Connection closed by peer") -> local.RankError:
    return local.RankError(step=5, type="RuntimeError", message=rank_error, where="w", traceback="", broken=True)


def bug() -> local.RankError:
    return local.RankError(step=5, type="ValueError", message="loss is nan", where="train.py:12", traceback="T")


def test_the_rank_that_died_is_the_cause_though_another_raised_first() -> None:
    world = GroupWorld(ranks=3)
    world.start()
    world.rank_says(0, broken())
    world.rank_ends(0, 1)
    assert not world.told and not world.killed and not world.events
    world.rank_ends(2, -9, "compute", 5)
    (died,) = world.said(m.Died)
    assert (died.cause, died.rank, died.error) == ("rank 2 was killed by SIGKILL", 2, None)
    assert [end.exit_code for end in world.ended] == [137] and world.killed and not world.events


def test_a_victim_that_raises_after_the_death_is_not_heard() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.rank_ends(1, -9)
    world.rank_says(0, broken())
    assert len(world.said(m.Died)) == len(world.ended) == 1 and not world.events


def test_the_rank_with_the_users_bug_is_the_cause() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.rank_says(0, broken())
    world.rank_says(1, bug())
    (died,) = world.said(m.Died)
    assert died.error == m.UserError(5, "ValueError", "loss is nan", "train.py:12") and died.rank == 1
    world.rank_ends(0, 1)
    assert not world.ended, "the rank with the bug may still be about to print it"
    world.rank_ends(1, 1)
    assert world.said(m.Died)[-1].rank == 1 and world.ended[0].exit_code == 1
    assert [type(event) for event in world.events] == [schema.UserError]


def test_a_traceback_in_a_message_is_for_the_events_and_all_else_is_one_line() -> None:
    message = "sample 3 of the data set failed: OSError: gone\n\nTraceback (most recent call last):\n  File a, line 3\n"
    world = GroupWorld(ranks=2)
    world.start()
    world.rank_says(1, local.RankError(step=5, type="SampleError", message=message, where="w", traceback="T"))
    world.rank_ends(1, 1)
    (event,) = world.events
    assert isinstance(event, schema.UserError) and event.message == message
    first, last = world.said(m.Died)
    assert first.cause == "rank 1 raised SampleError: sample 3 of the data set failed: OSError: gone"
    assert last.cause == "rank 1 exited 1 after SampleError: sample 3 of the data set failed: OSError: gone"
    assert first.error is not None and first.error == last.error and "\n" not in first.error.message
    assert [end.reason for end in world.ended] == ["rank 1 exited 1 after SampleError at step 5, which it has printed"]


def test_a_bug_of_all_ranks_is_told_once() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.rank_says(0, bug())
    world.rank_says(1, bug())
    assert len(world.said(m.Died)) == 1 and len(world.events) == 2


def test_if_no_rank_is_the_cause_they_came_apart_and_nobody_has_a_bug() -> None:
    world = GroupWorld(ranks=3)
    world.start()
    world.rank_says(1, broken())
    world.pass_s(CAUSE_S_MAX - 0.25)
    assert not world.ended
    world.pass_s(0.75)
    (died,) = world.said(m.Died)
    assert died.error is None and "rank 1 lost its connection to the other ranks" in died.cause
    assert [end.exit_code for end in world.ended] == [exits.ORPHANED] and world.killed
    assert may_restart(GroupEnd(exits.ORPHANED, 1)), "it is the network's fault: started again it heals"


def test_if_all_ranks_are_victims_nothing_is_waited_for() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.rank_says(1, broken())
    world.rank_says(0, broken())
    assert "rank 0 lost its connection" in world.said(m.Died)[0].cause and len(world.ended) == 1


def test_what_breaks_because_the_job_stops_is_no_cause_of_anything() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.hears(m.Stop("the first cause", ok=False))
    world.rank_says(0, broken())
    world.rank_ends(0, 1)
    assert world.ended[0].exit_code == 106 and world.ended[0].reason == "the first cause"


def test_a_group_of_one_rank_has_no_victims() -> None:
    world = GroupWorld()
    world.start()
    world.rank_says(0, broken())
    assert world.said(m.Died)[0].error is not None and len(world.events) == 1


def test_a_rank_that_does_not_go_on_because_another_failed_blames_nobody() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "failed", 0, at=1, error="another rank of this group does not go on", echo=True)
    assert not world.said(m.Failed)
    world.vote(1, "failed", 0, at=1, error="reset by peer", suspects=("g2",))
    (failed,) = world.said(m.Failed)
    assert failed.suspects == ("g2",) and [event.rank for event in world.events] == [0, 1]
