"""Dealing microbatches, against a slow and obvious version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.deal import deal, deal_rest

totals = st.integers(0, 60)
sizes = st.integers(1, 9)


def deal_slowly(total: int, members: int) -> list[list[int]]:
    """One microbatch more for whoever has least, first come first; then in consecutive runs."""
    counts = [0] * members
    for _ in range(total):
        counts[counts.index(min(counts))] += 1
    left = list(range(total))
    return [[left.pop(0) for _ in range(count)] for count in counts]


@given(totals, sizes)
def test_deal_is_what_dealing_by_hand_gives(total: int, members: int) -> None:
    assert [list(share) for share in deal(total, members)] == deal_slowly(total, members)


@given(totals, sizes)
def test_shares_are_consecutive_disjoint_whole_and_differ_by_at_most_one(total: int, members: int) -> None:
    shares = deal(total, members)
    assert [k for share in shares for k in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("total", "members"), [(-1, 2), (3, 0)])
def test_nonsense_is_refused(total: int, members: int) -> None:
    with pytest.raises(ValueError, match="cannot deal"):
        deal(total, members)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[int, dict[str, tuple[int, ...]], list[str]]:
    """A step, who holds which of its microbatches, and the members; some hold nothing, some holders are no members."""
    total, size = draw(totals), draw(sizes)
    members = [f"g{i}" for i in range(size)]
    owners = draw(st.lists(st.sampled_from([*members, "gone", ""]), min_size=total, max_size=total))
    held = {name: tuple(k for k, owner in enumerate(owners) if owner == name) for name in [*members, "gone"]}
    return total, held, members


def deal_rest_slowly(total: int, held: dict[str, tuple[int, ...]], members: list[str]) -> dict[str, list[int]]:
    counts = {member: len(held[member]) for member in members}
    extra = dict.fromkeys(members, 0)
    orphans = [k for k in range(total) if not any(k in held[member] for member in members)]
    for _ in orphans:
        poorest = sorted(members, key=lambda member: (counts[member] + extra[member], members.index(member)))[0]
        extra[poorest] += 1
    shares = {}
    for member in members:
        shares[member] = [*held[member], *orphans[: extra[member]]]
        orphans = orphans[extra[member] :]
    return shares


@given(holdings())
def test_deal_rest_is_what_dealing_by_hand_gives(case: tuple[int, dict[str, tuple[int, ...]], list[str]]) -> None:
    total, held, members = case
    assert {m: list(share) for m, share in deal_rest(total, held, members).items()} == deal_rest_slowly(*case)


@given(holdings())
def test_who_holds_keeps_and_nothing_is_lost_or_doubled(
    case: tuple[int, dict[str, tuple[int, ...]], list[str]],
) -> None:
    total, held, members = case
    shares = deal_rest(total, held, members)
    assert sorted(k for share in shares.values() for k in share) == list(range(total))
    for member in members:
        assert shares[member][: len(held[member])] == held[member]


@given(totals, sizes)
def test_with_nothing_held_it_is_a_fresh_deal(total: int, size: int) -> None:
    members = [f"g{i}" for i in range(size)]
    assert tuple(deal_rest(total, {}, members).values()) == deal(total, size)


@pytest.mark.parametrize(
    ("held", "line"),
    [
        ({"g0": (1, 2), "g1": (2,)}, "g0 and g1 both hold microbatch 2"),
        ({"g0": (1, 1)}, "g0 and g0 both hold microbatch 1"),
        ({"g1": (4,)}, "g1 holds microbatch 4 of a step that has 4"),
        ({"g1": (-1,)}, "g1 holds microbatch -1 of a step that has 4"),
    ],
)
def test_what_cannot_be_is_refused_by_name(held: dict[str, tuple[int, ...]], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        deal_rest(4, held, ["g0", "g1"])
