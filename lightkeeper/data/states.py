"""A stream's `state_dict()` as the numbers that travel in an entry: exact, compact, and never a pickle.

Most of a text stream's state is lists of integers: the tokens of the document that it stands in. They are taken out of
the state and written as bytes, as narrow as they can be; a list that mostly counts up by one (positions in a document)
is written as its differences, which are nearly all alike. Then zlib. Of torchtitan's text data that leaves about a
tenth of the state as JSON (`docs/decisions/0044-states-of-streams.md` has the figures).
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightkeeper.manager.state import codec

WORD_BYTES = 6  # an int64 extra is exact below 2**53
STATE_BYTES_MAX = 1 << 20  # of a packed state
RAW_BYTES_MAX = 1 << 26  # of one before it is packed: what was received is not unpacked any further
_LENGTH_BYTES = 4
_INTS_MIN = 16  # a shorter list stays in the JSON
_LEVEL = 6
_WIDTHS = (1, 2, 4, 8)


class StateTooLarge(ValueError):
    """A stream's state has more bytes than were set aside.

    Attributes:
        size: bytes that it has.
    """

    def __init__(self, size: int, state_bytes: int) -> None:
        super().__init__(f"{size} bytes packed, and state_bytes is {state_bytes}")
        self.size = size


def words_for(state_bytes: int) -> int:
    """Elements of an int64 extra that hold a packed state of so many bytes."""
    return -(-(state_bytes + _LENGTH_BYTES) // WORD_BYTES) if state_bytes else 0


def pack_state(state: Any, state_bytes: int) -> torch.Tensor:
    """A stream's `state_dict()` as int64[words_for(state_bytes)], with exact types.

    Raises:
        StateTooLarge: it has more bytes.
        StateRefused: something in it cannot be copied exactly, with its path.
    """
    return words_of(packed(state), state_bytes)


def unpack_state(words: torch.Tensor) -> Any:
    """What `pack_state` was given.

    Raises:
        CodecError: it is something else.
    """
    return unpacked(packed_of(words))


def words_of(data: bytes, state_bytes: int) -> torch.Tensor:
    """A packed state as int64[words_for(state_bytes)].

    Raises:
        StateTooLarge: it has more bytes.
    """
    if len(data) > state_bytes:
        raise StateTooLarge(len(data), state_bytes)
    whole = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    words = np.zeros((words_for(state_bytes), 8), dtype=np.uint8)
    words[:, :WORD_BYTES] = np.frombuffer(whole.ljust(len(words) * WORD_BYTES, b"\0"), np.uint8).reshape(-1, WORD_BYTES)
    return torch.from_numpy(words.view("<i8").reshape(-1))


def packed_of(words: torch.Tensor) -> bytes:
    """What `words_of` was given; empty if the words are zeros, which say that no state travelled."""
    whole = words.numpy().astype("<i8").view(np.uint8).reshape(-1, 8)[:, :WORD_BYTES].tobytes()
    return whole[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")]


def holds_state(words: torch.Tensor) -> bool:
    """Whether `pack_state` made these words: zeros say that no state travelled."""
    return bool(words[0] != 0)


def packed(state: Any) -> bytes:
    """A state as bytes.

    Raises:
        StateRefused: something in it cannot be copied exactly, with its path.
    """
    taken: list[_Ints] = []
    rest = _without_ints(state, (), taken)
    text = json.dumps(
        [codec.encode(rest, "state"), [[list(one.path), one.count, one.width, one.counts_up] for one in taken]],
        separators=(",", ":"),
        ensure_ascii=False,
    )
    try:
        head = text.encode()
    except UnicodeEncodeError as error:
        raise codec.StateRefused(f"a text in the state is no Unicode: {error.reason}") from None
    parts = [len(head).to_bytes(_LENGTH_BYTES, "little"), head, *(one.data for one in taken)]
    return zlib.compress(b"".join(parts), _LEVEL)


def unpacked(data: bytes) -> Any:
    """What `packed` was given.

    Raises:
        CodecError: it is something else, or too much.
    """
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(data, RAW_BYTES_MAX)
        if not inflate.eof:
            raise codec.CodecError(f"a stream's state is cut off, or has more than {RAW_BYTES_MAX} bytes")
        at = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
        encoded, taken = json.loads(raw[_LENGTH_BYTES:at])
        state = codec.decode(encoded)
        for path, count, width, counts_up in taken:
            one = _Ints(tuple(path), int(count), int(width), bool(counts_up), raw[at : at + count * width])
            state = _with(state, one.path, one.values())
            at += count * width
        return state
    except (zlib.error, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, codec.CodecError):
            raise
        raise codec.CodecError(f"a stream's state is malformed: {error!r}"[:300]) from error


# ---------------------------------------------------------------- lists of integers


@dataclass(frozen=True)
class _Ints:
    """A list of integers that was taken out of a state.

    Attributes:
        path: keys and indices that lead to it.
        count: of its elements.
        width: bytes of one.
        counts_up: whether differences are written, the first element before them.
        data: `count` * `width` bytes, little-endian.
    """

    path: tuple[Any, ...]
    count: int
    width: int
    counts_up: bool
    data: bytes

    @classmethod
    def of(cls, values: list[int], path: tuple[Any, ...]) -> _Ints:
        array: NDArray[np.int64] = np.array(values, dtype=np.int64)
        steps = np.diff(array, prepend=np.int64(0))  # wraps where it must, and so does the sum
        counts_up = bool(np.count_nonzero(steps == 1) * 2 > len(values))
        if counts_up:
            array = steps
        low, high = int(array.min()), int(array.max())
        width = next(width for width in _WIDTHS if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)
        return cls(path, len(values), width, counts_up, array.astype(f"<i{width}").tobytes())

    def values(self) -> list[int]:
        if self.width not in _WIDTHS or len(self.data) != self.count * self.width:
            raise codec.CodecError("a list of integers is malformed")
        array = np.frombuffer(self.data, dtype=f"<i{self.width}").astype(np.int64)
        found: list[int] = (np.cumsum(array) if self.counts_up else array).tolist()
        return found


def _without_ints(value: Any, path: tuple[Any, ...], taken: list[_Ints]) -> Any:
    """The same value with None where a list of integers was; what is not a plain dict or list stays as it is."""
    if len(path) == codec.DEPTH_MAX:
        return value  # the codec says what is wrong with it
    if type(value) is dict:
        return {key: _without_ints(one, (*path, key), taken) for key, one in value.items()}
    if type(value) is not list:
        return value
    if len(value) >= _INTS_MIN and all(type(one) is int for one in value):
        try:
            taken.append(_Ints.of(value, path))
        except OverflowError:
            return value  # larger than 64 bits: the codec writes them
        return None
    return [_without_ints(one, (*path, index), taken) for index, one in enumerate(value)]


def _with(state: Any, path: tuple[Any, ...], values: list[int]) -> Any:
    if not path:
        return values
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = values
    return state
