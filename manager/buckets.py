"""Flat buffers for the gradients: what is reduced, and what an entry consists of.

A bucket holds the gradients of some parameters of one dtype and device, one after the other. It is filled
from `p.grad`, reduced in place, and copied back only at the commit: so the local sum survives a failed
reduce, and the reduced bucket survives the commit, for a peer that missed it. The first bucket has two
buffers, used by alternating steps: see `Reducer` for what that buys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

Placements: TypeAlias = tuple[Any, ...] | None

BUCKET_BYTES = 16 << 20  # on gloo, smaller ones cost more CPU per byte, larger ones overlap less
FIRST_BUCKET_BYTES = 1 << 20  # the first is reduced alone, so it is kept short


@dataclass(frozen=True)
class Slot:
    """A parameter whose gradient is part of the entry."""

    name: str
    parameter: nn.Parameter


class Bucket:
    """One flat buffer, or two of which one is current.

    Args:
        index: Its place in the order of reduction.
        members: Indices of its parameters, in the order in which they lie in the buffer.
        shapes: Local shapes of those parameters.
        dtype: Their dtype, in which they are reduced.
        device: Their device.
        buffers: 1 or 2.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        buffers: int,
    ) -> None:
        self.index = index
        self.members = tuple(members)
        self._shapes = tuple(shapes)
        numel = max(1, sum(shape.numel() for shape in shapes))  # an empty reduce would not prove that all take part
        self._flats = [torch.zeros(numel, dtype=dtype, device=device) for _ in range(buffers)]
        self._views = [self._cut(flat) for flat in self._flats]
        self._current = 0

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, start = [], 0
        for shape in self._shapes:
            views.append(flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return views

    @property
    def flat(self) -> torch.Tensor:
        """The current buffer, one dimension."""
        return self._flats[self._current]

    @property
    def other(self) -> torch.Tensor:
        """The buffer that is not current, if there are two; else the current one."""
        return self._flats[self._current - 1]

    @property
    def views(self) -> list[torch.Tensor]:
        """The current buffer parameter by parameter, in the order of `members`."""
        return self._views[self._current]

    def turn(self) -> None:
        """Make the other buffer current, if there are two."""
        self._current = (self._current + 1) % len(self._flats)

    def replace(self) -> None:
        """Take a new current buffer, since something still writes into the old one."""
        self._flats[self._current] = torch.zeros_like(self.flat)
        self._views[self._current] = self._cut(self.flat)

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy local gradients in, one for each of `members`; None counts as zero."""
        targets, sources = [], []
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)


def plan(slots: Sequence[Slot], bucket_bytes: int, first_bytes: int = FIRST_BUCKET_BYTES) -> list[Bucket]:
    """Deal the parameters to buckets, last parameter first, since its gradient is ready first.

    Args:
        slots: The parameters, in the order of the model.
        bucket_bytes: A bucket is full when it has at least so many.
        first_bytes: The same for the first bucket.

    Returns:
        The buckets, in the order of reduction.
    """
    local = [local_tensor(slot.parameter) for slot in slots]
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    full: list[list[int]] = []
    for i in reversed(range(len(slots))):
        members = filling.setdefault((local[i].dtype, local[i].device), [])
        members.append(i)
        size = sum(local[j].numel() * local[j].element_size() for j in members)
        if size >= (bucket_bytes if full else min(first_bytes, bucket_bytes)):
            full.append(filling.pop((local[i].dtype, local[i].device)))
    full.extend(filling.values())
    return [
        Bucket(
            index,
            members,
            [local[i].shape for i in members],
            local[members[0]].dtype,
            local[members[0]].device,
            buffers=2 if index == 0 else 1,
        )
        for index, members in enumerate(full)
    ]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or gradient: the tensor itself, or a DTensor's local shard, detached."""
    if _is_dtensor(tensor):
        local = tensor.detach().to_local()  # type: ignore[attr-defined]
        return local.wait() if hasattr(local, "wait") else local  # of a collective that may be under way
    return tensor.detach()


def placements_of(gradient: torch.Tensor) -> Placements:
    """How a gradient is placed on its mesh; None for a plain tensor."""
    return tuple(gradient.placements) if _is_dtensor(gradient) else None  # type: ignore[attr-defined]


def as_gradient(local: torch.Tensor, parameter: nn.Parameter, placements: Placements) -> torch.Tensor:
    """A gradient for `parameter` from its local part.

    Args:
        local: The local values; not copied.
        parameter: Whose gradient it becomes.
        placements: The gradient's, which may differ (a replicated parameter may have a partial one); None for the
            parameter's own.
    """
    if not _is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    owner = cast(DTensor, parameter)
    return DTensor.from_local(
        local,
        owner.device_mesh,
        placements or owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor before it is imported
    return module is not None and isinstance(tensor, module.DTensor)
