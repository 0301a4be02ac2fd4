"""`StreamLoader`: iterable sources, one stream for each microbatch of a step.

As relay runners who agree where the baton lies: whoever runs a slot's next leg begins exactly where the last committed
leg ended, because every entry says where that was. A stream is moved on by its own state, if that travels too, else by
reading and throwing away; either costs time, and the cost is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightkeeper.data.positions import StateTooLarge, advance, pack_state, unpack_state, words_for
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.manager.watch import Watcher
from lightkeeper.words import counted, say

if TYPE_CHECKING:
    from lightkeeper.manager.step import Step
    from lightkeeper.manager.trainer import Manager

STATE_BYTES_MAX = 1 << 16
NEAR_ITEMS = 8  # a stream that is so few items behind reads on, though its state is here: opening sources costs too
SAY_EVERY_S = 10.0


class StreamEnded(ToldError):
    """A slot's stream has no further item, and the run has further steps."""


@dataclass
class _Reader:
    """A slot's stream as it is read here."""

    stream: Iterable[Any]
    items: Iterator[Any]
    at: int  # items read


@dataclass
class _Moved:
    """What it cost to take over slots, since a line said so."""

    since: int = -1
    slots: list[int] = field(default_factory=list)
    skipped: int = 0
    loaded: int = 0
    seconds: float = 0.0


class StreamLoader(Watcher):
    """Batches of iterable sources by (step, microbatch): microbatch k is the next item of slot k's stream.

    Which item that is follows from the committed steps alone, so none is lost and none is read twice, whoever dies or
    comes in. The streams of slots that this group does not read for a while stay where they are, open.

    Args:
        manager: of the loop; before its first step.
        make_stream: given a slot, a fresh iterable over its batches, the same ones in every group, without end (or at
            least as long as the run). Ranks of a group that split a microbatch make streams of their own parts, by
            `manager.place`.
        slots: microbatches of the largest step.
        state_bytes: if above 0, each stream's ``state_dict()`` travels with its position, in so many bytes of JSON, and
            a group that takes the slot over gives it to ``load_state_dict()`` of a fresh stream before it iterates over
            it, instead of reading what was read. Torchdata's `StatefulDataLoader` and Hugging Face's iterable data
            sets have both.
        name: of the extras and the state; another for a second loader.

    Raises:
        UsageError: for arguments that cannot be right.
    """

    def __init__(
        self,
        manager: Manager,
        make_stream: Callable[[int], Iterable[Any]],
        slots: int,
        *,
        state_bytes: int = 0,
        name: str = "stream",
    ) -> None:
        if slots < 1:
            raise UsageError(f"slots {slots}: the microbatches of the largest step, at least 1")
        if not 0 <= state_bytes <= STATE_BYTES_MAX:
            raise UsageError(f"state_bytes {state_bytes}: 0 (states do not travel) to {STATE_BYTES_MAX}")
        self._manager, self._make = manager, make_stream
        self._state_bytes, self._name = state_bytes, name
        self._readers: dict[int, _Reader] = {}
        self._read: dict[tuple[int, int], Any] = {}  # of the step at hand
        self._moved = _Moved()
        self._hinted = False
        self._said_s = 0.0
        self._slots, self._place = slots, manager.place.index
        self._positions = torch.zeros((manager.place.count, slots), dtype=torch.int64)
        self._states = torch.zeros((manager.place.count, slots, words_for(state_bytes)), dtype=torch.int64)
        manager.extra(f"{name} positions", tuple(self._positions.shape), torch.int64)
        manager.register(f"{name}-positions", self._positions)
        if state_bytes:
            manager.extra(f"{name} states", tuple(self._states.shape), torch.int64)
            manager.register(f"{name}-states", self._states)
        manager.watch(self)

    @property
    def positions(self) -> torch.Tensor:
        """Items that the committed steps have read from each slot's stream, at this rank's place: int64[slots]."""
        return self._positions[self._place].clone()

    # ------------------------------------------------------------ what the loop calls

    def batch(self, step: int, k: int) -> Any:
        """Microbatch `k` of the step at hand: the next item of slot k's stream.

        Raises:
            StreamEnded: if it has none.
            UsageError: for another step, a slot that there is not, or a state that does not fit.
        """
        if step != self._manager.page.step:
            raise UsageError(f"microbatch {k} of step {step} is asked for in step {self._manager.page.step}")
        if not 0 <= k < self._slots:
            raise UsageError(f"microbatch {k} of step {step}: there are {self._slots} slots")
        if (step, k) not in self._read:
            reader = self._at_position(k)
            try:
                item = next(reader.items)
            except StopIteration:
                raise StreamEnded(
                    f"the stream of slot {k} has ended after {reader.at} items, and step {step} needs one more"
                ) from None
            reader.at += 1
            self._say_where(k, reader)
            self._read[step, k] = item
        return self._read[step, k]

    def over(self, step: Step) -> Iterator[tuple[int, Any]]:
        """``for k, batch in loader.over(step)``: the microbatches of `step.microbatches()` with their batches."""
        for k in step.microbatches():
            yield k, self.batch(step.index, k)

    # ------------------------------------------------------------ what the manager tells

    def begins(self, index: int) -> None:
        """A step begins.

        Raises:
            UsageError: if it has more microbatches than there are slots; or fewer, as every step has: the others'
                streams would never be read.
        """
        total, steady = self._manager.total(index), self._manager.steady_total
        if total > self._slots or (steady is not None and steady != self._slots):
            raise UsageError(
                f"step {index} has {total} microbatches, and StreamLoader slots={self._slots}: give it as many slots "
                "as the largest step has microbatches"
            )

    def committed(self, index: int, reduced: Mapping[str, torch.Tensor]) -> None:
        """The entry says where the streams stand now."""
        read = advance(self._positions, reduced[f"{self._name} positions"])
        if self._state_bytes:
            self._states[read] = reduced[f"{self._name} states"][read]
        self._read.clear()
        self._tell_cost(index)

    # ------------------------------------------------------------ inside

    def _say_where(self, k: int, reader: _Reader) -> None:
        """Contributes where the slot's stream stands after this item."""
        at = torch.zeros_like(self._positions)
        at[self._place, k] = reader.at
        self._manager.contribute(f"{self._name} positions", at)
        if not self._state_bytes:
            return
        states = torch.zeros_like(self._states)
        try:
            states[self._place, k] = pack_state(reader.stream.state_dict(), self._state_bytes)  # type: ignore[attr-defined]
        except StateTooLarge as error:
            raise UsageError(f"the state of slot {k}'s stream has {error}: give StreamLoader more") from None
        self._manager.contribute(f"{self._name} states", states)

    def _at_position(self, k: int) -> _Reader:
        """The slot's stream, right after the last committed item."""
        reader, wanted = self._readers.get(k), int(self._positions[self._place, k])
        if reader is not None and reader.at == wanted:
            return reader
        start = time.monotonic()
        near = reader is not None and wanted - NEAR_ITEMS <= reader.at < wanted
        if reader is None or reader.at > wanted or (self._state_bytes and not near):
            reader = self._fresh(k, wanted)
        while reader.at < wanted:
            try:
                next(reader.items)
            except StopIteration:
                raise StreamEnded(
                    f"the stream of slot {k} has ended after {reader.at} items, and {wanted} were read from it before: "
                    "it is not the same in every group"
                ) from None
            reader.at += 1
            self._moved.skipped += 1
        self._readers[k] = reader
        if wanted:
            self._moved.slots.append(k)
            self._moved.seconds += time.monotonic() - start
        return reader

    def _fresh(self, k: int, wanted: int) -> _Reader:
        """A new stream, at its beginning or where its travelled state says."""
        stream, at = self._make(k), 0
        if self._state_bytes:
            if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
                raise UsageError(f"state_bytes is given, and slot {k}'s {type(stream).__name__} has no state_dict")
            if wanted:
                stream.load_state_dict(unpack_state(self._states[self._place, k]))
                self._moved.loaded += 1
                at = wanted
        return _Reader(stream, iter(stream), at)

    def _tell_cost(self, index: int) -> None:
        """A line for what was taken over; what follows soon after is summed up."""
        moved = self._moved
        if not moved.slots:
            return
        moved.since = index if moved.since < 0 else moved.since
        if self._said_s and time.monotonic() - self._said_s < SAY_EVERY_S:
            return
        self._moved, self._said_s = _Moved(), time.monotonic()
        slots = list(dict.fromkeys(moved.slots))
        which = ", ".join(map(str, slots[:8])) + (", ..." if len(slots) > 8 else "")
        s = "" if len(slots) == 1 else "s"
        when = f"step {index}" if moved.since == index else f"steps {moved.since} to {index}"
        line = (
            f"{when}: took over the stream{s} of slot{s} {which}: {counted(moved.skipped, 'item')} read again and "
            f"thrown away, {counted(moved.loaded, 'state')} loaded, {moved.seconds:.2f} s"
        )
        if moved.skipped > NEAR_ITEMS and hasattr(self._readers[slots[0]].stream, "state_dict") and not self._hinted:
            self._hinted = self._state_bytes == 0
            line += "; they have a state_dict: state_bytes would spare that" if self._hinted else ""
        say(f"lightkeeper: {line}")
