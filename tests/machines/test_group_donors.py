"""A member's manager while another group joins, the shares of both, and what the lighthouse owes the joiner."""

from __future__ import annotations

import pytest

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry
from lightkeeper.lighthouse.takeover import COULD_NOT_FOLLOW
from lightkeeper.manager import local
from tests.machines.groupworld import TOTAL, GroupWorld, epoch
from tests.machines.joining import RANKS, healed, joiner_votes
from tests.machines.world import FIRST, World


def member(ranks: int = 1) -> GroupWorld:
    """g1 is a member of epoch 1, at step 2 of it, and its ranks compute."""
    world = GroupWorld(ranks)
    world.start()
    for step in (0, 1):
        world.vote_all("reduced", step, at=1)
    world.forget()
    return world


# ---------------------------------------------------------------- the member that is a donor


@RANKS
def test_a_copy_at_a_boundary_ahead_is_in_the_answer_of_the_step_before_it(ranks: int) -> None:
    world = member(ranks)
    world.hears(m.Copy(epoch(1), 4))
    for rank in range(ranks):
        assert world.pushed(rank, local.Touch), "the memory is touched beforehand"
    world.vote_all("reduced", 2, at=1)
    assert not world.answer().copy
    world.vote_all("reduced", 3, at=1)
    assert [world.answers(r)[-1].copy for r in range(ranks)] == [True] * ranks
    world.vote_all("reduced", 4, at=1)
    assert not world.answer().copy, "once"


@RANKS
def test_the_answer_with_a_copy_is_the_same_for_a_rank_that_votes_again(ranks: int) -> None:
    world = member(ranks)
    world.hears(m.Copy(epoch(1), 3))
    world.vote_all("reduced", 2, at=1)
    world.vote(0, "reduced", 2, at=1)
    assert world.answers(0)[-1] == world.answers(0)[-2] and world.answers(0)[-1].copy


@pytest.mark.parametrize("step", [1, 2])
def test_a_boundary_that_has_passed_is_no_copy(step: int) -> None:
    world = member()
    world.hears(m.Copy(epoch(1), step))
    world.vote_all("reduced", 2, at=1)
    world.vote_all("reduced", 3, at=1)
    assert not any(answer.copy or answer.verdict == "copy" for answer in world.answers())
    assert not world.pushed(0, local.Touch)


@RANKS
def test_who_stands_copies_at_once_and_still_gets_its_answer(ranks: int) -> None:
    world = member(ranks)
    world.prepare(2)
    for rank in range(ranks):
        world.vote(rank, "failed", 2, at=1, error="a peer died")
    world.hears(m.Copy(epoch(1), 2))
    assert [[a.verdict for a in world.answers(r)] for r in range(ranks)] == [["copy"]] * ranks
    world.activate(2, "g0", "g1", step=2, share=(3, 4))
    assert world.answer().verdict == "recover" and world.answer().plan.share == (3, 4)


@RANKS
def test_who_is_told_to_copy_where_it_stands_before_its_ranks_do_copies_when_they_do(ranks: int) -> None:
    world = member(ranks)
    world.prepare(2)
    world.hears(m.Copy(epoch(1), 2))
    for rank in range(ranks):
        world.vote(rank, "failed", 2, at=1, error="a peer died")
    assert [[a.verdict for a in world.answers(r)] for r in range(ranks)] == [["copy"]] * ranks


def test_a_boundary_ahead_is_kept_over_a_recovery() -> None:
    world = member()
    world.hears(m.Copy(epoch(1), 4))
    world.prepare(2)
    world.activate(2, "g0", "g1", step=2, share=(3, 4))
    for step in (2, 3):
        world.vote_all("reduced", step, at=2)
    assert world.answer().copy


def test_a_boundary_that_an_adopted_entry_leads_to_is_copied() -> None:
    """The entry before it was missed: adopting it brings the group to the boundary like anybody else."""
    world = member()
    world.hears(m.Copy(epoch(1), 3))
    world.prepare(2)
    world.activate(2, "g0", "g1", "g2", step=3, share=(3,), donor="g0", entry=Entry(epoch(1), 2))
    world.vote(0, "failed", 2, at=1, error="missed")
    world.vote_all("adopted", 2, at=2)
    assert world.answer().verdict == "go" and world.answer().copy


def test_release_is_passed_on_and_takes_back_a_copy_that_was_not_made() -> None:
    world = member()
    world.hears(m.Copy(epoch(1), 4))
    world.hears(m.Copy(epoch(1), m.RELEASE))
    assert world.pushed(0, local.Release)
    for step in (2, 3):
        world.vote_all("reduced", step, at=1)
    assert not world.answer().copy


def test_a_joiner_copies_the_state_before_the_first_step() -> None:
    world = member()
    world.hears(m.Copy(epoch(1), m.RELEASE))
    assert world.to_ranks[0][-1] == local.Release()


# ---------------------------------------------------------------- shares


def test_the_first_step_is_dealt_without_the_joiner_and_the_second_with_it() -> None:
    world = GroupWorld()
    world.connect()
    world.ready()
    world.prepare(1)
    world.activate(1, "g0", "g1", share=tuple(range(12, 24)))
    world.forget()
    world.plan(2, "g0", "g1", "g2", base=1)
    world.rank_says(0, local.Built(epoch=2))
    world.vote_all("reduced", 0, at=1)
    world.vote_all("reduced", 1, at=1, activates=2)
    assert world.answer().epoch == 2 and world.answer().share == tuple(range(12, 24)), "as the second of two"
    world.vote_all("reduced", 2, at=2)
    assert world.answer().share == tuple(range(8, 16)), "as the second of three"


def test_joiner_and_members_deal_every_microbatch_exactly_once() -> None:
    """The joiner knows the old members too little to deal for them: whatever it says of itself must complete theirs."""
    members = GroupWorld()
    members.connect()
    members.ready()
    members.prepare(1)
    members.activate(1, "g0", "g1", share=tuple(range(12, 24)))
    members.plan(2, "g0", "g1", "g2", base=1)
    members.rank_says(0, local.Built(epoch=2))
    members.vote_all("reduced", 0, at=1)
    members.vote_all("reduced", 1, at=1, activates=2)
    other = healed()
    other.plan(2, "g0", "g2", "g1", base=1)
    joiner_votes(other, "followed", 6, activates=2)
    assert set(other.answer().share) == set() and len(members.answer().share) == TOTAL // 2


def test_a_recovery_in_its_first_step_keeps_the_joiners_empty_hands() -> None:
    world = healed()
    world.plan(2, "g0", "g2", "g1", base=1)
    joiner_votes(world, "followed", 6, activates=2)
    world.prepare(3)
    promise = world.said(m.Promise)[-1]
    assert promise.held == () and promise.last == Entry(epoch(1), 5) and promise.known.epoch == epoch(2)
    world.activate(3, "g0", "g1", step=6, share=(20, 21))
    world.vote(0, "failed", 6, at=2, error="a peer died")
    assert world.answer().verdict == "recover" and world.answer().plan.share == (20, 21)


# ---------------------------------------------------------------- what the lighthouse owes a joiner to its last entry


def prepared_in() -> World:
    """g2 came back, healed, follows, and is prepared as a member of the next epoch."""
    world = World()
    world.start()
    world.die("g2", step=5)
    for group in ("g0", "g1"):
        world.promise(group, 4)
    world.pass_s(0.25, {"g0": 5, "g1": 5})
    world.arrive("g2/i2")
    world.beat("g2/i2", 12, "follow", epoch=0)
    assert world.planned("g2/i2").groups == ("g0", "g1", "g2")
    world.forget_sent()
    return world


def test_entries_are_kept_until_the_joiner_itself_is_a_member() -> None:
    """The members switch at the entry that makes it one; it still has to fetch that entry from them."""
    world = prepared_in()
    number = world.machine.prepared[-1].epoch.number
    for group in ("g0", "g1"):
        world.beat(group, 14, epoch=number)
    assert not [copy for copy in world.told("g0", m.Copy) if copy.step == m.RELEASE]
    world.beat("g2/i2", 14, epoch=number)
    assert world.told("g0", m.Copy)[-1].step == m.RELEASE


def test_a_joiner_that_is_lost_after_the_switch_is_not_waited_for() -> None:
    """It cannot become what the others take it for: they go on without it, and it heals anew."""
    world = prepared_in()
    number = world.machine.prepared[-1].epoch.number
    for group in ("g0", "g1"):
        world.beat(group, 14, epoch=number)
    world.say("g2/i2", m.Lost("no donor has the entry"))
    world.pass_s(1, {"g0": 14, "g1": 14, "g2/i2": 13})
    assert world.is_asked("g0") or world.told("g2/i2", m.Heal) or world.told("g2/i2", m.Fence)


def test_a_joiner_that_was_lost_under_another_lighthouse_is_not_waited_for() -> None:
    """This one learns of the epoch that takes it in when the first member comes, and of its loss before that."""
    world = prepared_in()
    base, planned = world.newest, world.machine.prepared[-1]
    world.restart(log=False)
    world.arrive("g2/i2", acknowledged=FIRST, prepared=(planned,))
    world.say("g2/i2", m.Lost("no donor has the entry that follows"))
    for group in ("g0", "g1"):
        world.arrive(group, known=planned, acknowledged=FIRST)
    (lost,) = [note for note in world.noted("group_lost") if note["incarnation"] == "i2"]
    assert (lost["group"], lost["cause"]) == ("g2", COULD_NOT_FOLLOW) and base != planned
    assert world.is_asked("g0") and world.is_asked("g1") and not world.is_asked("g2/i2")


def test_a_joiner_that_comes_without_the_state_with_which_it_was_prepared_is_not_waited_for() -> None:
    """It was told to copy anew by the lighthouse before, and says no more that it was lost."""
    world = prepared_in()
    planned = world.machine.prepared[-1]
    world.restart(log=False)
    world.arrive("g2/i2", acknowledged=FIRST, prepared=(planned,))
    for group in ("g0", "g1"):
        world.arrive(group, known=planned, acknowledged=FIRST)
    assert world.is_asked("g0") and world.is_asked("g1") and not world.is_asked("g2/i2")


def test_it_restarts_with_a_joiner_in_the_planned_change_of_its_log() -> None:
    world = prepared_in()
    newest = world.newest
    world.restart()
    for group in ("g0", "g1"):
        world.arrive(group, known=newest, acknowledged=newest.epoch.term)
    world.pass_s(1, {"g0": 12, "g1": 12})
    world.arrive("g2/i2")
    assert not world.told("g2/i2", m.Refused) and world.newest == newest


def test_who_missed_the_entry_that_takes_the_joiner_in_is_heard_although_the_switch_was_seen_before() -> None:
    """g0 has committed the entry and shows it; g1's reduce of it failed, and it can only name the epoch before."""
    world = prepared_in()
    base, number = world.newest.epoch, world.machine.prepared[-1].epoch.number
    world.beat("g0", 14, epoch=number)
    world.say("g1", m.Failed(base, 13, "the cable was pulled"))
    assert world.is_asked("g1") and world.is_asked("g0") and world.is_asked("g2/i2")


def test_a_joiner_that_lags_by_more_than_an_entry_in_a_recovery_is_no_member_but_heals_on() -> None:
    world = prepared_in()
    planned = world.machine.prepared[-1]
    world.fail("g0", 13)
    world.promise("g0", 12)
    world.promise("g1", 13, known=planned)
    for group, step in (("g0", 12), ("g1", 13), ("g2/i2", 11)):
        world.promise(group, step)
    assert world.newest.groups == ("g0", "g1")
    assert not world.told("g2/i2", m.Fence)
