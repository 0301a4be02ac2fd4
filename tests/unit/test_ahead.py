"""What is read ahead, without processes: order, bound, what is dropped, how often a worker may die."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.data.ahead import DEATHS_MAX, Ahead


def test_wishes_are_made_in_order_up_to_the_limit() -> None:
    ahead: Ahead[str] = Ahead(3)
    ahead.expect([(5, 0), (5, 1), (6, 0), (6, 1)])
    assert [ahead.next_for(worker) for worker in range(4)] == [(5, 0), (5, 1), (6, 0), None]
    assert ahead.arrived(0, "a") and ahead.arrived(1, "b")
    assert ahead.next_for(0) is None, "three are there or being made"
    assert ahead.take((5, 0)) == "a" and ahead.take((5, 0)) is None
    ahead.expect([(5, 1), (6, 0), (6, 1)])
    assert ahead.next_for(0) == (6, 1)


def test_what_is_no_longer_wanted_is_dropped_now_or_when_it_comes() -> None:
    ahead: Ahead[str] = Ahead(4)
    ahead.expect([(5, 0), (5, 1), (6, 0)])
    for worker in range(3):
        ahead.next_for(worker)
    assert ahead.arrived(0, "a")
    assert ahead.expect([(5, 1), (6, 3)]) == [(5, 0)]
    assert ahead.arrived(1, "b") and not ahead.arrived(2, "c")
    assert list(ahead.ready) == [(5, 1)] and ahead.next_for(0) == (6, 3)


def test_what_is_asked_for_goes_first_whatever_the_limit() -> None:
    ahead: Ahead[str] = Ahead(1)
    ahead.expect([(5, 0)])
    assert ahead.next_for(0) == (5, 0)
    ahead.demand((5, 9))
    assert ahead.next_for(1) == (5, 9)
    ahead.expect([(5, 0)])
    assert ahead.arrived(1, "x") and ahead.expect([(6, 0)]) == [], "it is asked for, though nobody foresaw it"
    assert ahead.take((5, 9)) == "x" and ahead.demanded is None


def test_what_may_fall_to_this_group_takes_the_place_of_what_is_wanted_later() -> None:
    ahead: Ahead[str] = Ahead(2)
    ahead.expect([(6, 0), (6, 1)])
    for worker in range(2):
        ahead.next_for(worker)
        ahead.arrived(worker, "later")
    assert ahead.expect([(5, 4), (5, 5), (6, 0), (6, 1)]) == [(6, 0), (6, 1)]
    assert [ahead.next_for(worker) for worker in range(2)] == [(5, 4), (5, 5)]


def test_a_batch_whose_maker_died_is_made_anew_but_not_for_ever() -> None:
    ahead: Ahead[str] = Ahead(2, workers=5)
    ahead.expect([(5, 0), (5, 1)])
    for death in range(1, DEATHS_MAX + 1):
        assert ahead.next_for(0) == (5, 0)
        assert ahead.died(0) == ((5, 0), death == DEATHS_MAX)
        if death < DEATHS_MAX:  # others go on meanwhile: that does not excuse it
            assert ahead.next_for(1) == (5, 0)
            ahead.at_work[1] = (5, 1)
            ahead.arrived(1, "b")
            ahead.take((5, 1))


def test_idle_workers_that_die_in_a_row_are_too_many_at_last() -> None:
    ahead: Ahead[str] = Ahead(2, workers=2)
    assert [ahead.died(0)[1] for _ in range(2 * DEATHS_MAX)] == [False] * (2 * DEATHS_MAX - 1) + [True]
    assert ahead.died(0)[0] is None
    ahead.expect([(5, 0)])
    ahead.next_for(1)
    ahead.arrived(1, "a")
    assert not ahead.died(0)[1], "a batch between: it is counted anew"


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Ahead(0)


keys = st.tuples(st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("eand"), st.lists(keys, max_size=6), st.integers(0, 2))))
def test_the_bound_holds_whatever_happens_and_nothing_is_made_twice(limit: int, events: list[tuple]) -> None:
    ahead: Ahead[object] = Ahead(limit)
    for kind, some, worker in events:
        if kind == "e":
            ahead.expect(some)
        elif kind == "d" and some:
            ahead.demand(some[0])
            ahead.take(some[0])
        elif kind == "n" and worker not in ahead.at_work:
            before = len(ahead.ready) + len(ahead.at_work)
            key = ahead.next_for(worker)
            assert key in (None, ahead.demanded) or before < limit, "what is foreseen waits for room"
        elif kind == "a" and worker in ahead.at_work:
            ahead.arrived(worker, object())
        making = list(ahead.at_work.values())
        assert len(set(making)) == len(making) and not set(making) & set(ahead.ready)
        in_vain = [key for key in making if key not in (*ahead.wishes, ahead.demanded)]  # another was demanded
        assert len(making) + len(ahead.ready) <= limit + 1 + len(in_vain)
        assert set(ahead.ready) <= {*ahead.wishes, ahead.demanded}
