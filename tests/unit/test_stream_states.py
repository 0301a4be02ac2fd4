"""What a stream's state becomes in an entry: the same state again, type by type, and small."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.data.states import (
    RAW_BYTES_MAX,
    StateTooLarge,
    holds_state,
    pack_state,
    packed,
    unpack_state,
    unpacked,
    words_for,
)
from lightkeeper.manager.state import codec

INTS = st.integers(-(2**66), 2**66) | st.integers(-200, 200) | st.integers(-(2**63), 2**63 - 1)
LEAVES = st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary(max_size=9)
LISTS = st.lists(INTS, max_size=40) | st.builds(
    lambda at, n: list(range(at, at + n)), st.integers(-9, 9), st.integers(0, 50)
)
STATES = st.recursive(
    LEAVES | LISTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, type by type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_a_state_comes_back_with_its_types(state: Any) -> None:
    assert same(unpacked(packed(state)), state)
    words = pack_state(state, 1 << 14)
    assert int(words.max()) < 2**48 and int(words.min()) >= 0 and holds_state(words)
    assert same(unpack_state(words), state)


@pytest.mark.parametrize("size", [300, 301, 305, 306])
def test_a_state_has_its_bytes_and_no_more(size: int) -> None:
    state = {"a": [1, (2.5, None)], "b": -(2**70), "c": True}
    words = pack_state(state, size)
    assert words.shape == (words_for(size),) and unpack_state(words) == state
    needed = len(packed(state))
    assert unpack_state(pack_state(state, needed)) == state
    with pytest.raises(StateTooLarge, match=f"{needed} bytes packed, and state_bytes is {needed - 1}"):
        pack_state(state, needed - 1)
    assert not holds_state(torch.zeros(words_for(size), dtype=torch.int64))


def test_a_documents_positions_and_labels_cost_next_to_nothing() -> None:
    """As a text stream has them: tokens, the same tokens one further, and where each stands in its document."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 128_000, (8001,), generator=generator).tolist()
    inputs = len(packed({"inputs": tokens[:-1]}))
    everything = packed({"inputs": tokens[:-1], "labels": tokens[1:], "positions": list(range(8000))})
    assert inputs > 8000 * 17 / 8 and len(everything) < 1.1 * inputs
    assert unpacked(everything)["labels"] == tokens[1:]


def test_what_cannot_be_copied_exactly_is_refused() -> None:
    with pytest.raises(codec.StateRefused, match="state.generator is a torch.Tensor"):
        pack_state({"generator": torch.zeros(1)}, 100)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(codec.StateRefused, match="nested deeper"):
        pack_state(endless, 100)


def test_what_is_no_state_is_told() -> None:
    good = packed({"ints": list(range(100))})
    for wrong in (
        b"",
        b"x",
        good[:-9],
        zlib.compress(b"\xff\xff\xff\x7f{}"),
        zlib.compress(zlib.decompress(good)[:-1]),
    ):
        with pytest.raises(codec.CodecError):
            unpacked(wrong)
    with pytest.raises(codec.CodecError, match="more than"):
        unpacked(zlib.compress(bytes(RAW_BYTES_MAX + 1)))


def test_a_text_that_is_no_unicode_is_refused() -> None:
    """What was read with ``errors="surrogateescape"`` is such a text; the state then does not travel."""
    with pytest.raises(codec.StateRefused, match="a text in the state is no Unicode"):
        pack_state({"line": "\ud800"}, 1 << 12)
