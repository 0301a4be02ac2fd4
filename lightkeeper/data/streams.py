"""`StreamLoader`: iterable sources, one stream for each microbatch of a step.

As relay runners who agree where the baton lies: whoever runs a slot's next leg begins exactly where the last committed
leg ended, because every entry says where that was. A stream is moved on by the newest of its own states that travelled,
if they do, and then by reading and throwing away; either costs time, and the cost is said. A state that is too large
for its place in the entry does not travel: that makes an heir slower, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightkeeper.data.positions import Turns, advance
from lightkeeper.data.states import (
    STATE_BYTES_MAX,
    StateTooLarge,
    holds_state,
    pack_state,
    packed_of,
    unpack_state,
    words_for,
    words_of,
)
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.manager.extras import ELEMENTS_MAX
from lightkeeper.manager.state.codec import StateRefused
from lightkeeper.manager.watch import Watcher
from lightkeeper.words import counted, say

if TYPE_CHECKING:
    from lightkeeper.manager.step import Step
    from lightkeeper.manager.trainer import Manager

NEAR_ITEMS = 8  # a stream reads on, though a state is here that is so few items further: opening sources costs too
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
        state_bytes: if above 0, each stream's ``state_dict()`` travels with its position, in at most so many bytes
            (packed: `states.py`), and a group that takes the slot over gives it to ``load_state_dict()`` of a fresh
            stream before it iterates over it, instead of reading what was read. Torchdata's `StatefulDataLoader` and
            Hugging Face's iterable data sets have both. A state that is larger does not travel: then the heir reads on
            from the last one that did.
        state_every: the state of a stream travels in every so many steps: the more, the less there is in an entry, and
            the more items an heir reads again.
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
        state_every: int = 1,
        name: str = "stream",
    ) -> None:
        places = manager.place.count
        self._turns = Turns(places, slots, state_every)
        _check(self._turns, state_bytes)
        self._manager, self._make = manager, make_stream
        self._state_bytes, self._name = state_bytes, name
        self._readers: dict[int, _Reader] = {}
        self._read: dict[tuple[int, int], Any] = {}  # of the step at hand
        self._moved = _Moved()
        self._hinted = False
        self._said_s = 0.0
        self._told_too_large = False
        self._slots, self._place = slots, manager.place.index
        self._positions = torch.zeros((places, slots), dtype=torch.int64)
        self._states = torch.zeros((slots, words_for(state_bytes)), dtype=torch.int64)
        self._states_at = torch.zeros(slots, dtype=torch.int64)  # items that were read when the state was taken
        manager.extra(f"{name} positions", tuple(self._positions.shape), torch.int64)
        manager.register(f"{name}-positions", self._positions)
        if state_bytes:
            manager.extra(f"{name} states", (self._turns.columns, words_for(state_bytes)), torch.int64)
            manager.register(f"{name}-states", self._states)
            manager.register(f"{name}-states-at", self._states_at)
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
            UsageError: for another step, or a slot that there is not.
        """
        if not self.has(step, k):
            raise StreamEnded(
                f"the stream of slot {k} has ended after {self._readers[k].at} items, and step {step} needs one more"
            )
        return self._read[step, k]

    def has(self, step: int, k: int) -> bool:
        """Whether there is a microbatch `k` of the step at hand: reads it, and keeps it for `batch`.

        Every group finds the same, so a run whose data ends can end well: `manager.cancel`, in `docs/data.md`.

        Raises:
            UsageError: for another step, or a slot that there is not.
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
                return False
            reader.at += 1
            self._say_where(k, reader)
            self._read[step, k] = item
        return True

    def over(self, step: Step) -> Iterator[tuple[int, Any]]:
        """``for k, batch in loader.over(step)``: the microbatches of `step.microbatches()` with their batches."""
        for k in step.microbatches():
            yield k, self.batch(step.index, k)

    def advice(self, size: int) -> str:
        """The end of the line about a state of `size` bytes that is too large: what to give."""
        return f", or give StreamLoader state_bytes={size}" if size <= STATE_BYTES_MAX else ""

    # ------------------------------------------------------------ on disk

    def state_dict(self) -> dict[str, Any]:
        """Where all streams stand after the committed steps, and the states of this rank's place that travelled."""
        at = self._states_at.tolist()
        states = [[k, at[k], packed_of(self._states[k])] for k in range(self._slots) if at[k]]
        return {"positions": self._positions.tolist(), "place": self._place, "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; before the first step, in every group that begins the run.

        Raises:
            UsageError: it is of another number of slots or of places.
        """
        positions = torch.tensor(state["positions"], dtype=torch.int64)
        for what, found, here in (
            ("slots (microbatches of a step)", positions.shape[1], self._slots),
            ("places (data-parallel ranks of a group)", positions.shape[0], len(self._positions)),
        ):
            if found != here:
                raise UsageError(f"the state of the data streams is of {found} {what}, and here there are {here}")
        self._positions.copy_(positions)
        self._states.zero_()
        self._states_at.zero_()
        for k, at, data in state["states"] if state["place"] == self._place else ():
            if self._state_bytes >= len(data):
                self._states[k], self._states_at[k] = words_of(data, self._state_bytes), at
        self._readers.clear()
        self._read.clear()

    # ------------------------------------------------------------ what the manager tells

    def healed(self) -> None:
        """What was read of a step that is done anew is read anew: what was said about it is void."""
        self._read.clear()

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
        read = advance(self._positions, reduced[f"{self._name} positions"])[self._place]
        if self._state_bytes:
            for k in read.nonzero().flatten().tolist():
                self._take_state(index, k, reduced[f"{self._name} states"])
        self._read.clear()
        self._tell_cost(index)

    # ------------------------------------------------------------ inside

    def _say_where(self, k: int, reader: _Reader) -> None:
        """Contributes where the slot's stream stands after this item."""
        at = torch.zeros_like(self._positions)
        at[self._place, k] = reader.at
        self._manager.contribute(f"{self._name} positions", at)
        column = self._turns.column(self._manager.page.step, self._place, k) if self._state_bytes else None
        if column is None:
            return
        try:
            state = pack_state(reader.stream.state_dict(), self._state_bytes)  # type: ignore[attr-defined]
        except (StateTooLarge, StateRefused) as error:
            self._tell_left_behind(k, error)
            return
        states = torch.zeros((self._turns.columns, *state.shape), dtype=torch.int64)
        states[column] = state
        self._manager.contribute(f"{self._name} states", states)

    def _take_state(self, index: int, k: int, states: torch.Tensor) -> None:
        """Keeps the state of a stream that was read in this entry, if it travelled."""
        column = self._turns.column(index, self._place, k)
        if column is not None and holds_state(states[column]):
            self._states[k] = states[column]
            self._states_at[k] = self._positions[self._place, k]

    def _tell_left_behind(self, k: int, error: StateTooLarge | StateRefused) -> None:
        """Once: a state that does not travel is no fault, and may be none of the next one."""
        if self._told_too_large:
            return
        self._told_too_large = True
        what = f"the state of slot {k}'s stream does not travel"
        then = "a group that takes the slot over reads on from the last state that did"
        if isinstance(error, StateTooLarge):
            say(f"lightkeeper: {what}: it has {error}; {then}{self.advice(error.size)}")
        else:
            say(f"lightkeeper: {what}: {error}; {then}")

    def _at_position(self, k: int) -> _Reader:
        """The slot's stream, right after the last committed item."""
        reader, wanted = self._readers.get(k), int(self._positions[self._place, k])
        if reader is not None and reader.at == wanted:
            return reader
        start = time.monotonic()
        if reader is None or reader.at > wanted or reader.at + NEAR_ITEMS < int(self._states_at[k]):
            reader = self._fresh(k)
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

    def _fresh(self, k: int) -> _Reader:
        """A new stream, at its beginning or where the newest state that travelled says."""
        stream, at = self._make(k), int(self._states_at[k])
        if self._state_bytes and not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
            raise UsageError(f"state_bytes is given, and slot {k}'s {type(stream).__name__} has no state_dict")
        if at:
            stream.load_state_dict(unpack_state(self._states[k]))  # type: ignore[attr-defined]
            self._moved.loaded += 1
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


def _check(turns: Turns, state_bytes: int) -> None:
    """Refuses arguments that cannot be right."""
    if turns.slots < 1:
        raise UsageError(f"slots {turns.slots}: the microbatches of the largest step, at least 1")
    if not 0 <= state_bytes <= STATE_BYTES_MAX:
        raise UsageError(f"state_bytes {state_bytes}: 0 (states do not travel) to {STATE_BYTES_MAX}")
    if turns.every < 1:
        raise UsageError(f"state_every {turns.every}: steps between two states of a stream, at least 1")
    numel = turns.columns * words_for(state_bytes)
    if numel > ELEMENTS_MAX:
        raise UsageError(
            f"state_bytes {state_bytes} for {turns.places * turns.slots} streams makes {numel} elements of every "
            f"entry, which has room for {ELEMENTS_MAX}: give StreamLoader less, or "
            f"state_every={every_for(turns, state_bytes)}"
        )


def every_for(turns: Turns, state_bytes: int, numel: int = ELEMENTS_MAX // 2) -> int:
    """The smallest `state_every` with which the states are at most so many elements of an entry."""
    columns = max(1, numel // max(1, words_for(state_bytes)))
    return max(1, -(-turns.places * turns.slots // columns))
