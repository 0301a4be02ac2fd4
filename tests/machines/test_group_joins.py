"""One group's manager while its group is no member yet: it heals, follows, and becomes one."""

from __future__ import annotations

import pytest

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import exits, local
from lightkeeper.manager.machine import RankView
from tests.machines.groupworld import GroupWorld, epoch
from tests.machines.joining import RANKS, donors, healed, joiner, joiner_votes


def test_who_holds_half_a_state_does_not_go_on_from_it() -> None:
    """The members died while their state was on its way here, and the job would begin anew with this group."""
    world = joiner()
    joiner_votes(world, "lost", 0, torn=True, error="connection reset")
    world.prepare(2)
    assert not world.said(m.Promise)
    assert world.ended[0].exit_code == exits.GAVE_UP and "broke off half-way" in world.ended[0].reason


def test_a_promise_waits_for_the_end_of_a_copy() -> None:
    for torn in (True, False):
        world = joiner()
        world.prepare(2)
        assert not world.said(m.Promise) and not world.ended
        joiner_votes(world, "lost", 0, torn=torn, error="connection reset")
        assert bool(world.ended) == torn and bool(world.said(m.Promise)) != torn


def test_who_copies_while_it_is_a_member_already_says_that_it_is_lost() -> None:
    """It lost the entries before the one that takes it in, which came: its donors stand until it has answered."""
    world = healed()
    world.plan(2, "g0", "g2", "g1", base=1)
    joiner_votes(world, "lost", 5, error="no donor has the entry that follows")
    world.hears(m.Heal(9, donors("g0", "g2", ranks=1)))
    world.forget()
    world.hears(m.Prepare(epoch(3), epoch(2)))
    assert [lost.reason for lost in world.said(m.Lost)] == ["e2/1@lh took it in, and its copy is from before that"]
    joiner_votes(world, "healed", 9, activates=2)
    assert not world.said(m.Promise) and world.machine.known is None, "nor does a flag make it a member now"


def test_an_old_recovery_does_not_undo_what_was_prepared_since() -> None:
    """Its word comes late, or again: the change that takes the group in is from after it."""
    world = healed()
    planned = world.plan(3, "g0", "g2", "g1", base=1)
    world.hears(m.Prepare(epoch(2), epoch(1)))
    assert not world.said(m.Promise) and world.machine.prepared == [planned]
    world.hears(m.Prepare(epoch(4), epoch(1)))
    assert world.said(m.Promise) and not world.machine.prepared


def test_a_whole_copy_mends_half_of_one() -> None:
    world = joiner()
    joiner_votes(world, "lost", 0, torn=True, error="connection reset")
    world.hears(m.Heal(9, donors("g0", "g2")))
    joiner_votes(world, "healed", 9)
    world.prepare(2)
    assert world.said(m.Promise) and not world.ended


@RANKS
def test_each_rank_is_told_to_heal_from_the_same_rank_of_every_donor(ranks: int) -> None:
    world = joiner(ranks)
    for rank in range(ranks):
        (answer,) = world.answers(rank)
        assert answer.verdict == "heal" and answer.source.step == 5
        assert answer.source.donors == (("g0", f"g0:{10 + rank}"), ("g2", f"g2:{10 + rank}"))
    assert len(world.said(m.Join)) == 1 and not world.ended


def test_a_group_one_of_whose_ranks_has_lost_the_entries_does_not_say_that_it_follows() -> None:
    """Rank 1 still waits for the next entry; a lighthouse that reads `follow` would wait for the group's promise."""
    world = healed(ranks=2)
    views = {rank: RankView("follow", 5, 0.0, 0.0) for rank in (0, 1)}
    world.pass_s(1, views)
    assert world.said(m.Beat)[-1].phase == "follow"
    joiner_votes(world, "lost", 5, rank=0, error="no donor has the entry that follows")
    world.pass_s(1, views)
    assert world.said(m.Beat)[-1].phase == "heal"


def test_it_waits_for_the_word_where_to_heal_from() -> None:
    world = GroupWorld()
    world.connect()
    world.ready()
    world.pass_s(5)
    assert not world.answers() and not world.ended


@RANKS
def test_it_follows_once_all_of_its_ranks_have_healed(ranks: int) -> None:
    world = joiner(ranks)
    world.forget()
    for rank in range(ranks):
        assert not world.answers(0)
        joiner_votes(world, "healed", 5, rank)
    answer = world.answer()
    assert (answer.verdict, answer.epoch, answer.share) == ("go", 0, ())
    assert world.machine.step == 5 and world.machine.last == Entry(epoch(1), 4)
    world.prepare(2)
    (promise,) = world.said(m.Promise)
    assert (promise.known, promise.last, promise.held) == (None, Entry(epoch(1), 4), ())


@RANKS
def test_every_entry_is_applied_by_all_ranks_before_the_next(ranks: int) -> None:
    world = healed(ranks)
    for step in (6, 7):
        for rank in range(ranks):
            before = len(world.answers(0))
            joiner_votes(world, "followed", step, rank)
            assert len(world.answers(0)) == before + (rank == ranks - 1)
        assert world.answer().verdict == "go" and not world.answer().epoch
        assert world.machine.step == step and world.machine.last == Entry(epoch(1), step - 1)


@RANKS
def test_an_idle_vote_is_answered_and_changes_nothing(ranks: int) -> None:
    world = healed(ranks)
    joiner_votes(world, "idle", 5)
    assert world.answer().verdict == "go" and not world.answer().epoch
    assert world.machine.step == 5 and world.machine.last == Entry(epoch(1), 4)


def test_ranks_that_follow_different_entries_all_take_another_copy() -> None:
    world = healed(ranks=2)
    joiner_votes(world, "followed", 6, rank=0)
    joiner_votes(world, "followed", 6, rank=1, entry=(2, 1, "lh"))
    assert [lost.reason for lost in world.said(m.Lost)] == ["its ranks have come to step 6 by different entries"]
    assert not world.answers(0) and not world.machine.following
    world.hears(m.Heal(9, donors("g0", "g2", ranks=2)))
    assert world.answer().verdict == "heal"


def test_a_rank_that_found_no_entry_where_another_did_looks_again() -> None:
    """Rank 1 asked its donor a moment before the entry came."""
    world = healed(ranks=2)
    joiner_votes(world, "followed", 6, rank=0)
    joiner_votes(world, "idle", 5, rank=1)
    assert world.answers(1)[-1].verdict == "go" and not world.answers(0) and world.machine.step == 5
    joiner_votes(world, "followed", 6, rank=1)
    assert world.answer().verdict == "go" and world.machine.step == 6


def test_a_rank_with_an_earlier_copy_follows_by_itself_until_all_have_one_state() -> None:
    """Until then nobody goes on from what is there: asked to promise, the group ends."""
    world = joiner(ranks=2)
    joiner_votes(world, "healed", 5, rank=0)
    joiner_votes(world, "healed", 6, rank=1)
    assert world.answers(0)[-1].verdict == "go" and len(world.answers(1)) == 1 and world.machine.torn
    joiner_votes(world, "followed", 6, rank=0)
    assert world.answer().verdict == "go" and world.machine.step == 6 and not world.machine.torn


@RANKS
def test_who_is_lost_says_so_once_and_all_ranks_take_the_next_copy(ranks: int) -> None:
    world = healed(ranks)
    joiner_votes(world, "lost", 6, rank=0, error="no donor")
    assert [lost.reason for lost in world.said(m.Lost)] == ["no donor"] and not world.answers(0)
    for rank in range(1, ranks):
        joiner_votes(world, "idle", 6, rank)
        assert not world.answers(rank), "it waits for the same copy"
    world.hears(m.Heal(9, donors("g0", ranks=ranks)))
    assert [world.answers(r)[-1].source.step for r in range(ranks)] == [9] * ranks
    joiner_votes(world, "healed", 9)
    assert world.answer().verdict == "go" and world.machine.step == 9


def test_a_rank_that_followed_what_another_lost_is_told_to_heal_too() -> None:
    world = healed(ranks=2)
    joiner_votes(world, "lost", 5, rank=0)
    world.hears(m.Heal(9, donors("g0")))
    joiner_votes(world, "followed", 6, rank=1)
    assert world.answers(1)[-1].verdict == "heal" and world.machine.step == 5, "only rank 1 had that entry"


@RANKS
def test_a_planned_epoch_is_built_while_following_and_the_entry_with_its_flag_makes_it_a_member(ranks: int) -> None:
    world = healed(ranks)
    planned = world.plan(2, "g0", "g2", "g1", base=1)
    for rank in range(ranks):
        (build,) = world.pushed(rank, local.Build)
        assert build.plan.planned and build.plan.members == planned.groups and build.plan.slot == 2
        world.rank_says(rank, local.Built(epoch=2))
    joiner_votes(world, "followed", 6)
    assert not world.answer().epoch, "that entry did not carry the flag"
    joiner_votes(world, "followed", 7, activates=2)
    answer = world.answer()
    assert (answer.verdict, answer.epoch, answer.share) == ("go", 2, ()), "no share in its first step"
    assert world.machine.last == Entry(epoch(1), 6), "the entry has the name of the epoch that reduced it"
    world.vote_all("reduced", 7, at=2)
    assert world.machine.last == Entry(epoch(2), 7)
    assert world.answer().share == tuple(range(16, 24)), "its share as the third of three"


def test_a_flag_that_it_was_not_prepared_for_does_not_make_it_a_member() -> None:
    """Members leave, or another group joins, while this one follows."""
    world = healed()
    joiner_votes(world, "followed", 6, activates=2)
    assert not world.answer().epoch and world.machine.known is None


def test_a_planned_epoch_before_it_is_healed_is_not_built() -> None:
    world = joiner()
    world.plan(2, "g0", "g2", "g1", base=1)
    assert not world.pushed(0, local.Build)


def test_a_newer_change_replaces_the_one_it_was_prepared_for() -> None:
    world = healed()
    world.plan(2, "g0", "g2", "g1", base=1)
    world.plan(3, "g0", "g1", base=1)
    assert [build.plan.epoch for build in world.pushed(0, local.Build)] == [2, 3]
    joiner_votes(world, "followed", 6, activates=3)
    assert world.answer().epoch == 3 and world.machine.known.groups == ("g0", "g1")


@RANKS
def test_a_change_of_the_epoch_that_takes_it_in_waits_for_the_entry_that_does(ranks: int) -> None:
    """A beat of another group showed epoch 2 in force, and the next joiner's epoch 3 was prepared on it, before the
    entry that activates epoch 2 is applied here."""
    world = healed(ranks)
    world.plan(2, "g0", "g1", base=1)
    world.plan(3, "g0", "g1", "g2", base=2)
    assert [build.plan.epoch for build in world.pushed(0, local.Build)] == [2]
    joiner_votes(world, "followed", 6, activates=2)
    assert world.answer().epoch == 2
    assert [build.plan.epoch for build in world.pushed(0, local.Build)] == [2, 3]
    for rank in range(ranks):
        world.rank_says(rank, local.Built(epoch=3))
    world.vote_all("reduced", 6, at=2)
    assert world.answer().ready == 3


@RANKS
def test_a_flag_for_an_epoch_below_its_promise_does_not_make_it_a_member(ranks: int) -> None:
    """A recovery asked it and left it out, because it lags: it follows on, and the entries' old flags are void."""
    world = healed(ranks)
    world.plan(2, "g0", "g2", "g1", base=1)
    world.prepare(3)
    joiner_votes(world, "followed", 6, activates=2)
    assert world.answer().verdict == "go" and not world.answer().epoch and world.machine.following
    world.plan(4, "g0", "g2", "g1", base=3)
    joiner_votes(world, "followed", 7, activates=4)
    assert world.answer().epoch == 4


@RANKS
@pytest.mark.parametrize("outcome", ["idle", "followed"])
def test_named_in_a_recovery_while_following(ranks: int, outcome: str) -> None:
    """Below the minimum: all of its ranks go on in the epoch, with a share of the step that stands."""
    world = healed(ranks)
    world.prepare(2)
    world.activate(2, "g0", "g1", step=5, share=(3, 4), entry=Entry(epoch(1), 4))
    for rank in range(ranks):
        joiner_votes(world, outcome, 5 if outcome == "idle" else 6, rank)
    answer = world.answer()
    assert answer.verdict == "recover" and answer.plan.members == ("g0", "g1")
    assert answer.plan.step == 5 and answer.plan.share == (3, 4) and answer.plan.adopt is None
    world.vote_all("reduced", 5, at=2)
    assert world.answer().verdict == "go" and world.machine.last == Entry(epoch(2), 5)


@RANKS
def test_named_in_a_recovery_with_the_entry_that_it_followed_meanwhile(ranks: int) -> None:
    """It promised at step 5, then applied entry 5, and is named with a donor for it: there is nothing to fetch."""
    world = healed(ranks)
    world.prepare(2)
    joiner_votes(world, "followed", 6)
    world.activate(2, "g0", "g1", step=6, share=(3, 4), donor="g0", entry=Entry(epoch(1), 5))
    joiner_votes(world, "idle", 6)
    answer = world.answer()
    assert answer.verdict == "recover" and answer.plan.adopt is None and answer.plan.share == (3, 4)
    assert not world.machine.following


def test_a_joiner_whose_entry_is_done_anew_says_that_it_is_lost() -> None:
    """It followed an entry that only a dead member had."""
    world = healed()
    world.prepare(2)
    joiner_votes(world, "followed", 6)
    world.activate(2, "g0", "g1", step=5, share=(3, 4), entry=Entry(epoch(1), 4))
    assert "goes on from" in world.said(m.Lost)[-1].reason and world.machine.known is None


@RANKS
def test_named_in_a_recovery_one_entry_behind_it_adopts(ranks: int) -> None:
    world = healed(ranks)
    world.prepare(2)
    entry = Entry(epoch(1), 5)
    world.activate(2, "g0", "g1", step=6, share=(3, 4), donor="g0", entry=entry)
    joiner_votes(world, "idle", 5)
    adopt = world.answer().plan.adopt
    assert (adopt.epoch, adopt.step, adopt.donor) == (1, 5, "g0")
    world.vote_all("adopted", 5, at=2)
    assert world.answer().verdict == "go" and world.machine.last == entry and world.answer().share == (3, 4)


def test_the_end_of_the_run_reaches_a_joiner() -> None:
    world = healed()
    world.hears(m.Stop("finished: step 9 is final", ok=True))
    joiner_votes(world, "idle", 5)
    assert world.answer().verdict == "stop" and world.answer().ok
    world.rank_ends(0, 0)
    assert [end.exit_code for end in world.ended] == [0] and not world.said(m.Died)


def test_a_broken_stream_does_not_disturb_it_and_it_joins_again() -> None:
    world = healed()
    world.disconnect()
    joiner_votes(world, "followed", 6)
    assert world.answer().verdict == "go"
    world.connect()
    assert len(world.said(m.Join)) == 1, "a lighthouse that has forgotten it learns of it again"
    world.hears(m.Heal(20, donors("g0")))
    joiner_votes(world, "idle", 6)
    assert world.answer().verdict in ("heal", "go")


def test_that_it_is_lost_is_said_again_on_another_stream_until_a_boundary_is_named() -> None:
    """The word may go down with the stream; the lighthouse would wait for a joiner that waits for it."""
    world = healed()
    joiner_votes(world, "lost", 6, error="no donor")
    world.disconnect()
    world.forget()
    world.connect()
    assert [lost.reason for lost in world.said(m.Lost)] == ["no donor"]
    world.hears(m.Heal(9, donors("g0", "g2", ranks=1)))
    world.disconnect()
    world.forget()
    world.connect()
    assert not world.said(m.Lost)


def test_a_group_that_became_a_member_all_the_same_does_not_say_that_it_was_lost() -> None:
    """A recovery named it while it waited for another boundary: said late, the word would end a job that it holds."""
    world = healed()
    world.prepare(2)
    joiner_votes(world, "lost", 5, error="no donor")
    world.activate(2, "g0", "g1", step=5, share=(3, 4), entry=Entry(epoch(1), 4))
    assert world.answer().verdict == "recover"
    world.disconnect()
    world.forget()
    world.connect()
    assert not world.said(m.Lost)
