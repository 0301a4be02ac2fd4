"""A group one of whose ranks makes no progress: what its manager says, to whom, and when it ends by itself."""

from __future__ import annotations

from groupworld import GroupWorld

from lightkeeper.events.of_progress import Armed, Stuck
from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local
from lightkeeper.manager.answers import RankView


def does(world: GroupWorld, seconds: float, phase: str = "compute", step: int = 3, expected_s: float = 0.0) -> None:
    """Rank 1 does this for so long; rank 0 waits for it."""
    for tick in range(round(seconds / 0.25)):
        idle_s = 0.25 * (tick + 1)
        view = RankView(phase, step, 0.0, 0.0, 1000, idle_s=idle_s, expected_s=expected_s)
        world.pass_s(0.25, {0: RankView("reduce", step, idle_s, 0.0), 1: view})


def started(**settings: float) -> GroupWorld:
    """Two ranks in epoch 1, whose manager has seen some steps."""
    world = GroupWorld(ranks=2, **settings)
    world.start()
    for step in range(4):
        does(world, 1.0, step=step)
    return world


def test_a_stuck_rank_is_told_to_the_lighthouse_at_once_with_what_is_borne() -> None:
    world = started()
    world.forget()
    does(world, 15.0, step=4)
    assert not [beat for beat in world.said(m.Beat) if beat.overdue]
    does(world, 16.0, step=4)
    beats = [beat for beat in world.said(m.Beat) if beat.overdue]
    assert beats[0].overdue == m.Overdue(1, "compute", 15250, 15000, 4)
    assert {doing.ranks: doing.phase for doing in beats[0].ranks} == {(0,): "reduce", (1,): "compute"}
    assert not world.ended, "whether anybody waits for it, others know"


def test_the_event_says_it_once_per_phase_and_step_and_the_rank_is_told() -> None:
    world = started()
    world.forget()
    does(world, 20.0, step=4)
    (stuck,) = [event for event in world.events if isinstance(event, Stuck)]
    assert (stuck.rank, stuck.phase, stuck.step, stuck.deadline_s) == (1, "compute", 4, 15.0)
    assert stuck.how == "learnt from 4 steps"
    (line,) = [say.line for say in world.pushed(1, local.Say)]
    assert line == "rank 1 has made no progress in compute of step 4 for 15.2 s (15.0 s are borne)"


def test_it_says_that_it_watches_and_with_which_deadlines() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    for step in range(3):
        does(world, 1.0, step=step)
    (armed,) = [event for event in world.events if isinstance(event, Armed)]
    assert armed.learnt and armed.deadlines == {"compute": 15.0, "reduce": 15.0}
    (line,) = [say.line for say in world.pushed(0, local.Say)]
    assert line == "watches for ranks that make no progress: compute 15 s, reduce 15 s"


def test_what_was_declared_is_borne() -> None:
    world = started()
    world.forget()
    does(world, 100.0, "evaluation", 4, expected_s=120.0)
    assert not [event for event in world.events if isinstance(event, Stuck)]


def test_a_group_that_nobody_waits_for_ends_after_as_long_as_a_reduce_may_stand() -> None:
    world = started(outage_budget_s=8.0)
    does(world, 95.0, step=4)
    assert not world.ended
    does(world, 97.0, step=4)
    (end,) = world.ended
    assert end.exit_code == exits.GAVE_UP and "rank 1 has made no progress in compute of step 4" in end.reason
    assert world.killed


def test_a_rank_that_was_answered_and_does_not_get_on_is_stuck_in_its_vote() -> None:
    world = started()
    world.forget()
    for tick in range(80):
        asks = RankView("vote", 4, 0.0, 0.0, 1000, asks_s=0.25 * (tick + 1))
        world.pass_s(0.25, {0: RankView("reduce", 5, 1.0, 0.0, 1000), 1: asks})
    (stuck,) = [event for event in world.events if isinstance(event, Stuck)]
    assert (stuck.rank, stuck.phase, stuck.step) == (1, "vote", 4)


def test_a_rank_that_waits_for_an_answer_is_not() -> None:
    world = started()
    world.vote(1, "reduced", 0, at=1)
    world.forget()
    for tick in range(80):
        asks = RankView("vote", 4, 0.0, 0.0, 1000, asks_s=0.25 * (tick + 1))
        world.pass_s(0.25, {0: RankView("compute", 4, 0.0, 0.0, 1000, idle_s=1.0), 1: asks})
    assert not [event for event in world.events if isinstance(event, Stuck)]


def test_who_raised_and_takes_its_time_to_end_is_not_called_stuck() -> None:
    world = started()
    error = local.RankError(step=4, type="ValueError", message="bad", where="", traceback="")
    world.rank_says(1, error)
    world.forget()
    does(world, 9.0, step=4)
    assert not [event for event in world.events if isinstance(event, Stuck)]


def test_a_group_whose_job_has_ended_does_not_wait_for_a_stuck_rank() -> None:
    world = started()
    does(world, 16.0, step=4)
    world.hears(m.Stop("all groups asked to leave: SIGTERM", ok=True))
    does(world, 17.0, step=4)
    (end,) = world.ended
    assert end.exit_code == exits.GAVE_UP and "the job has ended meanwhile: all groups asked to leave" in end.reason


def test_it_lets_what_may_be_a_save_come_to_its_end() -> None:
    world = started()
    world.hears(m.Stop("finished: step 5 is final", ok=True))
    does(world, 60.0, "apply", 4)
    assert not world.ended


def hangs(world: GroupWorld, seconds: float, since_s: float) -> None:
    """Rank 1 stands where it stood before, for longer and longer; rank 0 has come out of it, and forms."""
    for tick in range(round(seconds / 0.25)):
        stands = RankView("reduce", 4, since_s + 0.25 * (tick + 1), 0.0, 1000)
        world.pass_s(0.25, {0: RankView("recover", 4, 0.0, 0.0, 1000), 1: stands})


def test_a_rank_that_what_it_stood_in_does_not_let_go_is_stuck() -> None:
    """As in an abort that hangs: it was told that the epoch is over, and stands there all the same."""
    world = started()
    world.prepare(2)
    world.activate(2, step=4)
    world.forget()
    hangs(world, 15.0, since_s=1.0)
    assert not [event for event in world.events if isinstance(event, Stuck)]
    hangs(world, 1.0, since_s=16.0)
    (stuck,) = [event for event in world.events if isinstance(event, Stuck)]
    assert (stuck.rank, stuck.phase, stuck.step) == (1, "reduce", 4) and 15.0 < stuck.since_s <= 16.0


def test_a_rank_that_stands_in_the_next_epoch_is_not() -> None:
    world = started()
    world.prepare(2)
    world.activate(2, step=4)
    world.pass_s(1.0, {0: RankView("recover", 4, 0.0, 0.0, 1000), 1: RankView("recover", 4, 0.0, 0.0, 1000)})
    world.forget()
    hangs(world, 60.0, since_s=0.0)
    assert not [event for event in world.events if isinstance(event, Stuck)]
