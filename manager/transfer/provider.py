"""What a rank can serve to its peers, apart from how it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.history import EntryHistory, EntryUnavailable
from lightkeeper.manager.state.snapshot import Snapshot, SnapshotFailed, Snapshotter

RefusalKind: TypeAlias = Literal["refused", "not yet", "never"]


class Refused(Exception):
    """What was asked for is not served; one line says why.

    Attributes:
        kind: "not yet" if it may be asked for again, "never" if who needs it must start over.
    """

    def __init__(self, message: str, kind: RefusalKind = "refused") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Successor:
    """The entry that follows another: its name, and its tensors, buckets first and extras last."""

    name: Entry
    tensors: Sequence[torch.Tensor]


class Provider:
    """Gives what is served, unchanged until the context is left; every method may raise `Refused` on entering.

    A provider serves what it overrides.
    """

    def entry(self, name: Entry) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """The tensors of this entry."""
        raise Refused(f"{name} is not held here")

    def after(self, name: Entry, timeout_s: float) -> AbstractContextManager[Successor]:
        """The entry that follows `name`; waits for it."""
        raise Refused(f"no entry after {name} is kept here")

    def snapshot(self, name: Entry | None) -> AbstractContextManager[Snapshot]:
        """The snapshot of this name, or the newest; waits for one that is being copied."""
        raise Refused("no snapshot is held here")


EntryProvider: TypeAlias = Callable[[Entry], AbstractContextManager[Sequence[torch.Tensor]]]


class HealProvider(Provider):
    """Serves a rank's snapshots, the entries after them, and its newest entry.

    Args:
        snapshotter: Holds the snapshots; None to serve none.
        history: Holds the entries; None to serve none.
        entry: Gives the newest entry; None to serve those of `history` only.
        copy_timeout_s: Bound on the wait for a snapshot that is being copied, in seconds.
    """

    def __init__(
        self,
        snapshotter: Snapshotter | None = None,
        history: EntryHistory | None = None,
        entry: EntryProvider | None = None,
        copy_timeout_s: float = 30.0,
    ) -> None:
        self._snapshotter = snapshotter
        self._history = history
        self._entry = entry
        self._copy_timeout_s = copy_timeout_s

    @contextmanager
    def entry(self, name: Entry) -> Iterator[Sequence[torch.Tensor]]:
        """From the history if it is kept there, else the newest."""
        with ExitStack() as held:  # what the caller raises while it sends is not ours to catch
            tensors = None
            if self._history is not None:
                with suppress(EntryUnavailable):
                    tensors = held.enter_context(self._history.get(name)).tensors
            if tensors is None:
                yield held.enter_context((self._entry or super().entry)(name))
            else:
                yield tensors

    @contextmanager
    def after(self, name: Entry, timeout_s: float) -> Iterator[Successor]:
        """From the history."""
        if self._history is None:
            raise Refused(f"no entry after {name} is kept here")
        with ExitStack() as held:
            try:
                kept = held.enter_context(self._history.after(name, timeout_s))
            except TimeoutError as e:
                raise Refused(str(e), "not yet") from e
            except EntryUnavailable as e:
                raise Refused(str(e), "never") from e
            yield Successor(kept.name, kept.tensors)

    @contextmanager
    def snapshot(self, name: Entry | None) -> Iterator[Snapshot]:
        """From the snapshotter."""
        if self._snapshotter is None:
            raise Refused("no snapshot is held here")
        with ExitStack() as held:
            try:
                snapshot = held.enter_context(self._snapshotter.serving(name, self._copy_timeout_s))
            except SnapshotFailed as e:
                raise Refused(str(e), "never") from e
            yield snapshot
