"""A seeded permutation of 0..n-1 that is computed at one place at a time, without a list of n numbers.

Shuffling a list needs memory for all n samples and, to resume in the middle, the whole list again. Here the
sample at position p is computed from (seed, p) alone: a Feistel network permutes the smallest power of four
that is at least n, and a result outside 0..n-1 is permuted again until it is inside ("cycle walking"). Both
ideas: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. The power of four is
less than 4n, so a position takes under four walks on average.

The rounds mix with the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014). This is for shuffling, not for secrets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
N_MAX = 1 << 62

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well mixed bits out."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def round_keys(seed: int) -> list[int]:
    """One 64-bit key per round. Any Python integer is a seed; all of its bits count."""
    state = mix(len(seed.to_bytes((seed.bit_length() + 8) // 8, "little", signed=True)))
    for piece in _words(seed):
        state = mix(state ^ piece)
    keys = []
    for _ in range(ROUNDS):
        state = mix(state)
        keys.append(state)
    return keys


def _words(seed: int) -> list[int]:
    data = seed.to_bytes((seed.bit_length() + 8) // 8, "little", signed=True)
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def permuted(seed: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """What stands at these positions of the seed's permutation of 0..n-1.

    Args:
        seed: any integer.
        positions: int64, any shape, each within 0..n-1.
        n: size of the permutation, 1 to 2^62.

    Returns:
        int64, same shape, each within 0..n-1; different positions give different results.

    Raises:
        ValueError: n or a position is out of range.
    """
    if not 1 <= n <= N_MAX:
        raise ValueError(f"n must be within 1..2^62, got {n}")
    places = np.asarray(positions, dtype=np.int64)
    if places.size and (int(places.min()) < 0 or int(places.max()) >= n):
        raise ValueError(f"positions must be within 0..{n - 1}")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = round_keys(seed)
    values = _feistel(places.reshape(-1).astype(np.uint64), half_bits, keys)
    outside = values >= np.uint64(n)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= np.uint64(n)
    return values.astype(np.int64).reshape(places.shape)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A permutation of 0..4^half_bits - 1, whatever the round function is."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix_all(right ^ np.uint64(key)) & mask)
    return np.asarray((left << shift) | right)
