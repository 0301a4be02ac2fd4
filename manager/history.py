"""Keeps the entries after a snapshot, for joiners that will replay them.

An entry is kept with its own name and that of its predecessor, so entries form a chain: a joiner asks for the
successor of what it applied last, and either gets exactly that, or learns that it never will and must start
over. Memory is bounded: the oldest entry is dropped for the newest, and its buffers are used anew. Buffers for the
next entry are made ready in the background: on the training thread their page faults would cost as much as a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.state.memory import touched_like


class EntryUnavailable(LookupError):
    """The entry is not kept here and never will be; one line says why. Who needs it must start over."""


@dataclass
class Kept:
    """A kept entry.

    Attributes:
        name: Its full name.
        predecessor: Of the entry that it was applied on.
        tensors: Buckets first and extras last; unchanged while it is read.
    """

    name: Entry
    predecessor: Entry
    tensors: list[torch.Tensor]
    readers: int = 0
    dropped: bool = False


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Their size."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Pool:
    """Buffers of dropped entries, and one set that was made ready before it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[list[torch.Tensor]] = []

    def take(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Free buffers of these shapes; waits for those that are being made ready."""
        kind = _kind(like)
        with self._lock:
            for i, buffers in enumerate(self._free):
                if _kind(buffers) == kind:
                    return self._free.pop(i)
            self._free.clear()
            return touched_like(like)

    def make_ready(self, like: Sequence[torch.Tensor]) -> None:
        """See that buffers of these shapes are free; not on the training thread."""
        kind = _kind(like)
        with self._lock:
            if all(_kind(buffers) != kind for buffers in self._free):
                self._free.append(touched_like(like))

    def give(self, buffers: list[torch.Tensor]) -> None:
        """They are not in use any more."""
        with self._lock:
            self._free.append(buffers)

    def clear(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._free.clear()


def _kind(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class EntryHistory:
    """The newest entries of this rank, by name; for several threads.

    Args:
        bytes_max: Bound on what is kept, and on the buffers for it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._kept: dict[Entry, Kept] = {}  # oldest first
        self._leaving: list[Kept] = []  # dropped while somebody reads them
        self._pool = _Pool()
        self._newest: Entry | None = None
        self._stopped = False
        self.dropped = 0

    @property
    def nbytes(self) -> int:
        """Size of what is kept now."""
        with self._changed:
            return self._size()

    @property
    def names(self) -> list[Entry]:
        """What is kept, oldest first."""
        with self._changed:
            return list(self._kept)

    def keep(self, name: Entry, predecessor: Entry, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy a committed entry; waits for the device if the tensors are there.

        Args:
            name: Its full name; its step is one above its predecessor's.
            predecessor: Of the entry that it was applied on.
            tensors: Buckets first and extras last, dense.

        Returns:
            False if it is larger than the bound: then nothing is kept, and joiners must start over.
        """
        assert name.step == predecessor.step + 1, f"{name} does not follow {predecessor}"
        size = bytes_of(tensors)
        with self._changed:
            if self._stopped or name in self._kept:
                return not self._stopped
            if self._newest is not None and predecessor != self._newest:
                self._drop_all()  # a new chain: what was before leads nowhere
            while self._kept and self._size() + size > self._bytes_max:
                self._drop_oldest()
            if self._size() + size > self._bytes_max:
                self._newest = name
                self.dropped += 1
                self._changed.notify_all()
                return False
        buffers = self._pool.take(tensors)
        for to, of in zip(buffers, tensors, strict=True):
            to.copy_(of.detach())
        with self._changed:
            self._kept[name] = Kept(name, predecessor, buffers)
            self._newest = name
            self._changed.notify_all()
            room = self._size() + size <= self._bytes_max
        if room:
            threading.Thread(target=self._pool.make_ready, args=(tensors,), name="entry memory", daemon=True).start()
        return True

    def reserve(self, like: Sequence[torch.Tensor]) -> None:
        """Make the memory for one entry ready, if it is within the bound; not on the training thread.

        Args:
            like: Tensors of the shapes and dtypes of an entry.
        """
        if bytes_of(like) <= self._bytes_max:
            self._pool.make_ready(like)

    @contextmanager
    def get(self, name: Entry) -> Iterator[Kept]:
        """The entry of this name, unchanged until the context is left.

        Raises:
            EntryUnavailable: it is not kept.
        """
        with self._changed:
            kept = self._kept.get(name)
            if kept is None:
                raise EntryUnavailable(f"{name} is not kept here")
            kept.readers += 1
        with self._reading(kept):
            yield kept

    @contextmanager
    def after(self, name: Entry, timeout_s: float) -> Iterator[Kept]:
        """The entry whose predecessor is `name`, unchanged until the context is left; waits for it.

        Raises:
            EntryUnavailable: it is known that it will never be kept here.
            TimeoutError: it may still come.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while (kept := self._successor(name)) is None:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the entry after {name} is not there yet")
                self._changed.wait(left)
            kept.readers += 1
        with self._reading(kept):
            yield kept

    def passed(self, name: Entry) -> None:
        """An entry was committed that nobody asked to keep: who waits for it must start over."""
        with self._changed:
            if self._newest != name:
                self._drop_all()
                self._newest = name
                self._changed.notify_all()

    def clear(self) -> None:
        """Drop everything, since no joiner is left; later entries start a new chain."""
        with self._changed:
            self._drop_all()
            self._pool.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Keep nothing more; whoever waits learns that it never will."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _successor(self, name: Entry) -> Kept | None:
        for kept in self._kept.values():
            if kept.predecessor == name:
                return kept
        newest = self._newest
        if newest is None or newest == name or newest.step < name.step:
            if self._stopped:
                raise EntryUnavailable(f"the entry after {name} will not come: this donor stops")
            return None
        oldest = next(iter(self._kept), newest)
        if name.step + 1 < oldest.step or not self._kept:
            raise EntryUnavailable(
                f"the entry after {name} is no longer kept: the oldest is {oldest if self._kept else 'none'} "
                f"(bound {self._bytes_max} bytes)"
            )
        raise EntryUnavailable(f"no entry here follows {name}: this donor went on to {newest} another way")

    @contextmanager
    def _reading(self, kept: Kept) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                kept.readers -= 1
                if kept.dropped and kept.readers == 0:
                    self._leaving = [one for one in self._leaving if one is not kept]
                    self._pool.give(kept.tensors)

    def _size(self) -> int:
        return sum(bytes_of(kept.tensors) for kept in [*self._kept.values(), *self._leaving])

    def _drop_oldest(self) -> None:
        kept = self._kept.pop(next(iter(self._kept)))
        kept.dropped = True
        self.dropped += 1
        if kept.readers:
            self._leaving.append(kept)
        else:
            self._pool.give(kept.tensors)

    def _drop_all(self) -> None:
        while self._kept:
            self._drop_oldest()
