"""Buffers that the forward pass changes, made part of the entry: such as BatchNorm's running statistics.

Every microbatch starts from the buffers as they were when the step began, and what it changes is added up over all
groups; at the commit the buffers move by the mean of that. So they do not depend on who computed what, and a group
that replays the entry has the same. It is as if the layer had seen the step as one batch, with the mean of the
microbatches' statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightkeeper.errors import UsageError

EXTRA = "lightkeeper.buffers"


class AveragedBuffers:
    """Some buffers of the model, and what they were when the step began, which is what is copied to a joiner.

    Args:
        modules: whose buffers.
        patterns: of their names ("*.running_mean").

    Raises:
        UsageError: a pattern that fits no buffer.
    """

    def __init__(self, modules: Sequence[nn.Module], patterns: Sequence[str]) -> None:
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self.names: set[str] = set()  # each within its module
        for number, module in enumerate(modules):
            for path, _ in module.named_buffers():
                if any(fnmatchcase(path, pattern) for pattern in patterns):
                    owner, _, attribute = path.rpartition(".")
                    self._owners[f"{number}.{path}"] = (module.get_submodule(owner), attribute)
                    self.names.add(path)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise UsageError(f"average_buffers: the model has no buffer {pattern!r}")
        self._base = {name: buffer.detach().clone() for name, buffer in self._buffers()}
        self._computing = False

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(base.numel() for base in self._base.values())

    def microbatch(self, contribute: Callable[[torch.Tensor], None]) -> None:
        """A microbatch starts: what the one before it changed is contributed, float64[numel]."""
        self.computed(contribute)
        self._computing = True

    def computed(self, contribute: Callable[[torch.Tensor], None]) -> None:
        """No further microbatch is known: what the last one changed is contributed."""
        if self._computing:
            changes = [(now.double() - self._base[name].double()).reshape(-1) for name, now in self._buffers()]
            contribute(torch.cat(changes))
        self._computing = False
        self._write()

    def commit(self, changes: torch.Tensor, total: int) -> None:
        """Moves the buffers by the mean of what all microbatches changed.

        Args:
            changes: the sum over all groups, float64[numel].
            total: number of parts of microbatches in the step.
        """
        parts = changes.split([base.numel() for base in self._base.values()])
        for base, change in zip(self._base.values(), parts, strict=True):
            moved = base.double() + (change / total).view_as(base).to(base.device)
            base.copy_(moved if base.is_floating_point() else moved.round())
        self._write()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The buffers as they were when the step began."""
        return dict(self._base)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes another group's."""
        for name, base in self._base.items():
            base.copy_(state[name])
        self._write()

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, getattr(owner, attribute)) for name, (owner, attribute) in self._owners.items()]

    def _write(self) -> None:
        with torch.no_grad():
            for name, buffer in self._buffers():
                buffer.copy_(self._base[name])
