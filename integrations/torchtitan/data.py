"""One torchtitan loader for each microbatch slot, in the place of one for each data-parallel rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from lightkeeper.data import StreamLoader
from lightkeeper.manager.trainer import Manager


@dataclass(frozen=True)
class SlotConfig:
    """Stands in for a dataloader's config; see `SlotStreams`."""

    inner: Any
    slots: int

    def build(self, *, dp_world_size: int, dp_rank: int, **more: Any) -> SlotStreams:
        """As torchtitan asks for a loader of one data-parallel rank of the group."""
        more.pop("snapshot_every_n_steps", None)
        return SlotStreams(self.inner, self.slots, dp_world_size, dp_rank, more)

    def to_dict(self) -> dict[str, Any]:
        """The loader's own."""
        return dict(self.inner.to_dict())


class SlotStreams(BaseDataLoader):
    """A loader for every slot k and place p, built as data-parallel rank ``k * places + p`` of ``slots * places``."""

    @classmethod
    def around(cls, config: Any, slots: int) -> SlotConfig:
        """The stand-in for `config`, with so many microbatches a step."""
        return SlotConfig(config, slots)

    def __init__(self, inner: Any, slots: int, places: int, place: int, more: dict[str, Any]) -> None:
        self._inner, self._slots, self._places, self._place, self._more = inner, slots, places, place, more
        self._reading_s = 0.0

    def bind(self, manager: Manager) -> None:
        """Makes the streams those of a job; before its first step."""
        self._loader = StreamLoader(manager, self._make, self._slots)

    def _make(self, slot: int) -> Any:
        rank = slot * self._places + self._place
        return self._inner.build(dp_world_size=self._slots * self._places, dp_rank=rank, **self._more)

    def batch(self, step: int, k: int) -> tuple[dict[str, Any], Any]:
        """Inputs and labels of this rank's part of a microbatch."""
        start = time.perf_counter()
        batch: tuple[dict[str, Any], Any] = self._loader.batch(step, k)
        self._reading_s = time.perf_counter() - start
        return batch

    def reading_s(self) -> float:
        """Seconds that the last batch took."""
        return self._reading_s

    def tokens(self, step: int, k: int) -> int:
        """Labels that count in this rank's part of a microbatch."""
        return int((self.batch(step, k)[1] != IGNORE_INDEX).sum())

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("batches are asked for by step and microbatch")

    def state_dict(self) -> dict[str, Any]:
        """Nothing yet."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing yet."""
