"""Whether an epoch still stands, by its members' word."""

from __future__ import annotations

import pytest

from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term
from lightkeeper.manager.standing import Word, doubts

TERM = Term(1, "lh")


def membership(number: int, *groups: str, base: int | None = None) -> Membership:
    members = tuple(Member(g, f"{g}-i1", f"{g}:1") for g in groups)
    return Membership(Epoch(number, TERM), members, None if base is None else Epoch(base, TERM))


MINE = membership(3, "g0", "g1", "g2")
PLANNED = membership(4, "g0", "g1", base=3)
FINE = Word("g2-i1", MINE, 3)


def asked(word: Word | None, prepared: tuple[Membership, ...] = ()) -> list[str]:
    words = {"g0": Word("g0-i1", MINE, 3), **({} if word is None else {"g2": word})}
    return doubts(MINE, prepared, "g1", words)


@pytest.mark.parametrize(
    "word",
    [
        None,
        Word("g2-i2", MINE, 3),
        Word("g2-i1", None, 3),
        Word("g2-i1", membership(5, "g2"), 5),
        Word("g2-i1", MINE, 4),
        Word("g2-i1", MINE, 3, over="rank 0 exited 1"),
        Word("g2-i1", PLANNED, 4),
    ],
    ids=["silent", "started again", "no epoch", "later epoch", "promised", "over", "unknown change"],
)
def test_one_doubtful_member_is_enough(word: Word | None) -> None:
    assert asked(word) == ["g2"]


def test_it_stands_if_all_say_so() -> None:
    assert asked(FINE) == []


def test_a_planned_change_that_is_known_here_is_the_same_history() -> None:
    assert asked(Word("g2-i1", PLANNED, 4), (PLANNED,)) == []
    assert asked(Word("g2-i1", PLANNED, 5), (PLANNED,)) == ["g2"]


def test_alone_there_is_nobody_to_doubt() -> None:
    assert doubts(membership(3, "g1"), (), "g1", {}) == []
