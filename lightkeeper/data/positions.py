"""Where each slot's stream stands, as numbers that travel in the entries: pure, no streams.

Every step, whoever read from a slot's stream adds where it stands then; nobody else adds anything to that slot, so the
sum over all groups is what the one reader said. A slot that was not read in a step has the sum 0, and stands where it
stood. Where the ranks of a group split microbatches, each place in a microbatch has streams of its own, and a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class PositionsBroken(RuntimeError):
    """An entry does not fit the positions before it: some group read a stream from elsewhere. A bug."""


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


@dataclass(frozen=True)
class Turns:
    """In which steps which stream's state travels, and where in the entry: the same few columns serve them in turn.

    With E = `every` a stream is due in every E-th step, and never two streams of one column in the same step. So an
    entry has a column for each E streams, and an heir reads again at most what was read in E - 1 steps. (A slot that a
    batch ramp leaves out in its turn waits for the next one.)

    Attributes:
        places: data-parallel ranks of a group, each with streams of its own.
        slots: microbatches of the largest step.
        every: steps between two states of a stream, 1 for a state in every step.
    """

    places: int
    slots: int
    every: int

    @property
    def columns(self) -> int:
        """States that an entry has room for."""
        return -(-self.places * self.slots // self.every)

    def column(self, step: int, place: int, slot: int) -> int | None:
        """Where the state of a stream is in the entry of a step; None if it is not its turn."""
        stream = place * self.slots + slot
        return stream // self.every if (stream + step) % self.every == 0 else None
