"""What the ranks of a node say, folded: equal votes once, nothing that others wait for held back, all in order."""

from __future__ import annotations

import random

import pytest

from lightkeeper.manager import local
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.folding import HELD_S_MAX, Folder, Said, by_node, fold, fold_views

NODE = range(8, 12)


def vote(step: int, outcome: str = "reduced", **more: object) -> local.Vote:
    return local.Vote(epoch=1, step=step, outcome=outcome, **more)  # type: ignore[arg-type]


def test_equal_votes_of_a_node_are_said_once_when_the_last_is_in() -> None:
    folder = Folder(NODE)
    for rank in (10, 8, 11):
        assert folder.takes(rank, vote(5), 0.0) == []
    assert folder.takes(9, vote(5), 0.1) == [Said((10, 8, 11, 9), vote(5))]
    folder.answered(NODE)
    assert folder.takes(8, vote(6), 0.2) == []


def test_votes_that_differ_are_said_together_each_once() -> None:
    folder = Folder(NODE)
    for rank in (8, 9, 10):
        folder.takes(rank, vote(5, "again" if rank == 9 else "reduced"), 0.0)
    said = folder.takes(11, vote(5, "again"), 0.0)
    assert said == [Said((8, 10), vote(5)), Said((9, 11), vote(5, "again"))]


@pytest.mark.parametrize("outcome", ["failed", "lost"])
def test_a_failure_goes_on_at_once_and_takes_along_what_was_held(outcome: str) -> None:
    folder = Folder(NODE)
    assert folder.takes(8, vote(5), 0.0) == []
    failed = vote(5, outcome, error="connection closed")
    assert folder.takes(9, failed, 0.0) == [Said((8,), vote(5)), Said((9,), failed)]


def test_the_first_step_after_a_failure_is_folded_again() -> None:
    """Who failed first is answered first, and votes anew before the others have voted on what is over."""
    folder = Folder(range(2))
    assert folder.takes(0, vote(5, "failed"), 0.0)
    folder.answered([0])
    assert folder.takes(0, vote(5, attempt=1), 0.0) == []
    assert [one.ranks for one in folder.takes(1, vote(5, "failed"), 0.0)] == [(0,), (1,)]
    folder.answered([1])
    assert [one.ranks for one in folder.takes(1, vote(5, attempt=1), 0.0)] == [(1,)]


@pytest.mark.parametrize(
    "message",
    [
        local.Built(epoch=2),
        local.AskLeave(reason="SIGTERM"),
        local.GetKey(epoch=1, key="k", timeout_ms=1, request=1),
        local.Ready(signature={"w": "float32[2]"}, total=3),
    ],
)
def test_what_is_no_vote_is_not_held_nor_overtakes_a_vote_of_its_rank(message: local.FromRank) -> None:
    folder = Folder(NODE)
    assert folder.takes(9, message, 0.0) == [Said((9,), message)]
    assert folder.takes(8, vote(5), 0.0) == []
    assert folder.takes(8, message, 0.0) == [Said((8,), vote(5)), Said((8,), message)]


def test_no_vote_is_held_for_long_nor_for_a_rank_that_has_ended() -> None:
    folder = Folder(NODE)
    folder.takes(8, vote(5), 10.0)
    assert folder.due(10.0 + HELD_S_MAX / 2) == []
    assert folder.due(10.0 + 2 * HELD_S_MAX) == [Said((8,), vote(5))]
    for rank in (9, 10):
        assert folder.takes(rank, vote(5), 11.0) == []
    assert folder.ended(11) == [Said((9, 10), vote(5))]


def test_folding_keeps_what_each_rank_says_and_its_order() -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(200):
        said = [(rng.randrange(4), vote(rng.randrange(3))) for _ in range(rng.randrange(30))]
        folded = fold(said)
        for rank in range(4):
            mine = [one.message for one in folded for r in one.ranks if r == rank]
            assert mine == [message for r, message in said if r == rank], f"seed {seed}"


def test_an_answer_for_all_is_said_once_a_node_and_others_by_rank() -> None:
    go, key = local.Answer(verdict="go", step=4), local.Key(request=1)
    first, second = by_node([(None, go), (3, key)], nodes=2, per_node=2)
    assert first == [Said((0, 1), go)]
    assert second == [Said((2, 3), go), Said((3,), key)]


def test_messages_of_different_kinds_with_equal_fields_are_not_one() -> None:
    touch, release = local.Touch(), local.Release()
    assert fold([(0, touch), (1, release)]) == [Said((0,), touch), Said((1,), release)]


def test_views_are_folded_by_phase_and_step_and_say_the_longest_wait() -> None:
    views = {
        0: RankView("reduce", 7, 0.5, 0.0, 900, wait_us=40),
        1: RankView("compute", 7, 0.0, 0.0, 1000),
        2: RankView("reduce", 7, 1.5, 0.0, wait_us=30),
        3: RankView("reduce", 7, 0.2, 3.0),
    }
    folded = [(one.ranks, one.view) for one in fold_views(views)]
    assert folded == [
        ((0, 2), RankView("reduce", 7, 1.5, 0.0, 900, wait_us=30)),
        ((1,), views[1]),
        ((3,), views[3]),
    ]


def test_who_is_slowest_and_who_does_nothing_new_for_much_longer_is_seen_by_itself() -> None:
    views = {
        0: RankView("compute", 7, 0.0, 0.0, 900, idle_s=0.2),
        1: RankView("compute", 7, 0.0, 0.0, 800, idle_s=0.9),
        2: RankView("compute", 7, 0.0, 0.0, 800, idle_s=16.0),
        3: RankView("compute", 7, 0.0, 0.0, 800, idle_s=0.1, expected_s=60.0),
        4: RankView("compute", 7, 0.0, 0.0, 700),
    }
    assert [one.ranks for one in fold_views(views)] == [(0,), (1, 4), (2,), (3,)]
