"""Whether the data-parallel ranks of a group sum up their gradients after a microbatch.

The runtime switches it, since only it knows which microbatch of a step is the last: a microbatch computed without
and none with it after is silently missing from `p.grad` (FSDP2 keeps it elsewhere). A share may grow after a recovery:
what is computed then ends with a synchronised microbatch again, and adds to what is in `p.grad` already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightkeeper.errors import UsageError

Sync: TypeAlias = Literal["every", "last"]


class GradientSync:
    """Switches it in all modules that have such a switch.

    Args:
        modules: What is trained.
        when: "every": after every microbatch. "last": after the last one known of a step, which saves communication
            and costs memory for whole gradients.

    Raises:
        UsageError: for anything else, for "last" without a module that has the switch, and for a
            `FullyShardedDataParallel`.
    """

    def __init__(self, modules: Iterable[nn.Module], when: Sync) -> None:
        if when not in ("every", "last"):
            raise UsageError(f"sync {when!r}: give 'every' or 'last'")
        within = [part for module in modules for part in module.modules()]
        self._sharded: list[Any] = [part for part in within if _is(part, "FSDPModule")]
        self._replicated = [part for part in within if isinstance(part, DistributedDataParallel)]
        if any(_is(part, "FullyShardedDataParallel") for part in within):
            raise UsageError("FullyShardedDataParallel keeps gradients where they cannot be reduced: use fully_shard")
        if when == "last" and not self._sharded and not self._replicated:
            raise UsageError("sync='last': the model has no module of fully_shard or DistributedDataParallel")
        self.when = when
        self._behind = False

    @property
    def at_hooks(self) -> bool:
        """Whether a gradient is summed up when its hook fires; DistributedDataParallel's are when backward ends."""
        return not self._replicated

    @property
    def behind(self) -> bool:
        """Whether a microbatch was computed without, and none with it since."""
        return self._behind

    def begin(self) -> None:
        """A step begins."""
        self._behind = False

    def microbatch(self, last: bool) -> None:
        """A microbatch starts; `last` if none is known to follow it."""
        on = last or self.when == "every"
        self._behind = not on
        for part in self._sharded:
            part.set_requires_gradient_sync(on, recurse=False)
        for part in self._replicated:
            part.require_backward_grad_sync = on

    def settle(self) -> None:
        """Between two steps: what a forward pass without a backward pass gathered is let go of.

        Until then the parameters of such a module are whole copies, not the shards that belong to the state.
        """
        for part in self._sharded:
            part.reshard()


def _is(part: nn.Module, name: str) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has such a module before it is imported
    return fsdp is not None and isinstance(part, getattr(fsdp, name))
