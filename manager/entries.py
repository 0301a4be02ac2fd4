"""The newest committed entry of this rank, held for a peer that missed it; and fetching one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager import local
from lightkeeper.manager.groups import Note
from lightkeeper.manager.reducer import EntryGone, Outcome, Reducer
from lightkeeper.manager.transfer.client import fetch_entry
from lightkeeper.manager.transfer.server import EntryServer, Refused


class EntryHolder:
    """Serves what the reducer holds, under its name.

    Args:
        token: the job's token.
        host: address at which peers reach this node.
        timeout_s: bound on one transfer, and on a peer's wait for an entry that is being committed here.
        refused: told one line about every connection that was turned away.
    """

    def __init__(self, token: str, host: str, timeout_s: float, refused: Note) -> None:
        self._token, self._timeout_s = token, timeout_s
        self._held = threading.Condition()
        self._name: Entry | None = None
        self._reducer: Reducer | None = None
        self._server = EntryServer(token, self._provide, refused, host=host, timeout_s=timeout_s)
        self.address = self._server.address

    def serve(self, reducer: Reducer) -> None:
        """Serves this reducer's entries from now on."""
        self._reducer = reducer

    def committed(self, name: Entry) -> None:
        """The reducer's newest committed entry has this name."""
        with self._held:
            self._name = name
            self._held.notify_all()

    def fetch(self, adopt: local.Adopt, reducer: Reducer) -> Outcome:
        """Reads a peer's entry into the reducer's buffers.

        Raises:
            TransferFailed: if it cannot be had whole; the local sums are untouched.
        """
        fetch_entry(adopt.address, self._token, entry_of(adopt), reducer.pending_buffers(), self._timeout_s)
        return reducer.adopt()

    def close(self) -> None:
        """Stops listening."""
        self._server.close()

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
