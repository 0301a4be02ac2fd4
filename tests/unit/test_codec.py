"""What is encoded comes back with its exact types, and nothing else is let in."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.manager.state.codec import (
    BITS_MAX,
    DEPTH_MAX,
    DTYPES,
    CodecError,
    StateRefused,
    decode,
    encode,
)


def round_trip(value: object) -> object:
    return decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


SCALARS = (
    st.none() | st.booleans() | st.integers(-(1 << 200), 1 << 200) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_decode_inverts_encode_with_types(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        1, 1.0, True, -0.0, math.inf, -math.inf, math.nan, 1e308, 5e-324, 1 << 63, -(1 << 70), complex(1, -0.0),
        "\ud800 \U0001f600", b"\x00\xff", torch.float32, torch.Size([2, 3]), Counter({3: 1, 5: 2}), {1: "a", "1": "b"},
        {}, (), [], ((),), {"a": [(1, 2.0), {3: None}]},
    ],
)  # fmt: skip
def test_single_values(value):
    assert same(round_trip(value), value)


class Odd(int):
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, object()]}, r"x\.a\.1 is an object"),
        ({"a": Odd(3)}, r"x\.a is a .*Odd"),
        ({"lr": np.float64(0.1)}, r"x\.lr is a numpy\.float64"),
        ({"f": print}, r"x\.f is a builtin_function_or_method"),
        ({"s": {1, 2}}, r"x\.s is a set"),
        (defaultdict(int), r"x is a collections\.defaultdict"),
        ({"a": {(1, 2): 3}}, r"x\.a has a key of type tuple"),
        ({"a": {True: 3}}, r"x\.a has a key of type bool"),
        ({"t": torch.ones(2)}, r"x\.t is a torch\.Tensor"),
        (1 << (BITS_MAX + 1), "bits"),
    ],
)
def test_anything_else_is_refused_by_path_and_type(value, says):
    with pytest.raises(StateRefused, match=says):
        encode(value, "x")


def test_depth_and_cycles_are_bounded():
    loop: list = []
    loop.append(loop)
    with pytest.raises(StateRefused, match=f"deeper than {DEPTH_MAX}"):
        encode(loop, "x")


def test_tensors_become_paths():
    out: dict[str, torch.Tensor] = {}
    tensors = {"a": torch.ones(2), "b": [torch.zeros(1)]}
    data = json.loads(json.dumps(encode(tensors, "x", out.__setitem__)))
    assert list(out) == ["x.a", "x.b.0"]
    back = decode(data, out.__getitem__)
    assert back["a"] is tensors["a"] and back["b"][0] is tensors["b"][0]


def nested(depth: int) -> object:
    data: object = 1
    for _ in range(depth):
        data = ["list", [data]]
    return data


@pytest.mark.parametrize(
    "data",
    [
        {}, [1], ["list"], ["list", 3], ["list", [1], 2], ["exec", "1"], ["eval", ["a"]], ["int", "1" * 9999],
        ["float", "00"], ["float", 3], ["bytes", "*"], ["dtype", "save"], ["dict", [[1.5, 2]]], ["dict", 5],
        ["dict", [["a", 1], ["a", 2]]], ["dict", [["a"]]], ["counter", [["a"]]], ["tensor", "x"], [["list"], []],
        1 << 70, nested(DEPTH_MAX),
    ],
)  # fmt: skip
def test_malformed_data_is_refused(data):
    with pytest.raises(CodecError):
        decode(data)


def test_a_reference_to_an_unknown_tensor_is_refused():
    with pytest.raises(CodecError):
        decode(["tensor", "y"], {}.__getitem__)


def test_every_dtype_is_known_by_torch():
    assert all(getattr(torch, name) is dtype for name, dtype in DTYPES.items())
