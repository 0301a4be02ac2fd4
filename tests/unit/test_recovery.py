"""What promises conclude, as pure functions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.messages import Promise
from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, Term
from lightkeeper.lighthouse.recovery import Contradiction, conclude, most_blamed, newest_known, unheard

TERM = Term(1, "lh")


def epoch(number: int) -> Epoch:
    return Epoch(number, TERM)


def membership(number: int, *groups: str, base: int | None = None) -> Membership:
    return Membership(epoch(number), tuple(Member(g, "i1", "") for g in groups), None if base is None else epoch(base))


def promise(
    step: int = -1,
    held: tuple[int, ...] = (),
    total: int = 12,
    entry: int = 1,
    known: Membership | None = None,
    prepared: tuple[Membership, ...] = (),
) -> Promise:
    return Promise(epoch(9), known, prepared, None if step < 0 else Entry(epoch(entry), step), held, total)


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=6), st.integers(0, 20))
def test_all_that_lag_by_at_most_one_go_on_together_at_one_step_with_all_its_microbatches(
    steps: list[int], total: int
) -> None:
    names = [f"g{i}" for i in range(len(steps))]
    concluded = conclude(names, {n: promise(s, total=total) for n, s in zip(names, steps, strict=True)})
    high = max(steps)
    assert concluded.first_step == high + 1 and concluded.total == total
    assert concluded.members == tuple(n for n, s in zip(names, steps, strict=True) if s >= high - 1)
    assert concluded.behind == tuple(n for n, s in zip(names, steps, strict=True) if s < high - 1)
    assert sorted(k for share in concluded.shares for k in share.microbatches) == list(range(total))
    late = [n for n in concluded.members if steps[names.index(n)] == high - 1]
    assert [donor.group for donor in concluded.donors] == late
    assert all(steps[names.index(donor.donor)] == high for donor in concluded.donors)


def test_what_the_late_held_was_for_another_step() -> None:
    concluded = conclude(["g0", "g1"], {"g0": promise(4, (0, 1), 4), "g1": promise(3, (0, 1, 2, 3), 99)})
    assert [share.microbatches for share in concluded.shares] == [(0, 1), (2, 3)] and concluded.total == 4


def test_the_first_step_may_be_one_ahead_of_those_who_have_none() -> None:
    concluded = conclude(["g0", "g1"], {"g0": promise(0), "g1": promise(-1)})
    assert concluded.first_step == 1 and concluded.donors[0].donor == "g0" and concluded.entry == Entry(epoch(1), 0)


@pytest.mark.parametrize(
    ("promises", "line"),
    [
        (
            {"g0": promise(4, entry=1), "g1": promise(4, entry=2)},
            "two entries for one step: step 4 of e1/1@lh; step 4 of e2",
        ),
        ({"g0": promise(4, total=3), "g1": promise(4, total=4)}, r"disagree on the microbatches of step 5: \[3, 4\]"),
        ({"g0": promise(4, (1,)), "g1": promise(4, (1,))}, "g0 and g1 both hold microbatch 1"),
        ({"g0": promise(4, (12,)), "g1": promise(4)}, "g0 holds microbatch 12 of a step that has 12"),
    ],
)
def test_contradictions_are_told(promises: dict[str, Promise], line: str) -> None:
    with pytest.raises(Contradiction, match=line):
        conclude(["g0", "g1"], promises)


def test_the_newest_is_the_highest_that_anybody_names() -> None:
    old, new = membership(1, "g0"), membership(2, "g0")
    assert newest_known(None, {}) is None
    assert newest_known(old, {"g0": promise()}) == old
    assert newest_known(old, {"g0": promise(known=new), "g1": promise(known=old)}) == new
    assert newest_known(new, {"g0": promise(known=old)}) == new


def test_an_epoch_of_which_nobody_promised_may_be_in_force_elsewhere() -> None:
    newest, rest = membership(1, "g0", "g1", "g2"), membership(2, "g0", "g1", base=1)
    assert unheard(None, {}) is None
    assert unheard(newest, {}) == newest
    assert unheard(newest, {"g2": promise(prepared=(rest,))}) == rest
    assert unheard(newest, {"g2": promise(prepared=(rest,)), "g0": promise()}) is None
    other = membership(3, "g9", base=7)
    assert unheard(newest, {"g2": promise(prepared=(other,))}) is None, "prepared on another base"


def test_blame_needs_somebody_who_stands_out() -> None:
    assert most_blamed(Counter(), ["g0"]) is None
    assert most_blamed(Counter(g0=2, g1=1), ["g0", "g1"]) == "g0"
    assert most_blamed(Counter(g0=2, g1=2), ["g0", "g1"]) is None
    assert most_blamed(Counter(g0=9, g1=1), ["g1", "g2"]) == "g1", "who is gone already is not asked about"
