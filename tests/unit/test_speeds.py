"""When the work is dealt by other speeds, and by which: pure functions and the hysteresis around them."""

from __future__ import annotations

import random

import pytest

from lightkeeper.lighthouse.deal import deal
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term
from lightkeeper.lighthouse.speeds import EVERY_STEPS, STEADY_STEPS, Dealer, better, changed, usual, why

E = Epoch(1, Term(1, "lh"))


def members(*speeds: int, names: str = "g0 g1 g2 g3", epoch: Epoch = E) -> Membership:
    chosen = names.split()
    return Membership(epoch, tuple(Member(name, f"{name}i", "a:1") for name in chosen), None, speeds)


def sizes(total: int, speeds: tuple[int, ...]) -> list[int]:
    return [len(share) for share in deal(total, speeds)]


def test_one_of_four_at_seven_tenths_gets_fewer() -> None:
    new = better(members(), [10_000, 10_000, 14_286, 10_000], 24)
    assert new == (1000, 1000, 700, 1000) and sizes(24, new) == [7, 7, 4, 6]


def test_it_gets_as_many_again_when_it_is_as_fast_again() -> None:
    assert better(members(1000, 1000, 700, 1000), [10_000] * 4, 24) == ()


@pytest.mark.parametrize("total", [4, 8, 24, 1000])
def test_noise_of_five_per_cent_changes_nothing(total: int) -> None:
    rng = random.Random(total)
    for _ in range(200):
        paces = [round(10_000 * rng.uniform(0.975, 1.025)) for _ in range(4)]
        assert better(members(), paces, total) is None, paces


def test_where_no_deal_helps_nothing_changes() -> None:
    """With one microbatch each, nobody can take over a part of one."""
    assert better(members(), [10_000, 10_000, 14_286, 10_000], 4) is None


def test_each_that_works_keeps_one_and_a_spare_has_none() -> None:
    paces = [10_000, 10_000, 3_000_000, 10_000]
    new = better(members(1000, 1000, 1000, 0), paces, 24)
    assert new is not None and new[3] == 0 and sizes(24, new) == [12, 11, 1, 0]


def test_who_is_not_measured_yet_counts_as_it_is_dealt() -> None:
    assert better(members(), [10_000, 10_000, 14_286, 0], 24) == (1000, 1000, 700, 1000)
    assert better(members(), [10_000, 0, 0, 0], 24) is None, "one alone is not slow"
    assert better(members(1000, 1000, 700, 1000), [10_000, 10_000, 0, 10_000], 24) is None


def test_two_of_which_one_is_slow() -> None:
    new = better(members(names="g0 g1"), [10_000, 20_000], 12)
    assert new is not None and sizes(12, new) == [8, 4]


def test_a_newcomer_counts_as_the_others_usually_do() -> None:
    assert usual(()) == 1000 and usual((1000, 700, 0)) == 700 and usual((0, 0)) == 1000


# ---------------------------------------------------------------- hysteresis


SLOW = [10_000, 10_000, 14_286, 10_000]


def when(dealer: Dealer, membership: Membership, paces: list[int], steps: range) -> int | None:
    """The first of these steps at which the speeds are to change."""
    return next((step for step in steps if dealer.look(step, membership, paces, 24) is not None), None)


def test_not_in_the_first_steps_that_are_seen() -> None:
    assert when(Dealer(), members(), SLOW, range(100, 200)) == 100 + EVERY_STEPS


def test_only_a_gain_that_stands() -> None:
    dealer = Dealer(changed=0)
    for step in range(100, 200, 2):
        assert dealer.look(step, members(), SLOW, 24) is None
        assert dealer.look(step + 1, members(), [10_000] * 4, 24) is None
    assert when(dealer, members(), SLOW, range(200, 300)) == 200 + STEADY_STEPS


def test_at_most_one_change_in_twenty_steps() -> None:
    dealer = Dealer(changed=0)
    first = when(dealer, members(), SLOW, range(30, 100))
    assert first == 30 + STEADY_STEPS
    dealer.in_force()
    assert when(dealer, members(1000, 1000, 700, 1000), [10_000] * 4, range(first + 3, 200)) == first + 3 + EVERY_STEPS


# ---------------------------------------------------------------- words


def test_who_comes_or_goes_changes_no_proportions() -> None:
    old = members(1000, 1000, 700, 1000)
    assert not changed(old, members(1000, 1000, 700, names="g0 g1 g2"))
    assert not changed(old, members(names="g0 g1 g3"))
    assert not changed(old, members(1000, 1000, 700, 1000, 500, names="g0 g1 g2 g3 g4"))
    assert changed(old, members()) and changed(members(), old)
    assert not changed(members(0, 1000, 1000, 1000), members()), "a spare that is promoted"


def test_why_names_who_changed_most() -> None:
    assert why(members(), (1000, 1000, 700, 1000)) == "new shares: g2 1.00 -> 0.70 of the median"
    assert why(members(1000, 1000, 700, 1000), ()) == "new shares: g2 0.70 -> 1.00 of the median"
    assert why(members(), (500, 700, 1500, 1400)) == (
        "new shares: g0 1.00 -> 0.50, g2 1.00 -> 1.50, g1 1.00 -> 0.70 of the median, and 1 more"
    )
