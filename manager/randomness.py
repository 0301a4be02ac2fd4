"""Random state that depends on where training stands, and on nothing that happened before.

A microbatch that is computed again, by another group, draws the same numbers; and so does the apply phase in
every group and at every replay. The seed is xxh3_64 over five little-endian 64-bit integers: which of the
uses it is, the user's seed, step, microbatch and place (or sample). Ranks of one place (tensor-parallel ones) see the
same activations, so they need the same masks; and what follows the inner loop draws alike on all ranks of a group,
because some of them hold the same parameters (decision 0014).
"""

from __future__ import annotations

import random
import struct
import sys

import torch
import xxhash

_MICROBATCH, _APPLY, _SAMPLE = 1, 2, 3
COLLATE = -1  # in place of a sample's number: what puts the samples together


def seed_microbatch(seed: int, step: int, k: int, place: int) -> None:
    """Set all random state for this rank's part, number `place`, of microbatch `k` of `step`."""
    _seed_all(derive(_MICROBATCH, seed, step, k, place))


def seed_apply(seed: int, step: int) -> None:
    """Set all random state for what follows the inner loop of `step`."""
    _seed_all(derive(_APPLY, seed, step, 0, 0))


def seed_sample(seed: int, step: int, k: int, number: int) -> None:
    """Set all random state for a sample, by its number in microbatch `k`, whoever reads it and whoever splits that."""
    _seed_all(derive(_SAMPLE, seed, step, k, number), devices=False)


def derive(use: int, seed: int, step: int, k: int, place: int) -> int:
    """A 64-bit seed; the arguments count modulo 2**64."""
    mask = (1 << 64) - 1
    return xxhash.xxh3_64_intdigest(struct.pack("<5Q", *(x & mask for x in (use, seed, step, k, place))))


def _seed_all(value: int, devices: bool = True) -> None:
    """Seed torch (CPU, and CUDA if it is in use and meant), `random`, and numpy if it has been imported."""
    torch.default_generator.manual_seed(value)
    if devices and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
