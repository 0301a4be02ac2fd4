"""Random state that depends on where training stands, and on nothing that happened before.

A microbatch that is computed again, by another group, draws the same numbers; and so does the apply phase in
every group and at every replay. The seed is xxh3_64 over five little-endian 64-bit integers: which of the two
uses it is, the user's seed, step, microbatch and rank.
"""

from __future__ import annotations

import random
import struct
import sys

import torch
import xxhash

_MICROBATCH, _APPLY = 1, 2


def seed_microbatch(seed: int, step: int, k: int, rank: int) -> None:
    """Set all random state for microbatch `k` of `step` on `rank` (the rank's place in its group)."""
    _seed_all(derive(_MICROBATCH, seed, step, k, rank))


def seed_apply(seed: int, step: int, rank: int) -> None:
    """Set all random state for what follows the inner loop of `step`."""
    _seed_all(derive(_APPLY, seed, step, 0, rank))


def derive(use: int, seed: int, step: int, k: int, rank: int) -> int:
    """A 64-bit seed; the arguments count modulo 2**64."""
    mask = (1 << 64) - 1
    return xxhash.xxh3_64_intdigest(struct.pack("<5Q", *(x & mask for x in (use, seed, step, k, rank))))


def _seed_all(value: int) -> None:
    """Seed torch (CPU, and CUDA if it is in use), `random`, and numpy if it has been imported."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
