"""A reduction for tests: the same bits as one process that computes all microbatches in order, whoever computed which.

Every microbatch's gradients are gathered by themselves and added up in the order of the microbatches, so neither the
members nor the shares show in the sum. It needs memory for all microbatches of a step and reduces nothing before the
last one is computed. Chosen with ``LIGHTKEEPER_REDUCTION=fold``, alike in all groups.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from lightkeeper.errors import UsageError
from lightkeeper.manager.buckets import Bucket
from lightkeeper.manager.groups import Ended
from lightkeeper.manager.reducer import Outcome, Reducer

VARIABLE = "LIGHTKEEPER_REDUCTION"


def chosen_reducer() -> type[Reducer]:
    """The reducer that the environment asks for.

    Raises:
        UsageError: there is none of that name.
    """
    name = os.environ.get(VARIABLE, "sum")
    kinds = {"sum": Reducer, "fold": FoldingReducer}
    if name not in kinds:
        raise UsageError(f"{VARIABLE} {name!r}: give one of {', '.join(kinds)}")
    return kinds[name]


class FoldingReducer(Reducer):
    """Gathers every microbatch's gradients and folds them in order; parameters are float32 and not sharded."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if any(slot.parameter.dtype != torch.float32 for slot in self._slots):
            raise UsageError(f"{VARIABLE}=fold: all parameters must be float32")
        self._parts: dict[int, list[torch.Tensor | None]] = {}  # by microbatch
        self._computing: int | None = None
        self._folded: list[torch.Tensor | None] | None = None
        self._until = 0.0

    def begin(self, step: int, total: int) -> None:
        """See `Reducer`."""
        super().begin(step, total)
        self._parts, self._computing, self._folded = {}, None, None

    def microbatch(self, k: int, last: bool) -> None:
        """See `Reducer`; none is launched before `reduce`."""
        self._put_aside()
        super().microbatch(k, last=False)
        for slot in self._slots:
            slot.parameter.grad = None
        self._computing = k

    def reduce(self, ready: int, timeout_s: float) -> Outcome:
        """See `Reducer`."""
        self._put_aside()
        for i, slot in enumerate(self._slots):  # says which parameters had a gradient here
            if self._parts:
                slot.parameter.grad = next((part[i] for part in self._parts.values() if part[i] is not None), None)
        self._until, self._folded = time.monotonic() + timeout_s, None
        return super().reduce(ready, timeout_s)

    def _put_aside(self) -> None:
        if self._computing is not None:
            self._parts[self._computing] = [slot.parameter.grad for slot in self._slots]
            self._computing = None

    def _launch(self, bucket: Bucket) -> None:
        if self._folded is None:
            self._folded = self._fold()
        if bucket.index > 0:
            self._entry_whole = False
        with torch.no_grad():
            bucket.fill([self._folded[i] for i in bucket.members])
        self._pending.append(Ended())

    def _fold(self) -> list[torch.Tensor | None]:
        """Bits are gathered by a sum of integers, of which all but one are zero."""
        assert self._group is not None, "no group is attached"
        sizes = [slot.parameter.numel() for slot in self._slots]
        rows = torch.zeros(self._total, len(sizes) + sum(sizes), dtype=torch.int32)
        for k, part in self._parts.items():
            for i, (there, gradient) in enumerate(zip(rows[k, len(sizes) :].split(sizes), part, strict=True)):
                if gradient is not None:
                    rows[k, i] = 1
                    there.copy_(gradient.detach().reshape(-1).view(torch.int32))
        self._group.all_reduce(rows).wait(max(0.0, self._until - time.monotonic()))
        folded: list[torch.Tensor | None] = [None] * len(sizes)
        for row in rows:
            for i, bits in enumerate(row[len(sizes) :].split(sizes)):
                if row[i]:
                    gradient = bits.view(torch.float32)
                    found = folded[i]
                    folded[i] = gradient.clone() if found is None else found.add_(gradient)
        return [
            None if sum_ is None else sum_.view(slot.parameter.shape)
            for sum_, slot in zip(folded, self._slots, strict=True)
        ]
