"""Who works, who is a spare: against the rules as one would apply them by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.spares import at_work, parked_words

GROUPS = tuple(f"g{i}" for i in range(7))
some = st.frozensets(st.sampled_from(GROUPS))


@given(st.integers(1, 7), st.integers(1, 7), some, some, some)
def test_as_many_work_as_are_to_and_as_are_there(
    count: int, members: int, worked: frozenset[str], joined: frozenset[str], spares: frozenset[str]
) -> None:
    groups = GROUPS[:count]
    working = at_work(groups, members, worked - joined, joined, spares)
    assert working <= set(groups) and len(working) == min(members, count)


@given(st.integers(1, 7), some, some)
def test_who_works_goes_on_working(members: int, worked: frozenset[str], spares: frozenset[str]) -> None:
    working = at_work(GROUPS, members, worked, frozenset(), spares)
    assert worked <= working or (working <= worked and len(working) == members)


@given(st.integers(1, 7), some, some, some)
def test_no_spare_works_for_one_that_comes_in_and_is_none(
    members: int, worked: frozenset[str], joined: frozenset[str], spares: frozenset[str]
) -> None:
    working = at_work(GROUPS, members, worked - joined, joined, spares)
    idle = (joined - spares) - working
    assert not idle or not (working & spares & (worked - joined))
    assert at_work(GROUPS, members, working, frozenset(), spares) == working, "and nothing changes after that"


CASES = [
    ("the first epoch", "abcde", "", "abcde", "", "abcd"),
    ("the first epoch, one set up as a spare", "abcde", "", "abcde", "b", "acde"),
    ("one is lost", "acde", "abcd", "", "e", "acde"),
    ("one is lost, and there are two spares", "abcde", "abc", "", "d", "abce"),
    ("the lost one comes back", "acdeb", "acde", "b", "", "acde"),
    ("the lost one comes back, and a spare makes way", "acdeb", "acde", "b", "e", "acdb"),
    ("a spare comes back", "abcde", "abcd", "e", "e", "abcd"),
    ("one leaves", "acde", "abcd", "", "", "acde"),
    ("one leaves, another comes in", "acdef", "abcd", "f", "", "acde"),
    ("only spares are left", "e", "abcd", "", "e", "e"),
    ("too few are there", "ab", "ab", "", "", "ab"),
    ("one comes in where too few are", "abe", "ab", "e", "e", "abe"),
]


@pytest.mark.parametrize(("what", "groups", "worked", "joined", "spares", "working"), CASES, ids=[c[0] for c in CASES])
def test_four_are_to_work(what: str, groups: str, worked: str, joined: str, spares: str, working: str) -> None:
    assert at_work(groups, 4, worked, joined, spares) == frozenset(working)


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        ((5, 4, 1), "parked: 5 groups are here, the job has 4 + 1; joins when one is lost"),
        ((1, 1, 0), "parked: 1 group is here, the job has 1; joins when one is lost"),
    ],
)
def test_a_parked_group_is_told_why(numbers: tuple[int, int, int], line: str) -> None:
    assert parked_words(*numbers) == line
