"""What a rank holds: its state as the chain of the entries applied, and a reduced gradient under its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightkeeper.lighthouse.names import Entry, origin

BEFORE = -1  # the reduce at a step's start, where others have the number of a bucket
UNNAMED = origin(0)


class Part(NamedTuple):
    """What a member puts into a reduce: own microbatches, ready flag, whether a gradient came late, its state.

    Attributes:
        before: the before extras that it has, 0 for none.
        used: those that its microbatches were computed with.
    """

    microbatches: tuple[int, ...]
    ready: int
    again: bool
    state: State
    before: int = 0
    used: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What a reduce gives to every member alike: an entry.

    Attributes:
        serial: of the reduce that made it: one number, one set of bits.
        microbatches: (group, microbatch) of all parts.
        ready: the prepared epoch whose flag every member carried, else 0.
        again: whether a member's part was incomplete.
        base: bits of the states of those who put in their parts.
        before: what the before extras are.
    """

    name: Entry
    serial: int
    microbatches: tuple[tuple[str, int], ...]
    ready: int
    again: bool
    base: int
    before: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Weights and optimizer after an entry. Equal `bits` are equal weights.

    Attributes:
        step: the step applied last, -1 before the first.
        name: the name of its entry; an `origin` if it was loaded.
    """

    step: int
    name: Entry
    bits: int
    before: State | None = None


START = State(-1, UNNAMED, 0)


class Arithmetic:
    """Applying an entry: the same bits from the same bits, and from nothing else."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, int], int] = {}

    def apply(self, state: State, entry: Reduced) -> State:
        """The state after the entry."""
        bits = self._bits.setdefault((state.bits, entry.serial), len(self._bits) + 1)
        return State(entry.name.step, entry.name, bits, state)
