"""What this rank holds for its peers: the newest entry for one that missed it; a copy of the state, and the entries
after it, for one that joins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightkeeper.lighthouse.names import Entry, Epoch, Term, origin
from lightkeeper.manager import local
from lightkeeper.manager.groups import Note
from lightkeeper.manager.history import EntryHistory
from lightkeeper.manager.reducer import EntryGone, Outcome, Reducer
from lightkeeper.manager.state.registry import UNNAMED, StateRefused, StateRegistry
from lightkeeper.manager.state.snapshot import Copy, SnapshotFailed, Snapshotter
from lightkeeper.manager.transfer.client import fetch_entry
from lightkeeper.manager.transfer.provider import HealProvider
from lightkeeper.manager.transfer.server import Refused, TransferServer


class EntryHolder:
    """Serves what the reducer holds, under its name.

    Args:
        token: the job's token.
        host: address at which peers reach this node.
        timeout_s: bound on one transfer, and on a peer's wait for an entry that is being committed here.
        note: told one line about every connection that was turned away, and about copies that failed.
        registry: what a copy of the state holds.
        history_bytes: bound on the entries kept for joiners.
    """

    def __init__(
        self, token: str, host: str, timeout_s: float, note: Note, registry: StateRegistry, history_bytes: int
    ) -> None:
        self._token, self._timeout_s, self._note = token, timeout_s, note
        self._snapshotter = Snapshotter(registry)
        self._history = EntryHistory(history_bytes)
        self._copy: Copy | None = None
        self._keeps = self._wanted = False
        self._held = threading.Condition()
        self._name: Entry | None = None
        self._reducer: Reducer | None = None
        provider = HealProvider(self._snapshotter, self._history, self._provide, copy_timeout_s=timeout_s)
        self._server = TransferServer(token, provider, note, host=host, timeout_s=timeout_s)
        self.address = self._server.address

    def serve(self, reducer: Reducer) -> None:
        """Serves this reducer's entries from now on."""
        self._reducer = reducer

    @property
    def newest(self) -> Entry:
        """Name of the newest entry in this rank's state."""
        return self._name or UNNAMED

    def committed(self, name: Entry) -> None:
        """The reducer's newest committed entry has this name; it is kept as well, if somebody joins."""
        with self._held:
            predecessor, self._name = self.newest, name
            self._held.notify_all()
        if self._keeps and self._reducer is not None:
            self._history.keep(name, predecessor, self._reducer.entry())
        else:
            self._history.passed(name)

    def starts(self, step: int) -> None:
        """The state was made elsewhere, and has so many steps behind it."""
        self.healed(origin(step))

    def healed(self, name: Entry) -> None:
        """The state was replaced by one whose newest entry has this name."""
        with self._held:
            self._name = None if name == UNNAMED else name

    # ------------------------------------------------------------ for joiners

    def touch(self) -> None:
        """A copy is wanted at a boundary ahead; called by the listening thread."""
        self._wanted = True

    def ready(self) -> None:
        """At a step boundary: what is held of an earlier one is dropped, and memory is allocated in the background."""
        if self._wanted:
            self._wanted, self._keeps = False, False
            try:
                nbytes = self._snapshotter.size()
            except StateRefused as error:
                self._note(f"no copy for a joiner: {error}")
                return
            threading.Thread(target=self._touch, args=(nbytes,), name="touch", daemon=True).start()

    def copy(self) -> bool:
        """Begins to copy the state, at a step boundary; what is committed from here on is kept too."""
        try:
            self._copy = self._snapshotter.begin(self.newest)
        except StateRefused as error:
            self._note(f"no copy for a joiner: {error}")
            return False
        self._keeps = True
        return True

    def settle(self) -> None:
        """Waits until the copy under way is made: the state is about to change."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        try:
            copy.wait()
        except SnapshotFailed as error:
            self._note(f"no copy for a joiner: {error}")

    def release(self) -> None:
        """Nobody joins any more."""
        self._keeps = self._wanted = False
        threading.Thread(target=self._release, name="release", daemon=True).start()

    def fetch(self, adopt: local.Adopt, reducer: Reducer) -> Outcome:
        """Reads a peer's entry into the reducer's buffers.

        Raises:
            TransferFailed: if it cannot be had whole; the local sums are untouched.
        """
        fetch_entry(adopt.address, self._token, entry_of(adopt), reducer.pending_buffers(), self._timeout_s)
        return reducer.adopt()

    def close(self) -> None:
        """Stops listening."""
        self._history.stop()
        self._server.close()

    def _touch(self, nbytes: int) -> None:
        self._release()
        if self._reducer is not None:
            self._history.reserve(self._reducer.like_entry())
        try:
            self._snapshotter.reserve(nbytes)
        except SnapshotFailed as error:
            self._note(f"no memory for a joiner's copy: {error}")

    def _release(self) -> None:
        self._snapshotter.release()
        self._history.clear()

    @contextmanager
    def _provide(self, name: Entry) -> Iterator[Sequence[torch.Tensor]]:
        with self._held:
            self._held.wait_for(lambda: self._name is not None and self._name.step >= name.step, self._timeout_s)
            if self._name != name or self._reducer is None:
                raise Refused(f"{name} is not held here; the newest is {self._name or 'none'}")
        try:
            yield self._reducer.entry()
        except EntryGone as error:
            raise Refused(str(error)) from error


def entry_of(adopt: local.Adopt) -> Entry:
    """The entry's full name."""
    return Entry(Epoch(adopt.epoch, Term(adopt.term, adopt.lighthouse)), adopt.step)


def entry_in(plan: local.Plan, step: int) -> Entry:
    """The name of the entry of `step` if it is reduced in the plan's epoch."""
    return Entry(Epoch(plan.epoch, Term(plan.term, plan.lighthouse)), step)
