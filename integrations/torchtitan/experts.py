"""How many tokens each expert got in a step, over all groups: what torchtitan moves the experts' biases by.

torchtitan counts tokens in a buffer of each mixture-of-experts layer, and before the optimizer's step a hook of its
own sums the buffers over the ranks of the data-parallel mesh and moves the biases. That mesh ends at the group. So the
counts of a microbatch are taken out of the buffers as soon as it is computed, and travel in the entry; before the
optimizer's step the buffers are given what the entry has for the whole step: one rank of the mesh the total, the others
nothing. The hook, left as it is, then comes to the same in every group, also in one that computed nothing or replays.

An extra of its own, instead of the buffers themselves: an interrupted or repeated step must not count twice, and
what is in a buffer is not in the entry. (The buffers are no persistent ones: they are neither healed nor compared.)
Checkpointed activations are counted again when they are computed again; the hook halves that, and so it does with the
total.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from lightkeeper.manager.step import Step

LOADS = "expert loads"


class ExpertLoads:
    """The counters of a model's layers with balanced experts.

    Args:
        parts: the model's.
        dims: of the group.
    """

    def __init__(self, parts: Iterable[nn.Module], dims: ParallelDims) -> None:
        layers = [layer for part in parts for layer in part.modules() if _balances(layer)]
        self._counters: list[torch.Tensor] = [_local(layer.tokens_per_expert_E) for layer in layers]
        mesh = dims.get_optional_mesh("loss")
        self._holds = mesh is None or mesh.get_local_rank() == 0

    @property
    def numel(self) -> int:
        """Experts of all layers; 0 if none are balanced."""
        return sum(counter.numel() for counter in self._counters)

    def clear(self) -> None:
        """A step begins: nothing is counted."""
        for counter in self._counters:
            counter.zero_()

    def computed(self, step: Step) -> None:
        """A microbatch has been computed: its counts go into the entry."""
        if self._counters:
            step.contribute(LOADS, torch.cat([counter.to(torch.int64) for counter in self._counters]))
            self.clear()

    def committed(self, step: Step) -> None:
        """The step is to be applied: the counters hold it whole, for torchtitan's hook."""
        if not self._counters:
            return
        totals = step.reduced[LOADS].split([counter.numel() for counter in self._counters])
        for counter, total in zip(self._counters, totals, strict=True):
            counter.copy_(total) if self._holds else counter.zero_()


def _balances(layer: Any) -> bool:
    return getattr(layer, "load_balance_coeff", None) is not None and hasattr(layer, "tokens_per_expert_E")


def _local(counter: Any) -> torch.Tensor:
    """What torchtitan's hook reads of it."""
    local: torch.Tensor = counter._local_tensor if isinstance(counter, DTensor) else counter
    return local
