"""Copies the state aside while training goes on.

The training thread names a step boundary with `begin`: there it reads everything that is not a large tensor
(scalars, every user's `state_dict()`), and takes references to the tensors. Their bytes are copied by a thread
while the next forward and backward run, into memory that was allocated and touched beforehand. Shared state
changes only in the apply phase, so the training thread calls `Copy.wait` before it: only if the copy is slower
than the compute does training stand. That nothing changed meanwhile is checked by the tensors' version counters.
Checksums are computed with the copy; what came from a device is hashed behind it, or earlier by whoever serves it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.state.copying import Memory, Source, copy_all, copy_from_device
from lightkeeper.manager.state.layout import RANGE_BYTES, Layout, TensorHeader, layout_of
from lightkeeper.manager.state.registry import UNNAMED, StateRegistry, leaves_in
from lightkeeper.manager.state.tree import Leaf

SNAPSHOT_BYTES_MAX = 64 << 30


class SnapshotFailed(RuntimeError):
    """There is no such snapshot, or there cannot be one; one line says why."""


class Snapshot:
    """A whole state under its name; its bytes do not change until it is released and nobody reads it.

    Attributes:
        name: The entry that was applied last.
        layout: Where every byte is.
        seconds: How long the copy took.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        checksums: Sequence[str],
        seconds: float,
        freed: Callable[[Memory], None],
    ) -> None:
        self.name = layout.name
        self.layout = layout
        self.seconds = seconds
        self._memory = memory
        self._bytes = raw_bytes(memory.data)[: layout.nbytes].toreadonly()
        self._freed = freed
        self._lock = threading.Lock()
        self._checksums = list[str | None](checksums) or [None] * layout.ranges
        self._fingerprint: str | None = None
        self._readers = 0
        self._released = False

    def range(self, index: int) -> memoryview:
        """The bytes of a range, read-only; to be used inside `reading`."""
        start, end = self.layout.bounds(index)
        return self._bytes[start:end]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the layout, in its order, as views of the memory: not to be written; inside `reading`."""
        return [self._memory.target(header) for header in self.layout.tensors]

    def checksum(self, index: int) -> str:
        """xxh3_64 of a range, 16 hexadecimal digits; computed when it is asked for first."""
        found = self._checksums[index]
        if found is None:
            found = self._checksums[index] = xxhash.xxh3_64_hexdigest(self.range(index))
        return found

    @property
    def fingerprint(self) -> str:
        """Of the whole state; computes the checksums that nobody has asked for yet."""
        if self._fingerprint is None:
            self._fingerprint = self.layout.fingerprint(self.checksum(i) for i in range(self.layout.ranges))
        return self._fingerprint

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Keeps the memory from being used anew.

        Raises:
            SnapshotFailed: it was released.
        """
        with self._lock:
            if self._released:
                raise SnapshotFailed(f"the snapshot of {self.name} is no longer held")
            self._readers += 1
        try:
            yield self
        finally:
            with self._lock:
                self._readers -= 1
            self._free_if_unused()

    def release(self) -> None:
        """Nobody may start to read it any more; its memory is used anew as soon as those who do have ended."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._free_if_unused()

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def _free_if_unused(self) -> None:
        with self._lock:
            if not self._released or self._readers or self._freed is _ignore:
                return
            freed, self._freed = self._freed, _ignore
        freed(self._memory)


class Copy:
    """A snapshot that is being made."""

    def __init__(self, name: Entry) -> None:
        self.name = name
        self._done = threading.Event()
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the state may change again."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it ended without a snapshot; `wait` says why."""
        return self.done and self._snapshot is None

    @property
    def released(self) -> bool:
        """Whether the snapshot that it became was released."""
        return self._snapshot is not None and self._snapshot.released

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """Wait until everything is copied; the training thread must, before it changes the state.

        Raises:
            SnapshotFailed: it could not be copied, or there is no memory for it; the state is untouched.
            TimeoutError: the time is up; the state must not change yet.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the snapshot of {self.name} is not copied after {timeout_s} s")
        if self._snapshot is None:
            raise SnapshotFailed(f"no snapshot of {self.name}: {self._error}") from self._error
        return self._snapshot

    def _end(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        self._snapshot, self._error = snapshot, error
        self._done.set()


class Snapshotter:
    """Makes snapshots of a registry's state and holds them until they are released.

    Args:
        registry: What is copied.
        bytes_max: Bound on the memory of all snapshots together.
        range_bytes: Size of a range, a multiple of 64; alike in all groups.
    """

    def __init__(
        self, registry: StateRegistry, bytes_max: int = SNAPSHOT_BYTES_MAX, range_bytes: int = RANGE_BYTES
    ) -> None:
        self._registry = registry
        self._bytes_max = bytes_max
        self._range_bytes = range_bytes
        self._changed = threading.Condition()
        self._touching = threading.Lock()  # held while memory is claimed, so that none is claimed twice
        self._copies: dict[Entry, Copy] = {}  # newest last
        self._free: list[Memory] = []
        self._allocated = 0
        self._pinned = False

    def prepare(self) -> int:
        """Allocate and touch the memory for one snapshot of the state as it is now (so after the first step).

        Returns:
            Its size in bytes.

        Raises:
            SnapshotFailed: it is beyond the bound.
        """
        nbytes = self.size()
        self.reserve(nbytes)
        return nbytes

    def size(self) -> int:
        """Bytes of one snapshot of the state as it is now; on the training thread, since it reads the state."""
        captured = self._registry.capture()
        self._pinned = any(leaf.tensor.is_cuda for leaf in leaves_in(captured))
        return layout_of(UNNAMED, captured, self._range_bytes).nbytes

    def reserve(self, nbytes: int) -> None:
        """Allocate and touch memory for a snapshot; from any thread.

        Raises:
            SnapshotFailed: it is beyond the bound.
        """
        with self._touching:
            self._give_back(self._claim(nbytes))

    def begin(self, name: Entry) -> Copy:
        """Start a snapshot; on the training thread, at a step boundary.

        Args:
            name: The entry that was applied last.

        Returns:
            The copy under way; of a state of this name that is held already, the one that there is. Memory that is
            not ready yet, or goes beyond the bound, is its business.

        Raises:
            StateRefused: something that cannot be copied exactly came into the state.
        """
        with self._changed:
            self._copies = {n: copy for n, copy in self._copies.items() if not copy.failed}
            if (known := self._known(name)) is not None:
                return known
        with _no_collection():
            return self._begin(name)

    def _begin(self, name: Entry) -> Copy:
        captured = self._registry.capture()
        layout = layout_of(name, captured, self._range_bytes)
        leaves = leaves_in(captured)
        self._pinned = self._pinned or any(leaf.tensor.is_cuda for leaf in leaves)
        unsteady = self._registry.unsteady(captured)
        sources = [
            _source(leaf, header, id(leaf) in unsteady) for leaf, header in zip(leaves, layout.tensors, strict=True)
        ]
        copy = Copy(name)
        with self._changed:
            self._copies[name] = copy
        event = torch.cuda.current_stream().record_event() if _on_cuda(sources) else None
        threading.Thread(
            target=self._run, args=(copy, layout, sources, event), name=f"snapshot of {name}", daemon=True
        ).start()
        return copy

    @contextmanager
    def serving(self, name: Entry | None, timeout_s: float) -> Iterator[Snapshot]:
        """The snapshot of this name, or the newest; waits for one that is being copied.

        Raises:
            SnapshotFailed: it is not held, could not be copied, or is not ready in time.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            copy = self._known(name)
        if copy is None:
            raise SnapshotFailed(f"no snapshot of {name} is held here" if name else "no snapshot is held here")
        try:
            snapshot = copy.wait(max(0.0, until - time.monotonic()))
        except TimeoutError as e:
            raise SnapshotFailed(str(e)) from e
        with snapshot.reading():
            yield snapshot

    def release(self, name: Entry | None = None) -> None:
        """Release the snapshot of this name, or all; one that is being copied is waited for."""
        with self._changed:
            names = list(self._copies) if name is None else [name]
            copies = [self._copies.pop(n) for n in names if n in self._copies]
        for copy in copies:
            try:
                copy.wait().release()
            except SnapshotFailed:
                pass

    def _known(self, name: Entry | None) -> Copy | None:
        """The copy of this name, or the newest, unless it was released; it may have failed."""
        self._copies = {n: copy for n, copy in self._copies.items() if not copy.released}
        if name is None:
            return next(reversed(self._copies.values()), None)
        return self._copies.get(name)

    def _run(self, copy: Copy, layout: Layout, sources: Sequence[Source], event: Any) -> None:
        memory: Memory | None = None
        try:
            memory = self._take(layout.nbytes)
            start = time.monotonic()
            checksums: list[str] = []
            if event is None:
                checksums = copy_all(sources, memory, layout)
            else:
                copy_from_device(sources, memory, event)
            _check_unchanged(sources)
        except BaseException as e:
            if memory is not None:
                self._give_back(memory)
            copy._end(None, e)
            return
        snapshot = Snapshot(layout, memory, checksums, time.monotonic() - start, self._give_back)
        copy._end(snapshot, None)
        _hash_behind(snapshot)

    def _take(self, nbytes: int) -> Memory:
        """Free memory of at least so many bytes; what is being touched is waited for."""
        with self._touching:
            return self._claim(nbytes)

    def _claim(self, nbytes: int) -> Memory:
        with self._changed:
            fitting = [memory for memory in self._free if memory.nbytes >= nbytes]
            if fitting:
                best = min(fitting, key=lambda memory: memory.nbytes)
                self._free = [memory for memory in self._free if memory is not best]
                return best
            self._allocated -= sum(memory.nbytes for memory in self._free)
            self._free = []
            if self._allocated + nbytes > self._bytes_max:
                raise SnapshotFailed(
                    f"a snapshot of {nbytes} bytes beside {self._allocated} that are held goes beyond the bound of "
                    f"{self._bytes_max} bytes"
                )
            self._allocated += nbytes
        try:
            return Memory(nbytes, self._pinned)
        except BaseException:
            with self._changed:
                self._allocated -= nbytes
            raise

    def _give_back(self, memory: Memory) -> None:
        with self._changed:
            self._free.append(memory)


def _hash_behind(snapshot: Snapshot) -> None:
    """Compute the checksums that are not known and that no joiner has asked for yet, while nobody waits."""
    for index in range(snapshot.layout.ranges):
        try:
            with snapshot.reading():
                snapshot.checksum(index)
        except SnapshotFailed:
            return


def _source(leaf: Leaf, header: TensorHeader, unsteady: bool) -> Source:
    """What may change before the next apply phase is copied here and now."""
    tensor = leaf.tensor.detach().clone() if unsteady else leaf.tensor
    return Source(tensor, leaf.path, header, _version(tensor))


def _ignore(memory: Memory) -> None:
    del memory


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _on_cuda(sources: Sequence[Source]) -> bool:
    return any(source.tensor.is_cuda for source in sources)


def _check_unchanged(sources: Sequence[Source]) -> None:
    for source in sources:
        if _version(source.tensor) != source.version:
            raise SnapshotFailed(
                f"{source.path} changed while it was copied: state that the forward pass changes differs between "
                "groups; exclude it, or register it with scope='group'"
            )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector, which may take longer than all the rest, out of what the training thread does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
