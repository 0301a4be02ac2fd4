"""Promises, activations and planned epochs as one group's manager sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groupworld import TOTAL, GroupWorld, epoch, membership

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import DropKeys, Tell, ToRanks


def test_it_promises_at_once_without_its_ranks() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote_all("reduced", 0, at=1)
    world.forget()
    world.prepare(2)
    assert world.said(m.Promise) == [
        m.Promise(epoch(2), membership(1, "g0", "g1", "g2", base=0), (), Entry(epoch(1), 0), tuple(range(8, 16)), TOTAL)
    ]


def test_reduces_are_aborted_and_keys_void_before_the_promise_is_spoken() -> None:
    world = GroupWorld()
    world.start()
    actions = world.machine.received(m.Prepare(epoch(2)), world.now)
    assert [type(action) for action in actions] == [ToRanks, DropKeys, Tell]
    assert actions[0].message.below == 2 and actions[1].below == 2


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_lower_or_known_epoch_asks_in_vain(number: int) -> None:
    world = GroupWorld()
    world.start()
    world.prepare(3)
    world.activate(3)
    world.prepare(5)
    world.forget()
    world.prepare(number)
    assert not world.told and not world.to_ranks[0]


def test_a_lower_term_asks_and_activates_in_vain() -> None:
    world = GroupWorld()
    world.start()
    world.connect(term=Term(5, "lh"))
    world.forget()
    world.prepare(9, term=Term(4, "lh"))
    world.activate(9, term=Term(4, "lh"))
    world.hears(m.Prepare(epoch(9, Term(4, "lh")), epoch(1), membership(9, "g0", "g1", base=1, term=Term(4, "lh"))))
    assert not world.told and not world.to_ranks[0] and world.machine.known.epoch == epoch(1)
    world.prepare(9, term=Term(5, "lh"))
    assert world.said(m.Promise)


def test_a_welcome_of_a_lower_term_does_not_lower_what_was_acknowledged() -> None:
    world = GroupWorld()
    world.connect(term=Term(5, "lh"))
    world.connect(term=Term(4, "other"))
    assert world.machine.hello().acknowledged == Term(5, "lh")


def test_an_activation_below_what_was_promised_or_repeated_has_no_effect() -> None:
    world = GroupWorld()
    world.start()
    world.prepare(3)
    world.forget()
    world.activate(2)
    assert world.machine.known.epoch == epoch(1) and not world.to_ranks[0]
    world.activate(3, share=(1, 2))
    assert world.machine.known.epoch == epoch(3)
    world.forget()
    world.activate(3, share=(7,))
    assert world.machine.share == (1, 2) and not world.to_ranks[0] and not world.told


def test_an_activation_without_this_incarnation_has_no_effect() -> None:
    world = GroupWorld()
    world.start()
    world.prepare(2)
    world.activate(2, "g0", "g2")
    assert world.machine.known.epoch == epoch(1)


def test_every_rank_is_told_to_build_before_it_is_answered() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.vote_all("failed", 0, at=1, error="broken")
    world.prepare(2)
    world.forget()
    world.activate(2, "g1", "g2")
    for rank in range(2):
        build, answer = (x for x in world.to_ranks[rank] if not isinstance(x, local.Say))
        assert isinstance(build, local.Build) and isinstance(answer, local.Answer)
        assert build.plan == answer.plan and build.plan.slot == 0
    assert world.dropped == [2]


def test_the_first_answer_after_joining_is_the_first_epoch() -> None:
    world = GroupWorld(ranks=2)
    world.connect()
    world.ready()
    (join,) = world.said(m.Join)
    assert join.ranks == ("g1:10", "g1:11") and join.signature == {"w": "float32[2]", "rank 1: w": "float32[2]"}
    world.prepare(1)
    assert world.said(m.Promise) == [m.Promise(epoch(1), None, (), None, (), TOTAL)]
    world.activate(1, step=0, share=(3,))
    plan = world.answer().plan
    assert plan is not None and (plan.share, plan.step, plan.adopt) == ((3,), 0, None)


def test_it_joins_only_when_every_rank_is_ready() -> None:
    world = GroupWorld(ranks=2)
    world.connect()
    register = local.Register(token="t", rank=0, pid=1, transfer="x:1", progress="")
    world.machine.register(register, world.now)
    world.rank_says(0, local.Ready(signature={}, total=1))
    assert not world.said(m.Join)


def test_a_new_stream_begins_with_all_that_may_have_been_missed() -> None:
    world = GroupWorld()
    world.start()
    world.vote(0, "failed", 0, at=1, error="broken")
    world.machine.asked_to_leave("SIGTERM", world.now, by="launcher")
    world.disconnect()
    world.forget()
    world.connect()
    kinds = [type(message) for message in world.told]
    assert kinds == [m.Hello, m.Join, m.Failed, m.Leave, m.Acknowledged]
    hello = world.said(m.Hello)[0]
    assert hello.known == membership(1, "g0", "g1", "g2", base=0) and hello.acknowledged == Term(1, "lh")


# ---------------------------------------------------------------- planned


def planned_leave_of_g2(world: GroupWorld) -> None:
    """Epoch 2 without g2 is prepared, and all ranks have built it."""
    world.plan(2, "g0", "g1", base=1)
    for rank in range(world.size):
        world.rank_says(rank, local.Built(epoch=2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_planned_epoch_gets_its_flag_once_all_ranks_have_built_and_is_in_force_by_the_entry(ranks: int) -> None:
    world = GroupWorld(ranks)
    world.start()
    world.plan(2, "g0", "g1", base=1)
    for rank in range(ranks):
        (build,) = world.pushed(rank, local.Build)[-1:]
        assert build.plan.planned and build.plan.members == ("g0", "g1") and build.plan.epoch == 2
    for rank in range(ranks):
        world.vote_all("reduced", rank, at=1)
        assert world.answer().ready == 0, "not all ranks have built"
        world.rank_says(rank, local.Built(epoch=2))
    world.vote_all("reduced", ranks, at=1)
    assert world.answer().ready == 2 and world.answer().epoch == 1
    world.vote_all("reduced", ranks + 1, at=1)  # somebody else was not ready: the entry carries no flag
    assert world.answer().ready == 2 and world.answer().epoch == 1
    world.vote_all("reduced", ranks + 2, at=1, activates=2)
    answer = world.answer()
    assert (answer.epoch, answer.ready, answer.verdict) == (2, 0, "go")
    assert answer.share == tuple(range(12, 24)), "second of two"
    assert world.machine.last == Entry(epoch(1), ranks + 2), "the entry has the name of the epoch that reduced it"
    world.vote_all("reduced", ranks + 3, at=2)
    assert world.machine.last == Entry(epoch(2), ranks + 3)


def test_those_who_stay_say_once_who_left_why_and_who_came() -> None:
    world = GroupWorld(ranks=2)
    world.start()
    world.plan(2, "g0", "g1", base=1, why="drained by root")
    for rank in range(2):
        world.rank_says(rank, local.Built(epoch=2))
    world.vote_all("reduced", 0, at=1)
    assert not world.pushed(0, local.Say), "it is not in force yet"
    world.vote_all("reduced", 1, at=1, activates=2)
    world.vote_all("reduced", 2, at=2)
    lines = [say.line for say in world.pushed(0, local.Say)]
    assert lines == ["g2 left before step 2 (drained by root); going on with g0, g1 (epoch 2)"]
    world.forget()
    world.plan(3, "g0", "g1", "g2", base=2)
    world.vote_all("reduced", 3, at=2, activates=3)
    lines = [say.line for say in world.pushed(0, local.Say)]
    assert lines == ["g2 is a member from step 4 on; going on with g0, g1, g2 (epoch 3)"]
    assert not world.pushed(1, local.Say), "one rank's log is enough"
    assert not world.machine.why_planned


def test_new_shares_are_no_line_and_a_spare_that_works_is_one() -> None:
    world = GroupWorld()
    world.start()
    world.plan(2, "g0", "g1", "g2", base=1, speeds=(1000, 700, 1000))
    world.vote_all("reduced", 0, at=1, activates=2)
    assert not world.pushed(0, local.Say)
    world.plan(3, "g0", "g1", "g2", base=2, speeds=(1000, 700, 0))
    world.vote_all("reduced", 1, at=2, activates=3)
    assert world.pushed(0, local.Say)[-1].line.startswith("g2 is a spare from step 2 on; going on with")
    world.plan(4, "g1", "g2", base=3, speeds=(700, 1000), why="SIGTERM")
    world.vote_all("reduced", 2, at=3, activates=4)
    assert world.pushed(0, local.Say)[-1].line == (
        "g0 left before step 3 (SIGTERM); g2 is no spare any more from step 3 on; going on with g1, g2 (epoch 4)"
    )


def test_who_leaves_is_not_told_that_it_left() -> None:
    world = GroupWorld()
    world.start()
    world.plan(2, "g0", "g2", base=1, why="SIGTERM")
    world.vote_all("reduced", 0, at=1, activates=2)
    assert not world.pushed(0, local.Say)


def test_the_leaver_has_nothing_to_build_and_is_answered_leave() -> None:
    world = GroupWorld()
    world.start()
    world.machine.asked_to_leave("SIGTERM", world.now, by="launcher")
    world.plan(2, "g0", "g2", base=1)
    assert not world.pushed(0, local.Build)
    world.vote_all("reduced", 0, at=1)
    assert world.answer().ready == 2
    world.vote_all("reduced", 1, at=1, activates=2)
    assert (world.answer().verdict, world.answer().share, world.answer().reason) == ("leave", (), "SIGTERM")
    world.rank_ends(0, 0)
    assert [end.exit_code for end in world.ended] == [0] and not world.said(m.Died)


def test_a_planned_epoch_on_another_base_or_below_a_promise_is_ignored() -> None:
    world = GroupWorld()
    world.start()
    world.forget()
    world.plan(5, "g0", "g1", base=4)
    assert not world.to_ranks[0]
    world.prepare(3)
    world.forget()
    world.plan(2, "g0", "g1", base=1)
    assert not world.to_ranks[0]


def test_a_change_of_a_planned_epoch_waits_for_the_entry_that_activates_its_base() -> None:
    """Another member committed that entry first, and its beat made the lighthouse prepare the next change."""
    world = GroupWorld()
    world.start()
    planned_leave_of_g2(world)
    world.plan(3, "g0", "g1", "g2", base=2)
    assert [build.plan.epoch for build in world.pushed(0, local.Build) if build.plan.planned] == [2]
    world.vote_all("reduced", 0, at=1, activates=2)
    assert [build.plan.epoch for build in world.pushed(0, local.Build) if build.plan.planned] == [2, 3]
    world.rank_says(0, local.Built(epoch=3))
    world.vote_all("reduced", 1, at=2)
    assert world.answer().ready == 3


def test_a_build_that_failed_while_the_stream_was_broken_is_told_on_the_next() -> None:
    world = GroupWorld()
    world.start()
    world.plan(2, "g0", "g1", base=1)
    world.disconnect()
    world.rank_says(0, local.BuildFailed(epoch=2, error="no connection to g0"))
    world.forget()
    world.connect()
    assert world.said(m.Unbuilt) == [m.Unbuilt(epoch(2), "rank 0: no connection to g0")]
    world.plan(3, "g0", "g1", base=1)
    world.forget()
    world.connect()
    assert not world.said(m.Unbuilt), "the change was prepared anew"


def test_the_same_planned_prepare_again_builds_nothing_anew() -> None:
    world = GroupWorld()
    world.start()
    planned_leave_of_g2(world)
    world.plan(2, "g0", "g1", base=1)
    assert len(world.pushed(0, local.Build)) == 1
    world.vote_all("reduced", 0, at=1)
    assert world.answer().ready == 2


def test_a_newer_planned_prepare_replaces_one_whose_flag_was_not_given() -> None:
    world = GroupWorld()
    world.start()
    planned_leave_of_g2(world)
    world.plan(3, "g1", base=1)
    world.vote_all("reduced", 0, at=1)
    assert world.answer().ready == 0
    world.rank_says(0, local.Built(epoch=2))  # late, of the one that was replaced
    world.vote_all("reduced", 1, at=1)
    assert world.answer().ready == 0
    world.rank_says(0, local.Built(epoch=3))
    world.vote_all("reduced", 2, at=1)
    assert world.answer().ready == 3


def test_a_planned_epoch_whose_flags_are_under_way_comes_into_force_although_a_newer_was_prepared() -> None:
    """All members carry flag 2 in step 1; then a newer `Prepare` arrives; then the entry."""
    world = GroupWorld()
    world.start()
    planned_leave_of_g2(world)
    world.vote_all("reduced", 0, at=1)
    assert world.answer().ready == 2
    world.plan(3, "g1", base=1)
    world.vote_all("reduced", 1, at=1, activates=2)
    assert world.answer().epoch == 2 and world.machine.known.groups == ("g0", "g1")


def test_a_promise_names_what_is_prepared_and_a_recovery_drops_it() -> None:
    world = GroupWorld()
    world.start()
    planned_leave_of_g2(world)
    world.prepare(3)
    (promise,) = world.said(m.Promise)
    assert [p.epoch for p in promise.prepared] == [epoch(2)]
    world.activate(3)
    world.vote_all("reduced", 0, at=3)
    assert world.answer().ready == 0 and world.machine.hello().prepared == ()


def test_a_promise_after_the_switch_names_the_planned_epoch_as_known() -> None:
    world = GroupWorld()
    world.start()
    planned_leave_of_g2(world)
    world.vote_all("reduced", 0, at=1)
    world.vote_all("reduced", 1, at=1, activates=2)
    world.prepare(3)
    promise = world.said(m.Promise)[-1]
    assert (
        promise.known.epoch == epoch(2) and promise.last == Entry(epoch(1), 1) and promise.held == tuple(range(12, 24))
    )


def test_the_leaver_knows_the_newest_epoch_although_it_is_not_in_it() -> None:
    world = GroupWorld()
    world.start()
    world.plan(2, "g0", "g2", base=1)
    world.vote_all("reduced", 0, at=1)
    world.vote_all("reduced", 1, at=1, activates=2)
    world.prepare(3)
    assert world.said(m.Promise)[-1].known.groups == ("g0", "g2")


def test_it_says_that_a_job_begins_anew_and_how_the_one_before_ended() -> None:
    world = GroupWorld()
    world.start()
    members = membership(4, "g0", "g1", "g2", base=3)
    anew = replace(members, base=None)
    shares = tuple(m.Share(g, ()) for g in anew.groups)
    cause = f"{m.FIRST_EPOCH}: the job before it ended (no group is left)"
    world.forget()
    world.hears(m.Activate(anew, 0, TOTAL, shares, (), None, cause))
    (said,) = world.pushed(0, local.Say)
    assert said.line == f"the job begins at step 0, from the state that this group was started with ({cause})"
