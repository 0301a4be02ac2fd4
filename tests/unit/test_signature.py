"""Differences between two signatures, in words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.signature import SHOWN_MAX, differences

signatures = st.dictionaries(st.text(max_size=3), st.text(min_size=1, max_size=3), max_size=10)


def test_equal_signatures_differ_in_nothing() -> None:
    assert differences({"w": "float32[2]"}, {"w": "float32[2]"}) == []


def test_what_differs_and_what_is_absent_is_named_on_both_sides() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}, "g1", "g0") == [
        "a is 1 in g1 and absent in g0", "b is 2 in g1 and 3 in g0", "c is absent in g1 and 4 in g0",
    ]  # fmt: skip


@given(signatures, signatures)
def test_no_lines_only_if_equal_and_never_more_than_a_few(a: dict[str, str], b: dict[str, str]) -> None:
    lines = differences(a, b)
    assert bool(lines) == (a != b) and len(lines) <= SHOWN_MAX + 1
    assert len(lines) == len(differences(b, a))


def test_other_ranks_explain_all_other_differences() -> None:
    two = {"ranks": "2", "place": "0 of 2", "a": "1", "rank 1: a": "1"}
    assert differences(two, {"ranks": "1", "place": "0 of 1", "a": "2"}, "g1", "g0") == ["ranks is 2 in g1 and 1 in g0"]


def test_other_places_come_before_what_follows_from_them() -> None:
    assert differences({"place": "0 of 2", "a": "1"}, {"place": "0 of 1", "a": "2"}, "g1", "g0")[0].startswith("place")
