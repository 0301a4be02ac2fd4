"""The byte space of a layout over the memory of tensors that lie where they like."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.state.layout import ALIGN_BYTES, Layout
from lightkeeper.manager.state.tree import Leaf

BytesOf = Callable[[int], memoryview]  # index of a tensor of the layout to its bytes

_ZEROS = memoryview(bytes(ALIGN_BYTES))


class Segments:
    """Cuts the byte space of a layout into pieces that each lie in one tensor.

    Args:
        layout: Of the space.
    """

    def __init__(self, layout: Layout) -> None:
        self._tensors = layout.tensors
        self._offsets = [tensor.offset for tensor in layout.tensors]

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The pieces of [start, end): index of the tensor, first byte within it, number of bytes.

        The index is -1 for the zeros between two tensors.
        """
        found: list[tuple[int, int, int]] = []
        i = max(0, bisect.bisect_right(self._offsets, start) - 1)
        at = start
        while at < end:
            tensor = self._tensors[i]
            stop = min(end, tensor.offset + tensor.nbytes)
            if at < stop:
                found.append((i, at - tensor.offset, stop - at))
                at = stop
            i += 1
            if at < end and i < len(self._tensors) and at < self._offsets[i]:
                gap = min(end, self._offsets[i]) - at
                found.append((-1, 0, gap))
                at += gap
        return found

    def holders(self, start: int, end: int) -> list[int]:
        """Indices of the tensors with bytes in [start, end)."""
        return [i for i, _, _ in self.pieces(start, end) if i >= 0]


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie row-major in host memory, so that they can be read and written in place."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def dense_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a tensor: its own memory if it `is_direct`, else of a copy."""
    return raw_bytes(tensor.resolve_conj().resolve_neg())


def checksum_ranges(
    layout: Layout, leaves: Sequence[Leaf], known: Mapping[int, str] | None = None, threads: int | None = None
) -> list[str]:
    """Checksum of every range, straight from the tensors; waits for the device.

    Args:
        layout: Of the state.
        leaves: Its tensors, in the order of the layout.
        known: Checksums that need not be computed, by range.
        threads: How many hash at one time; by default one per two cores, at most 4.
    """
    segments = Segments(layout)
    count = layout.ranges
    threads = threads or max(1, min(4, (os.cpu_count() or 2) // 2))
    block = max(1, -(-count // threads))

    def hash_block(first: int) -> list[str]:
        kept: tuple[int, memoryview] = (-1, _ZEROS)
        sums = []
        for index in range(first, min(count, first + block)):
            if known and index in known:
                sums.append(known[index])
                continue
            digest = xxhash.xxh3_64()
            for i, start, nbytes in segments.pieces(*layout.bounds(index)):
                if i < 0:
                    digest.update(_ZEROS[:nbytes])
                    continue
                if kept[0] != i:
                    kept = (i, dense_bytes(leaves[i].tensor))
                digest.update(kept[1][start : start + nbytes])
            sums.append(digest.hexdigest())
        return sums

    if block >= count or (known and len(known) == count):
        block = count
        return hash_block(0)
    with ThreadPoolExecutor(threads, thread_name_prefix="checksum") as pool:
        return [one for sums in pool.map(hash_block, range(0, count, block)) for one in sums]
