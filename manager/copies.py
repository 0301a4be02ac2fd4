"""Reduced gradients, copied while later buckets are still being reduced.

Copying 100 MB costs a CPU as much as a tenth of a short step, and whoever waits for the network has nothing else
to do. A local sum must outlive the reduction, so the copy needs memory of its own: at the commit it becomes the
gradient, and the local sum it displaces is where the next step's copy goes. No memory is freed or touched anew.
"""

from __future__ import annotations

import torch

from lightkeeper.manager.buckets import Bucket


class EarlyCopies:
    """The copies of one step, by parameter; on an accelerator, where copying costs nothing, there are none."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}
        self._spare: dict[int, torch.Tensor] = {}

    def take(self, bucket: Bucket) -> None:
        """Copy a bucket that has been reduced."""
        if bucket.flat.device.type != "cpu":
            return
        for i, view in zip(bucket.members, bucket.views, strict=True):
            target = self._copies.get(i, self._spare.pop(i, None))
            if target is None or target.shape != view.shape or target.dtype != view.dtype:
                target = torch.empty_like(view)
            self._copies[i] = target.copy_(view)

    def swap(self, i: int, local: torch.Tensor | None) -> torch.Tensor | None:
        """The copy of parameter `i`, if there is one; the memory of its local sum then serves the next step."""
        copy = self._copies.pop(i, None)
        if copy is not None and local is not None:
            self._spare[i] = local
        return copy

    def drop(self) -> None:
        """What was copied is void, or not needed."""
        self._spare.update(self._copies)
        self._copies.clear()
