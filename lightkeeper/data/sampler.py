"""Dealing samples: microbatch k of step s holds the same samples whoever computes it, whenever, and how
often.

The samples are laid out as one endless row: the data set in a seeded order, then again in another order, and
so on. Step s starts where the steps before it ended, so a run resumes from its step number alone, and a
microbatch that is dealt to another group is the same microbatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightkeeper.data.permutation import mix, permuted

Microbatches = int | Callable[[int], int]


@dataclass
class Schedule:
    """How many microbatches a step has: a constant, or a pure function of the step (a batch ramp).

    A function is called once per step, in order; the sums are kept (8 bytes a step).

    Args:
        microbatches: M, or a function from the step to M. At least 1.
    """

    microbatches: Microbatches
    _before: list[int] = field(default_factory=lambda: [0], repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def of(self, step: int) -> int:
        """M of this step.

        Raises:
            ValueError: the step is negative, or M is not at least 1.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        count = self.microbatches if isinstance(self.microbatches, int) else self.microbatches(step)
        if count < 1:
            raise ValueError(f"step {step} has {count} microbatches, at least 1 is needed")
        return count

    def before(self, step: int) -> int:
        """Number of microbatches in all steps before this one."""
        if isinstance(self.microbatches, int):
            return self.of(step) * step
        with self._lock:
            while len(self._before) <= step:
                self._before.append(self._before[-1] + self.of(len(self._before) - 1))
            return self._before[step]


def samples(
    seed: int,
    step: int,
    k: int,
    microbatches: Microbatches | Schedule,
    size: int,
    n: int,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> NDArray[np.int64]:
    """Which samples microbatch k of a step holds.

    Without replacement: every sample stands once in each pass over the data, also where a microbatch spans
    the end of one pass and the start of the next.

    Args:
        seed: seed of the data order.
        step: index of the step.
        k: index of the microbatch within the step, 0 to M-1.
        microbatches: M, a function from the step to M, or a `Schedule` (which keeps the sums of a function).
        size: samples in a microbatch.
        n: samples in the data set.
        rank: place among the group's data-parallel ranks, which split the microbatch.
        world_size: number of these ranks; must divide `size`.

    Returns:
        int64 of shape [size / world_size], each within 0..n-1.

    Raises:
        ValueError: an argument is out of range.
    """
    schedule = microbatches if isinstance(microbatches, Schedule) else Schedule(microbatches)
    if not 0 <= k < schedule.of(step):
        raise ValueError(f"step {step} has microbatches 0..{schedule.of(step) - 1}, got {k}")
    for name, value in (("size", size), ("n", n)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if world_size < 1 or size % world_size or not 0 <= rank < world_size:
        raise ValueError(f"{world_size} ranks cannot split a microbatch of {size} (rank {rank})")
    part = size // world_size
    start = (schedule.before(step) + k) * size + rank * part
    found = np.empty(part, dtype=np.int64)
    filled = 0
    while filled < part:  # once, unless the microbatch spans passes over the data
        data_epoch, place = divmod(start + filled, n)
        take = min(part - filled, n - place)
        places = np.arange(place, place + take, dtype=np.int64)
        found[filled : filled + take] = permuted(_epoch_seed(seed, data_epoch), places, n)
        filled += take
    return found


def _epoch_seed(seed: int, data_epoch: int) -> int:
    """Another order in each pass over the data; `data_epoch` is not mixed up with neighbouring seeds."""
    return (seed << 64) | mix(data_epoch)


@dataclass(frozen=True)
class DealtSampler:
    """`samples` with all but step and microbatch filled in.

    Attributes:
        n: samples in the data set.
        size: samples in a microbatch.
        microbatches: M, or a function from the step to M.
        seed: seed of the data order.
        rank: place among the group's data-parallel ranks.
        world_size: number of these ranks.
    """

    n: int
    size: int
    microbatches: Microbatches
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    schedule: Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", Schedule(self.microbatches))

    def __call__(self, step: int, k: int) -> NDArray[np.int64]:
        """Samples of microbatch k of a step: int64 of shape [size / world_size]."""
        return samples(self.seed, step, k, self.schedule, self.size, self.n, rank=self.rank, world_size=self.world_size)

    def consumed_before(self, step: int) -> int:
        """Samples in all steps before this one, over all groups."""
        return self.schedule.before(step) * self.size

    def data_epoch(self, step: int) -> float:
        """How many passes over the data have been made when a step starts."""
        return self.consumed_before(step) / self.n
