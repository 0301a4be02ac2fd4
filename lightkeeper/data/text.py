"""Text as bytes: a map-style data set of fixed windows, and the batches a training loop asks for."""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray

from lightkeeper.data.sampler import DealtSampler


class ByteText:
    """Windows of `context` bytes that follow each other without a gap, each with the bytes that come next.

    Args:
        source: a file (memory-mapped, so that it may be larger than memory), or the bytes themselves.
        context: bytes in a window.

    Raises:
        ValueError: the text is shorter than one window and one byte.
    """

    vocabulary = 256

    def __init__(self, source: str | os.PathLike[str] | bytes, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        self.context = context
        self.bytes: NDArray[np.uint8]
        if isinstance(source, bytes):
            self.bytes = np.frombuffer(source, dtype=np.uint8)
        elif os.path.getsize(source) == 0:  # an empty file cannot be mapped
            self.bytes = np.empty(0, dtype=np.uint8)
        else:
            self.bytes = np.memmap(source, dtype=np.uint8, mode="r")
        if len(self) < 1:
            raise ValueError(f"the text has {self.bytes.size} bytes, at least {context + 1} are needed")

    def __len__(self) -> int:
        return max(0, int(self.bytes.size) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One window: x and y, int64 of shape [context]; y is x moved on by one byte."""
        x, y = self.take(np.array([index], dtype=np.int64))
        return x[0], y[0]

    def take(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Several windows.

        Args:
            indices: int64 of shape [size], each within 0..len-1.

        Returns:
            x and y, int64 of shape [size, context].

        Raises:
            IndexError: an index is out of range.
        """
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"windows are 0..{len(self) - 1}")
        places = indices[:, None] * self.context + np.arange(self.context + 1)
        windows = torch.from_numpy(self.bytes[places].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


class TextBatches:
    """A text and a sampler: what microbatch k of a step holds, as tensors.

    Args:
        text: the data set.
        sampler: deals its windows; `sampler.n` must be the text's length.

    Raises:
        ValueError: the sampler was made for another length.
    """

    def __init__(self, text: ByteText, sampler: DealtSampler) -> None:
        if sampler.n != len(text):
            raise ValueError(f"the sampler deals {sampler.n} samples, the text has {len(text)}")
        self.text, self.sampler = text, sampler

    def batch(self, step: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Microbatch k of a step: x and y, int64 of shape [size / world_size, context]."""
        return self.text.take(self.sampler(step, k))
