"""What a rank holds for its peers: the newest entry, a copy of its state, and the entries after it.

A model of ``manager/entries.py`` and ``manager/history.py``, with names in the place of tensors.
"""

from __future__ import annotations

from lightkeeper.lighthouse.names import Entry
from lightkeeper.simulator.state import Reduced, State


class Never(Exception):
    """What was asked for will never be had here."""


class Holder:
    """What one rank serves.

    Attributes:
        newest: the entry applied last, until the next one's first bucket is reduced into its memory.
        copy: the copy of the state, if it is made; its name is that of its newest entry.
        wanted: whether a copy is wanted at a boundary ahead.
    """

    def __init__(self, kept_max: int) -> None:
        self.newest: Reduced | None = None
        self.copy: State | None = None
        self.wanted = False
        self.stopped = False
        self._kept_max = kept_max
        self._keeps = False
        self._kept: dict[Entry, Reduced] = {}  # by the name of the predecessor, oldest first
        self._last: Entry | None = None  # the newest that was kept, or passed by

    def committed(self, entry: Reduced, predecessor: Entry) -> None:
        """An entry was applied on `predecessor`; it is kept as well, if somebody joins."""
        self.newest = entry
        if self._keeps:
            if self._last is not None and self._last != predecessor:
                self._kept.clear()  # a new chain: what was before leads nowhere
            self._kept[predecessor] = entry
            while len(self._kept) > self._kept_max:
                self._kept.pop(next(iter(self._kept)))
        elif self._last != entry.name:
            self._kept.clear()
        self._last = entry.name

    def overwritten(self) -> None:
        """The first bucket of the next step is reduced: the others follow into the newest entry's memory."""
        self.newest = None

    def entry(self, name: Entry) -> Reduced:
        """The entry of this name.

        Raises:
            Never: if it is not held.
        """
        for kept in self._kept.values():
            if kept.name == name:
                return kept
        if self.newest is None or self.newest.name != name:
            raise Never(f"{name} is not held here")
        return self.newest

    def at_boundary(self) -> None:
        """A step's body has ended: if a copy is wanted ahead, what is held of an earlier one is dropped."""
        if self.wanted:
            self.wanted = self._keeps = False
            self.copy = None
            self._kept.clear()

    def make_copy(self, state: State) -> None:
        """Copies the state; what is committed from here on is kept."""
        self.copy, self._keeps = state, True

    def release(self) -> None:
        """Nobody joins any more."""
        self.copy, self._keeps, self.wanted = None, False, False
        self._kept.clear()

    def after(self, name: Entry) -> Reduced | None:
        """The entry whose predecessor is `name`; None if it may still come.

        Raises:
            Never: if it will not.
        """
        entry = self._kept.get(name)
        if entry is not None:
            return entry
        last = self._last
        if last is None or last == name or last.step < name.step:
            if self.stopped:
                raise Never(f"the entry after {name} will not come: this donor stops")
            return None
        raise Never(f"no entry here follows {name}: this donor went on to {last}")
