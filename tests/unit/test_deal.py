"""Dealing microbatches, against a slow and obvious version."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.deal import deal, deal_rest

totals = st.integers(0, 60)
sizes = st.integers(1, 9)


speeds_of = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def deal_slowly(total: int, speeds: list[int]) -> list[list[int]]:
    """One each for whoever works, then one more for whoever ends first with it; then in consecutive runs."""
    speeds = speeds if any(speeds) else [1] * len(speeds)
    working = [slot for slot, speed in enumerate(speeds) if speed]
    counts = [1 if speed and total >= len(working) else 0 for speed in speeds]
    for _ in range(total - sum(counts)):
        slot = min(working, key=lambda s: (Fraction(counts[s] + 1, speeds[s]), s))
        counts[slot] += 1
    left = list(range(total))
    return [[left.pop(0) for _ in range(count)] for count in counts]


@given(totals, speeds_of)
def test_deal_is_what_dealing_by_hand_gives(total: int, speeds: list[int]) -> None:
    assert [list(share) for share in deal(total, speeds)] == deal_slowly(total, speeds)


@given(totals, speeds_of)
def test_shares_are_consecutive_disjoint_and_whole(total: int, speeds: list[int]) -> None:
    shares = deal(total, speeds)
    assert [k for share in shares for k in share] == list(range(total))
    assert not any(share for share, speed in zip(shares, speeds, strict=True) if not speed and any(speeds))


@given(totals, sizes, st.integers(0, 9))
def test_equal_speeds_give_sizes_that_differ_by_at_most_one(total: int, members: int, speed: int) -> None:
    lengths = list(map(len, deal(total, [speed] * members)))
    assert max(lengths) - min(lengths) <= 1 and sorted(lengths, reverse=True) == lengths


@given(st.integers(1, 14), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_no_other_deal_with_one_for_each_ends_sooner(total: int, speeds: list[int]) -> None:
    def ends(sizes: Sequence[int]) -> Fraction:
        return max(Fraction(size, speed) for size, speed in zip(sizes, speeds, strict=True))

    least = 1 if total >= len(speeds) else 0
    others = (s for s in product(range(least, total + 1), repeat=len(speeds)) if sum(s) == total)
    assert ends([len(share) for share in deal(total, speeds)]) == min(map(ends, others))


def test_a_group_of_seven_tenths_of_the_speed_gets_four_of_twenty_four() -> None:
    assert [len(share) for share in deal(24, [1000, 1000, 1000, 700])] == [7, 7, 6, 4]
    assert [len(share) for share in deal(24, [1000, 1000, 1000, 0])] == [8, 8, 8, 0]


@pytest.mark.parametrize(("total", "speeds"), [(-1, [1, 1]), (3, []), (3, [1, -1])])
def test_nonsense_is_refused(total: int, speeds: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot deal"):
        deal(total, speeds)


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
    assert tuple(deal_rest(total, {}, members).values()) == deal(total, [1] * size)


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
