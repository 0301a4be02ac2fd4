"""Copies of the whole state for those who save it: made once at a boundary, held until the last of them is done."""

from __future__ import annotations

import threading
import time

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.snapshot import Copy, Snapshot, SnapshotFailed, Snapshotter


class Held:
    """A copy, and how many still need it."""

    def __init__(self, snapshotter: Snapshotter, copy: Copy, users: int) -> None:
        self.copy = copy
        self.stood_s = 0.0  # for which the training thread stood for it
        self._snapshotter, self._users = snapshotter, users
        self._lock = threading.Lock()

    def take(self) -> Snapshot:
        """The copy, once it is made.

        Raises:
            SnapshotFailed: there is none.
        """
        return self.copy.wait()

    def give_back(self) -> None:
        """One of them is done."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._snapshotter.release(self.copy.name)


class Copies:
    """Copies a registry's state at step boundaries.

    Args:
        registry: whose state it is.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self._snapshotter = Snapshotter(registry)
        self._under_way: list[Held] = []

    def begin(self, name: Entry, users: int) -> Held:
        """Begins to copy; on the training thread, at a step boundary.

        Raises:
            StateRefused: something that cannot be copied exactly came into the state.
        """
        began = time.monotonic()
        held = Held(self._snapshotter, self._snapshotter.begin(name), users)
        held.stood_s = time.monotonic() - began
        self._under_way.append(held)
        return held

    def settle(self) -> None:
        """Waits until all is copied: the state is about to change."""
        while self._under_way:
            held, began = self._under_way.pop(), time.monotonic()
            try:
                held.copy.wait()
            except SnapshotFailed:
                pass  # who takes it is told
            held.stood_s += time.monotonic() - began
