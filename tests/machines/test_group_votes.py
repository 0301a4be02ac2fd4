"""Votes and answers: one order, one answer, the same for every rank."""

from __future__ import annotations

import pytest
from groupworld import TOTAL, GroupWorld, epoch

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import local

both_sizes = pytest.mark.parametrize("ranks", [1, 2])


@both_sizes
def test_go_once_every_rank_has_reduced_and_not_before(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    for rank in range(ranks):
        assert not any(world.answers(r) for r in range(ranks))
        world.vote(rank, "reduced", 0, at=1)
    answer = world.answer()
    assert (answer.verdict, answer.epoch, answer.step, answer.ready) == ("go", 1, 1, 0)
    assert answer.share == tuple(range(8, 16)), "second of three slots"
    assert world.machine.last == Entry(epoch(1), 0)


@both_sizes
def test_the_share_of_the_next_step_is_dealt_from_its_own_total(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    world.vote_all("reduced", 0, at=1, next_total=7)
    assert world.answer().share == (3, 4)
    world.vote_all("reduced", 1, at=1, next_total=0)
    assert world.answer().share == ()


@both_sizes
def test_again_if_one_rank_needs_it_and_nothing_is_committed(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    for rank in range(ranks):
        world.vote(rank, "again" if rank == ranks - 1 else "reduced", 0, at=1)
    answer = world.answer()
    assert (answer.verdict, answer.step) == ("again", 0) and world.machine.last is None
    world.vote_all("reduced", 0, at=1, attempt=1)
    assert world.answer().verdict == "go" and world.machine.step == 1


def test_a_late_rank_gets_the_answer_that_was_given() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote_all("reduced", 0, at=1)
    given = world.answer()
    world.prepare(2)
    world.vote(1, "reduced", 0, at=1)
    assert world.answers(1) == [given, given]
    world.activate(2, step=1)
    world.vote(0, "reduced", 0, at=1)
    assert world.answers(0)[-1] == given, "fixed once, also after the epoch is over"


@both_sizes
def test_votes_after_a_prepare_are_answered_recover_and_commit_nothing(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    world.prepare(2)
    world.vote_all("reduced", 0, at=1)
    assert not world.answers(), "undecided until the activation"
    assert world.machine.last is None
    world.activate(2, "g0", "g1", step=0, share=(8, 9, 20))
    answer = world.answer()
    assert (answer.verdict, answer.step) == ("recover", 0)
    plan = answer.plan
    assert plan is not None and plan.share == (8, 9, 20) and plan.members == ("g0", "g1") and plan.slot == 1
    assert plan.adopt is None and plan.total == TOTAL


def test_a_prepare_between_the_votes_of_two_ranks_decides_against_the_step() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "reduced", 0, at=1)
    world.prepare(2)
    (promise,) = world.said(m.Promise)
    assert promise.last is None
    world.vote(1, "reduced", 0, at=1)
    assert not world.answers(0) and not world.answers(1)
    world.activate(2)
    assert world.answer().verdict == "recover"


def test_a_rank_that_votes_on_the_old_epoch_after_the_activation_recovers_with_the_others() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "failed", 0, at=1, error="broken", suspects=("g2",))
    world.prepare(2)
    world.activate(2, "g0", "g1")
    assert world.answers(0)[-1].verdict == "recover" and not world.answers(1)
    world.vote(1, "failed", 0, at=1, error="aborted")
    assert world.answers(1)[-1].plan.epoch == 2
    assert len(world.said(m.Failed)) == 1, "the new epoch has not failed"


@both_sizes
def test_a_failed_vote_is_told_once_and_aborts_the_other_ranks(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    world.vote(0, "failed", 0, at=1, error="connection closed by peer", suspects=("g2",))
    assert world.said(m.Failed) == [m.Failed(epoch(1), 0, "connection closed by peer", ("g2",))]
    for rank in range(ranks):
        assert [abort.below for abort in world.pushed(rank, local.Abort)] == [2]
    for rank in range(1, ranks):
        world.vote(rank, "failed", 0, at=1, error="aborted", suspects=("g1",))
    assert len(world.said(m.Failed)) == 1 and not world.answers()


def test_a_step_that_failed_on_one_rank_is_not_committed_by_the_other() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "failed", 0, at=1, error="broken")
    world.vote(1, "reduced", 0, at=1)
    world.prepare(2)
    assert world.said(m.Promise)[0].last is None
    world.activate(2)
    assert world.answer().verdict == "recover"


def test_a_failure_after_the_promise_is_not_news() -> None:
    world = GroupWorld()
    world.start()
    world.prepare(2)
    world.vote(0, "failed", 0, at=1, error="aborted")
    assert not world.said(m.Failed)


@both_sizes
def test_adopt_then_go_on_with_the_share_of_the_first_step(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    world.vote_all("reduced", 0, at=1)
    world.vote_all("reduced", 1, at=1)
    missed = Entry(epoch(1), 2)
    world.prepare(2)
    world.activate(2, step=3, share=(20, 21), total=22, donor="g0", entry=missed)
    world.vote_all("failed", 2, at=1, error="aborted")
    for rank in range(ranks):
        plan = world.answers(rank)[-1].plan
        assert plan is not None and plan.adopt is not None and plan.step == 2
        assert (plan.adopt.step, plan.adopt.epoch, plan.adopt.donor) == (2, 1, "g0")
        assert plan.adopt.address == f"g0:{10 + rank}", "rank by rank"
    world.vote_all("adopted", 2, at=2, next_total=22)
    answer = world.answer()
    assert (answer.verdict, answer.step, answer.share) == ("go", 3, (20, 21))
    assert world.machine.last == missed, "committed under the name it has with the others"
    world.vote_all("reduced", 3, at=2)
    assert world.machine.last == Entry(epoch(2), 3)


@both_sizes
def test_a_failed_fetch_is_told_and_adopted_from_another_donor(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    missed = Entry(epoch(1), 0)
    world.prepare(2)
    world.activate(2, step=1, donor="g0", entry=missed)
    world.vote(0, "failed", 0, at=2, error="fetching from g0: connection refused", suspects=("g0",))
    assert world.said(m.Failed)[-1].epoch == epoch(2)
    world.prepare(3)
    promise = world.said(m.Promise)[-1]
    assert promise.last is None and promise.held == tuple(range(8, 16)), "what it computed for the missed step"
    world.activate(3, "g1", "g2", step=1, donor="g2", entry=missed)
    assert world.answers()[-1].plan.adopt.donor == "g2"


def test_a_new_prepare_during_adoption_is_promised_at_once_and_the_adoption_is_not_committed() -> None:
    world = GroupWorld()
    world.start()
    world.vote_all("reduced", 0, at=1)
    missed = Entry(epoch(1), 1)
    world.prepare(2)
    world.activate(2, step=2, donor="g0", entry=missed)
    world.vote(0, "failed", 1, at=1, error="aborted")
    world.prepare(3)
    promise = world.said(m.Promise)[-1]
    assert promise.epoch == epoch(3) and promise.last == Entry(epoch(1), 0)
    answers = len(world.answers())
    world.vote(0, "adopted", 1, at=2)
    assert len(world.answers()) == answers and world.machine.last == Entry(epoch(1), 0)
    world.activate(3, step=2, donor="g2", entry=missed)
    assert world.answers()[-1].plan.adopt.donor == "g2"
    world.vote(0, "adopted", 1, at=3)
    assert world.machine.last == missed


@both_sizes
def test_closed_ends_the_run_well_for_every_rank(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    world.vote_all("reduced", 0, at=1, next_total=0)
    world.vote_all("closed", 1, at=1, next_total=0)
    answer = world.answer()
    assert (answer.verdict, answer.ok) == ("stop", True)
    assert world.said(m.Finished) == [m.Finished(epoch(1), 1)]
    for rank in range(ranks):
        assert not world.ended
        world.rank_ends(rank, 0, "ended", 1)
    assert [end.exit_code for end in world.ended] == [0] and not world.killed and not world.said(m.Died)


def test_closed_on_one_rank_and_failed_on_the_other_is_closed_again() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote_all("reduced", 0, at=1, next_total=0)
    world.vote(0, "closed", 1, at=1, next_total=0)
    world.vote(1, "failed", 1, at=1, error="broken")
    assert not world.said(m.Finished)
    world.prepare(2)
    assert world.said(m.Promise)[-1].total == 0
    world.activate(2, step=1, share=(), total=0)
    assert world.answer().verdict == "recover"
    world.vote_all("closed", 1, at=2, next_total=0)
    assert world.said(m.Finished) == [m.Finished(epoch(2), 1)]


def test_the_lighthouse_may_end_a_closing_that_failed_here() -> None:
    world = GroupWorld()
    world.start()
    world.vote_all("reduced", 0, at=1, next_total=0)
    world.vote(0, "failed", 1, at=1, error="broken")
    world.hears(m.Stop("finished: step 1 is final", ok=True))
    assert world.answers()[-1] == local.Answer(verdict="stop", step=1, reason="finished: step 1 is final", ok=True)
    world.rank_ends(0, 0, "ended", 1)
    assert [end.exit_code for end in world.ended] == [0]


def test_a_vote_on_another_step_is_a_bug_and_says_so() -> None:
    world = GroupWorld()
    world.start()
    world.vote(0, "reduced", 4, at=1)
    assert world.ended[0].exit_code != 0
    assert "rank 0 voted on step 4 of epoch 1, but step 0 of epoch 1 stands" in world.ended[0].reason and world.killed


def test_ranks_that_vote_for_different_things_are_a_bug_and_say_so() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "reduced", 0, at=1)
    world.vote(1, "closed", 0, at=1)
    assert "ranks voted ['closed', 'reduced'] on step 0" in world.ended[0].reason


def test_a_rank_that_has_voted_in_the_new_epoch_is_not_sent_back_to_its_beginning_by_one_that_comes_late() -> None:
    """It would reduce the same entry a second time, alone, while the other groups have committed it."""
    world = GroupWorld(ranks=2)
    world.start()
    world.vote(0, "failed", 0, at=1, error="broken")
    world.prepare(2)
    world.activate(2, share=(8, 9))
    assert world.answers(0)[-1].verdict == "recover"
    world.vote(0, "reduced", 0, at=2)
    world.vote(1, "failed", 0, at=1, error="broken")  # only now does rank 1 see that epoch 1 is over
    assert len(world.answers(0)) == 1 and world.answers(1)[-1].verdict == "recover"
    world.vote(1, "reduced", 0, at=2)
    assert world.answer().verdict == "go"
