"""Copies tensors into a snapshot's memory, and hashes what was written while it is still in the cache.

Hashing a gigabyte out of the cache costs a tenth of copying it; read anew from memory, half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.state.codec import DTYPES
from lightkeeper.manager.state.layout import ALIGN_BYTES, Layout, TensorHeader
from lightkeeper.manager.state.memory import touched
from lightkeeper.manager.state.segments import is_direct

_SLICE_BYTES = 1 << 20  # copied, and then hashed, at one go
_SMALL_BYTES = 64 << 10  # of a tensor that is copied together with others
_SMALL_AT_ONCE = 256


@dataclass(frozen=True)
class Source:
    """A tensor to copy.

    Attributes:
        tensor: Where its bytes are.
        path: Its name.
        header: Where they go.
        version: Of the tensor at the boundary.
    """

    tensor: torch.Tensor
    path: str
    header: TensorHeader
    version: int

    @property
    def end(self) -> int:
        """The byte before which the next tensor does not start."""
        return -(-(self.header.offset + self.header.nbytes) // ALIGN_BYTES) * ALIGN_BYTES


class Memory:
    """A buffer that one snapshot after another is written to; its gaps between tensors are zero."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.data = touched(nbytes, pinned)
        self.array = self.data.numpy()
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: self.data}

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.data.numel()

    def target(self, header: TensorHeader) -> torch.Tensor:
        """The tensor whose bytes lie where the header says."""
        dtype = DTYPES[header.dtype]
        whole = self._typed.get(dtype)
        if whole is None:
            size = dtype.itemsize
            whole = self._typed[dtype] = self.data[: self.nbytes // size * size].view(dtype)
        start = header.offset // dtype.itemsize
        return whole[start : start + header.nbytes // dtype.itemsize].view(header.shape)

    def clear_gap(self, source: Source) -> None:
        """Zero what lies between this tensor and the next: another layout may have written there before."""
        self.array[source.header.offset + source.header.nbytes : source.end] = 0


class Checksums:
    """xxh3_64 of every range of memory that is written from its first byte to its last.

    Attributes:
        sums: Of the ranges that were written whole, 16 hexadecimal digits each.
    """

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.sums: list[str] = []
        self._layout = layout
        self._bytes = raw_bytes(memory.data)
        self._at = 0
        self._digest = xxhash.xxh3_64()

    def written(self, end: int) -> None:
        """All bytes before `end` have been written."""
        end = min(end, self._layout.nbytes)
        while self._at < end:
            _, boundary = self._layout.bounds(len(self.sums))
            stop = min(end, boundary)
            self._digest.update(self._bytes[self._at : stop])
            self._at = stop
            if stop == boundary:
                self.sums.append(self._digest.hexdigest())
                self._digest = xxhash.xxh3_64()


def copy_all(sources: Sequence[Source], memory: Memory, layout: Layout) -> list[str]:
    """Copy all tensors of a layout, which are in host memory and in its order.

    Small ones are copied many at a time, large ones on one core without the interpreter lock.

    Returns:
        The checksums of all ranges.
    """
    checksums, small = Checksums(layout, memory), list[Source]()
    for source in sources:
        memory.clear_gap(source)
        large = source.header.nbytes > _SMALL_BYTES
        if small and (large or len(small) == _SMALL_AT_ONCE):
            _copy_small(small, memory, checksums)
        if large:
            _copy_large(source, memory, checksums)
        elif source.header.nbytes:
            small.append(source)
    if small:
        _copy_small(small, memory, checksums)
    checksums.written(layout.nbytes)
    return checksums.sums


def copy_from_device(sources: Sequence[Source], memory: Memory, event: Any) -> None:
    """Copy tensors of which some are on CUDA, on a stream of its own that starts when the device reached `event`."""
    side = torch.cuda.Stream()
    side.wait_event(event)
    with torch.cuda.stream(side):
        for source in sources:
            memory.clear_gap(source)
            if source.header.nbytes:
                memory.target(source.header).copy_(source.tensor, non_blocking=source.tensor.is_cuda)
    side.synchronize()


def _copy_small(small: list[Source], memory: Memory, checksums: Checksums) -> None:
    """Copies them and empties the list."""
    with torch.no_grad():
        torch._foreach_copy_([memory.target(s.header) for s in small], [s.tensor for s in small])
    checksums.written(small[-1].end)
    small.clear()


def _copy_large(source: Source, memory: Memory, checksums: Checksums) -> None:
    header, tensor = source.header, source.tensor
    if not is_direct(tensor):
        memory.target(header).copy_(tensor)
    else:
        to = memory.array[header.offset : header.offset + header.nbytes]
        of = np.frombuffer(raw_bytes(tensor), dtype=np.uint8)
        for start in range(0, header.nbytes, _SLICE_BYTES):
            np.copyto(to[start : start + _SLICE_BYTES], of[start : start + _SLICE_BYTES])
            checksums.written(min(header.offset + start + _SLICE_BYTES, header.offset + header.nbytes))
    checksums.written(source.end)
