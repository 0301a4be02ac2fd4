"""A process group whose waits the rank's progress page shows: who waits for others is not to blame for standing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from lightkeeper.manager.groups import EpochGroup, Reduction

if TYPE_CHECKING:
    import torch


class ShownGroup:
    """See `groups.EpochGroup`.

    Args:
        group: does the work.
        waiting: shows whom this rank waits for, as `ProgressPage.waiting`.
        whom: for whom it does when it waits for this group.
    """

    def __init__(self, group: EpochGroup, waiting: Callable[[int], AbstractContextManager[None]], whom: int) -> None:
        self._group, self._waiting = group, partial(waiting, whom)
        self.slot, self.size = group.slot, group.size

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """See `groups.EpochGroup`."""
        return _ShownReduction(self._group.all_reduce(tensor), self._waiting)

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """See `groups.EpochGroup`."""
        with self._waiting():
            return self._group.all_gather(tensor, timeout_s)

    def abort(self, reason: str) -> None:
        """See `groups.EpochGroup`."""
        self._group.abort(reason)

    def close(self) -> None:
        """See `groups.EpochGroup`."""
        self._group.close()


class _ShownReduction:
    def __init__(self, reduction: Reduction, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._reduction, self._waiting = reduction, waiting

    def done(self) -> bool:
        return self._reduction.done()

    def wait(self, timeout_s: float) -> None:
        if self._reduction.done():
            self._reduction.wait(timeout_s)
            return
        with self._waiting():
            self._reduction.wait(timeout_s)
