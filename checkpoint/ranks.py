"""The ranks of a group among themselves while they save or load: apart from training, over a group of their own."""

from __future__ import annotations

import datetime
from typing import Any, TypeVar

import torch.distributed as dist

from lightkeeper.errors import UsageError

T = TypeVar("T")
_TIMEOUT = datetime.timedelta(days=7)  # a storage may hang for long, and then the save is told, not ended


class Ranks:
    """A process group of all ranks of this group; none for a group of one rank.

    Args:
        ranks: how many there are.

    Raises:
        UsageError: there are several, and the script has not begun `torch.distributed`.
    """

    def __init__(self, ranks: int) -> None:
        self.group: Any = None
        self.rank, self.size = 0, ranks
        if ranks == 1:
            return
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != ranks:
            raise UsageError(
                f"checkpoints of a group of {ranks} ranks need their process group: call "
                "torch.distributed.init_process_group() before lightkeeper.Checkpoints(...)"
            )
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self.rank = dist.get_rank()

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def all(self, mine: T) -> list[T]:
        """What every rank gives, in their order; every rank calls it.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def of_first(self, mine: T) -> T:
        """What rank 0 gives; every rank calls it."""
        return self.all(mine)[0]
