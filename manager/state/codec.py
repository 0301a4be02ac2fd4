"""Values with their exact types as JSON, and back: `decode(encode(x))` equals `x`, type by type.

JSON knows neither tuples, nor integer keys, nor bytes, nor a float that is not a number; so plain JSON scalars
stand for themselves, and everything else is a list whose first element names its kind. Tensors are not written:
each becomes a reference by its path, and their bytes travel apart. What is read was written by a peer, so it is
checked as data: nothing is evaluated, and depth and number of nodes are bounded.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from lightkeeper.errors import UsageError
from lightkeeper.words import article

Json: TypeAlias = Any
TensorOut: TypeAlias = Callable[[str, torch.Tensor], None]
TensorIn: TypeAlias = Callable[[str], Any]

DEPTH_MAX = 32
NODES_MAX = 1 << 20
BLOB_MAX = 1 << 24  # bytes of one string or bytes object
BITS_MAX = 1 << 13  # of an integer
_JSON_INT_MAX = 1 << 62

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
        torch.complex128, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    name: kind for kinds in (_SEQUENCES, _MAPPINGS) for kind, name in kinds.items()
}


class StateRefused(UsageError):
    """A part of the state cannot be copied exactly; the message gives its path and type."""


class CodecError(ValueError):
    """What was read is not what `encode` writes; one line."""


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """Such as "float32".

    Raises:
        StateRefused: values of this dtype are not copied.
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise StateRefused(f"{path} has dtype {dtype}, which cannot be part of the state")
    return name


def encode(value: Any, path: str, tensor_out: TensorOut | None = None) -> Json:
    """A value as JSON.

    Args:
        value: None, bool, int, float, complex, str, bytes, a dtype, or a list, tuple, `torch.Size`, dict,
            OrderedDict or Counter of such with str or int keys; tensors if `tensor_out` is given. Exact types
            only: a subclass would come back as something else.
        path: Its name, for the messages and for the tensors in it.
        tensor_out: Takes each tensor with its path.

    Raises:
        StateRefused: anything else is in it, or too much.
    """
    return _Encoder(tensor_out).node(value, path, DEPTH_MAX)


def decode(data: Json, tensor_in: TensorIn | None = None) -> Any:
    """What `encode` was given.

    Args:
        data: From `encode`, by way of JSON.
        tensor_in: Gives the tensor for a path.

    Raises:
        CodecError: it is something else, or too much.
    """
    try:
        return _Decoder(tensor_in).node(data, DEPTH_MAX)
    except (KeyError, TypeError, ValueError, IndexError, struct.error) as e:
        raise e if isinstance(e, CodecError) else CodecError(f"a value is malformed: {e!r}"[:300]) from e


class _Encoder:
    def __init__(self, tensor_out: TensorOut | None) -> None:
        self._tensor_out = tensor_out
        self._nodes = 0

    def node(self, value: Any, path: str, depth: int) -> Json:
        self._nodes += 1
        if depth == 0 or self._nodes > NODES_MAX:
            raise StateRefused(f"{path} is nested deeper than {DEPTH_MAX}, or holds more than {NODES_MAX} values")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], [self.node(x, f"{path}.{i}", depth - 1) for i, x in enumerate(value)]]
        if kind in _MAPPINGS:
            return [_MAPPINGS[kind], [self._item(k, v, path, depth) for k, v in value.items()]]
        return _scalar(value, path)

    def _item(self, key: Any, value: Any, path: str, depth: int) -> Json:
        if type(key) not in (str, int):
            raise StateRefused(f"{path} has a key of type {_type_name(key)}: only str and int can be copied exactly")
        return [_scalar(key, path), self.node(value, f"{path}.{key}", depth - 1)]

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if self._tensor_out is None:
            raise StateRefused(f"{path} is {article(_type_name(tensor))}: no tensor is allowed here")
        self._tensor_out(path, tensor)
        return ["tensor", path]


def _scalar(value: Any, path: str) -> Json:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        if value.bit_length() > BITS_MAX:
            raise StateRefused(f"{path} is an integer of {value.bit_length()} bits: at most {BITS_MAX}")
        return value if abs(value) < _JSON_INT_MAX else ["int", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]
    if kind is complex:
        return ["complex", struct.pack("<dd", value.real, value.imag).hex()]
    if kind in (str, bytes):
        if len(value) > BLOB_MAX:
            raise StateRefused(f"{path} has {len(value)} bytes: at most {BLOB_MAX} outside tensors")
        return value if kind is str else ["bytes", base64.b64encode(value).decode()]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value, path)]
    raise StateRefused(f"{path} is {article(_type_name(value))}, which cannot be copied exactly")


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Decoder:
    def __init__(self, tensor_in: TensorIn | None) -> None:
        self._tensor_in = tensor_in
        self._nodes = 0

    def node(self, data: Json, depth: int) -> Any:
        self._nodes += 1
        if depth == 0 or self._nodes > NODES_MAX:
            raise CodecError(f"a value is nested deeper than {DEPTH_MAX}, or holds more than {NODES_MAX} values")
        if not isinstance(data, list):
            return _plain(data)
        kind, body = data
        if kind in ("list", "tuple", "size"):
            return _MAKERS[kind](self.node(x, depth - 1) for x in _list(body))
        if kind in ("dict", "odict", "counter"):
            return self._mapping(kind, _list(body), depth)
        if kind == "tensor" and self._tensor_in is not None and isinstance(body, str):
            return self._tensor_in(body)
        return _special(kind, body)

    def _mapping(self, kind: str, items: list[Any], depth: int) -> Any:
        made = _MAKERS[kind](())
        for key, value in items:
            key = self.node(key, 2)
            if type(key) not in (str, int) or key in made:
                raise CodecError("a mapping has a key of another type, or one key twice")
            made[key] = self.node(value, depth - 1)
        return made


def _plain(data: Json) -> Any:
    if data is None or type(data) in (bool, str):
        return data
    if (type(data) is int and abs(data) < _JSON_INT_MAX) or (type(data) is float and math.isfinite(data)):
        return data
    raise CodecError(f"a {type(data).__name__} is not written so")


def _list(data: Json) -> list[Any]:
    if not isinstance(data, list):
        raise CodecError("a list was expected")
    return data


def _special(kind: Any, body: Any) -> Any:
    if not isinstance(body, str) or len(body) > 2 * BLOB_MAX:
        raise CodecError("a value has no text, or too much")
    if kind == "int" and len(body) <= BITS_MAX // 4 + 4:
        return int(body, 16)
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(body))[0]
    if kind == "complex":
        return complex(*struct.unpack("<dd", bytes.fromhex(body)))
    if kind == "bytes":
        return base64.b64decode(body, validate=True)
    if kind == "dtype":
        return DTYPES[body]
    raise CodecError("a value of an unknown kind")
