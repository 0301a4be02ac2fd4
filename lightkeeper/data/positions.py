"""Where each slot's stream stands, as numbers that travel in the entries: pure, no streams.

Every step, whoever read from a slot's stream adds where it stands then; nobody else adds anything to that slot, so the
sum over all groups is what the one reader said. A slot that was not read in a step has the sum 0, and stands where it
stood. Where the ranks of a group split microbatches, each place in a microbatch has streams of its own, and a row.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from lightkeeper.manager.state import codec

WORD_BYTES = 6  # an int64 extra is exact below 2**53
_LENGTH_BYTES = 4


class PositionsBroken(RuntimeError):
    """An entry does not fit the positions before it: some group read a stream from elsewhere. A bug."""


class StateTooLarge(ValueError):
    """A stream's state has more bytes than were set aside."""


def words_for(state_bytes: int) -> int:
    """Elements of an int64 extra that hold a state of so many bytes."""
    return -(-(state_bytes + _LENGTH_BYTES) // WORD_BYTES) if state_bytes else 0


def pack_state(state: Any, state_bytes: int) -> torch.Tensor:
    """A stream's `state_dict()` as int64[words_for(state_bytes)], with exact types.

    Raises:
        StateTooLarge: it has more bytes.
        UsageError: something in it cannot be copied exactly, with its path.
    """
    data = json.dumps(codec.encode(state, "state"), separators=(",", ":"), ensure_ascii=False).encode()
    if len(data) > state_bytes:
        raise StateTooLarge(f"{len(data)} bytes, and state_bytes is {state_bytes}")
    padded = (len(data).to_bytes(_LENGTH_BYTES, "little") + data).ljust(words_for(state_bytes) * WORD_BYTES, b"\0")
    words = [padded[at : at + WORD_BYTES] for at in range(0, len(padded), WORD_BYTES)]
    return torch.tensor([int.from_bytes(word, "little") for word in words], dtype=torch.int64)


def unpack_state(words: torch.Tensor) -> Any:
    """What `pack_state` was given.

    Raises:
        CodecError: it is something else.
    """
    data = b"".join(int(word).to_bytes(WORD_BYTES, "little") for word in words.tolist())
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return codec.decode(json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + size]))


def advance(positions: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """Takes the positions of an entry; in place.

    Args:
        positions: int64[places, slots], before the step.
        reduced: the same shape, the sum over all groups.

    Returns:
        bool of the same shape, which streams were read.

    Raises:
        PositionsBroken: a slot was read from elsewhere, or twice.
    """
    read = reduced != 0
    wrong = read & (reduced != positions + 1)
    if bool(wrong.any()):
        place, slot = wrong.nonzero()[0].tolist()
        was, now = int(positions[place, slot]), int(reduced[place, slot])
        raise PositionsBroken(
            f"slot {slot} stood at item {was}, and stands at {now} in the next entry (place {place}): "
            "a stream was read from elsewhere, or twice"
        )
    positions[read] = reduced[read]
    return read
