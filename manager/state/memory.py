"""Memory that is written at full speed from the first byte on.

Rejected: asking for huge pages. Where they are there, touching is three times as fast; where they must be made first,
or the machine is virtual and its host must, it is three times as slow, and nobody can tell beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGN_BYTES = 64


def touched(nbytes: int, pinned: bool) -> torch.Tensor:
    """Bytes that are zero and whose pages are there; takes its time, so not on the training thread.

    Args:
        nbytes: How many.
        pinned: Whether a device copies there.

    Returns:
        uint8, of shape [nbytes].
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).zero_()


def touched_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Host tensors of the same shapes and dtypes, in one piece of such memory; pinned if the given ones are on CUDA."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    data = touched(end, any(tensor.is_cuda for tensor in tensors))
    return [
        data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
