"""Batches by step and microbatch, where torchtitan iterates over a loader of each data-parallel rank.

A loader of the user's is built for each microbatch slot and place in the group, as if it were a data-parallel rank of
its own: so a run of G groups with a microbatch for each reads exactly what torchtitan's HSDP reads on as many ranks.
Which group iterates over it changes with the membership (`lightkeeper.data.StreamLoader`). `mapstyle.py` has what is
not iterated over at all.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX

from lightkeeper.data import StreamLoader
from lightkeeper.data.positions import Turns
from lightkeeper.data.states import STATE_BYTES_MAX
from lightkeeper.data.streams import every_for
from lightkeeper.data.workers import part_from_sockets
from lightkeeper.errors import UsageError
from lightkeeper.manager.processes import die_with_parent
from lightkeeper.manager.state import codec
from lightkeeper.manager.step import Step
from lightkeeper.manager.trainer import Manager
from lightkeeper.words import say

ENDED = "data ended"
STATES_NUMEL_MAX = 1 << 16  # of an entry: half a MiB; with more streams their states take turns
STATE_KB_MAX = STATE_BYTES_MAX >> 10

Batch = tuple[dict[str, Any], torch.Tensor]


def valid_in(labels: torch.Tensor) -> int:
    """How many labels count in the loss."""
    return int((labels != IGNORE_INDEX).sum())


class StepLoader(BaseDataLoader):
    """What the trainer asks for batches. Bound to a job once there is one: torchtitan builds it long before."""

    def __init__(self) -> None:
        self._reading_s: dict[tuple[int, int], float] = {}
        self._last_s = 0.0
        self._streams = 0

    def bind(self, manager: Manager) -> None:
        """Makes it the job's; before its first step."""
        self._streams = manager.place.count * self._bound(manager)
        manager.extra(ENDED, dtype=torch.int64, before=self._missing)

    def batch(self, step: int, k: int) -> Batch:
        """Inputs and labels of this rank's part of a microbatch."""
        with self._timed(step, k):
            inputs, labels = self._take(step, k)
        self._last_s = self._reading_s.pop((step, k))
        return inputs, labels

    def tokens(self, step: int, k: int) -> int:
        """Labels that count in this rank's part of a microbatch, 0 if there is none; it is kept for `batch`."""
        with self._timed(step, k):
            return valid_in(self._look(step, k)[1]) if self._has(step, k) else 0

    def reading_s(self) -> float:
        """Seconds that the last batch took, from the source to the trainer."""
        return self._last_s

    def ended(self, step: Step) -> bool:
        """Whether the data ends before this step: the same in all groups, which say so, and have to cancel it."""
        missing = int(step.before[ENDED])
        if missing:
            say(
                f"lightkeeper: the data ends before step {step.index}: {missing} of {self._streams} parts of its "
                f"microbatches have no batch; {step.index} steps were done"
            )
        return missing > 0

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{type(self).__name__} is asked for batches by step and microbatch, not iterated over")

    def _missing(self, step: int, k: int) -> int:
        """1 if there is no such microbatch."""
        with self._timed(step, k):
            return 0 if self._has(step, k) else 1

    @contextmanager
    def _timed(self, step: int, k: int) -> Iterator[None]:
        """On the clock of this microbatch, whoever asks for it first."""
        start = time.perf_counter()
        yield
        self._reading_s = {key: spent for key, spent in self._reading_s.items() if key[0] == step}
        self._reading_s[step, k] = self._reading_s.get((step, k), 0.0) + time.perf_counter() - start

    @abstractmethod
    def _bound(self, manager: Manager) -> int:
        """Binds it; returns the microbatches of a step."""

    @abstractmethod
    def _has(self, step: int, k: int) -> bool:
        """Whether there is such a microbatch; reads it."""

    @abstractmethod
    def _look(self, step: int, k: int) -> Batch:
        """The microbatch, kept for `_take`."""

    @abstractmethod
    def _take(self, step: int, k: int) -> Batch:
        """The microbatch."""


@dataclass(frozen=True)
class SlotConfig:
    """Stands in for a dataloader's config where torchtitan's trainer builds the loader.

    Attributes:
        inner: the config.
        slots: microbatches of a step.
        state_kb: see `SlotStreams`.
    """

    inner: Any
    slots: int
    state_kb: int

    def build(self, *, dp_world_size: int, dp_rank: int, **more: Any) -> StepLoader:
        """As torchtitan asks for the loader of one data-parallel rank of the group."""
        from lightkeeper.integrations.torchtitan.mapstyle import MapDataLoader, MapSteps

        if isinstance(self.inner, MapDataLoader.Config):
            return MapSteps(self.inner, self.slots, dp_world_size, **more)
        more.pop("snapshot_every_n_steps", None)  # states are asked for as often as they travel
        return SlotStreams(self, dp_world_size, dp_rank, more)

    def to_dict(self) -> dict[str, Any]:
        """The loader's own."""
        return dict(self.inner.to_dict())


class SlotStreams(StepLoader):
    """A loader for every slot k and place p, built as data-parallel rank ``k * places + p`` of ``slots * places``.

    Only the loaders of slots that are read here are built.

    Args:
        config: of whom it stands in for.
        places: data-parallel ranks of a group.
        place: this rank's among them.
        more: what else torchtitan's trainer gives to a loader.
    """

    @classmethod
    def around(cls, config: Any, slots: int, state_kb: int = 16) -> SlotConfig:
        """The stand-in for a loader's config.

        Args:
            config: torchtitan's, or anybody's that builds a `BaseDataLoader`.
            slots: microbatches of a step.
            state_kb: KiB, packed, that the state of a loader may have in an entry; 0 if none travels.

        Raises:
            UsageError: for a number of KiB that no entry has room for.
        """
        if not 0 <= state_kb <= STATE_KB_MAX:
            raise UsageError(f"fault_tolerance.stream_state_kb is {state_kb}: 0 (none travels) to {STATE_KB_MAX}")
        return SlotConfig(config, slots, state_kb)

    def __init__(self, config: SlotConfig, places: int, place: int, more: dict[str, Any]) -> None:
        super().__init__()
        self._config, self._places, self._place, self._more = config, places, place, more
        self._loader: _Streams | None = None
        self._loaded: dict[str, Any] | None = None

    def _bound(self, manager: Manager) -> int:
        slots = self._config.slots
        state_bytes = self._state_bytes()
        turns = every_for(Turns(self._places, slots, 1), state_bytes, STATES_NUMEL_MAX)
        self._loader = _Streams(manager, self._stream, slots, state_bytes=state_bytes, state_every=turns)
        if self._loaded is not None:
            self._loader.load_state_dict(self._loaded)
        return slots

    def _state_bytes(self) -> int:
        """How much of a state may travel; none of one that is a pickle, which nobody here reads from a peer."""
        kind = getattr(self._config.inner, "_owner", None)
        pickles = isinstance(kind, type) and issubclass(kind, ParallelAwareDataloader)
        if not self._config.state_kb or not pickles or _state_is_torchtitans(kind):
            return self._config.state_kb << 10
        assert kind is not None
        say(
            f"lightkeeper: the states of {kind.__name__} do not travel, since it has a state_dict of its own around a "
            "pickle: a group that takes a slot over reads it from its beginning"
        )
        return 0

    def _stream(self, slot: int) -> _LoaderStream:
        places = self._places
        loader = self._config.inner.build(
            dp_world_size=self._config.slots * places, dp_rank=slot * places + self._place, **self._more
        )
        if isinstance(loader, DataLoader) and loader.num_workers:
            loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn)
        return _LoaderStream(loader)

    @property
    def _open(self) -> _Streams:
        assert self._loader is not None, "bind() comes first"
        return self._loader

    def _has(self, step: int, k: int) -> bool:
        return self._open.has(step, k)

    def _look(self, step: int, k: int) -> Batch:
        inputs, labels = self._open.batch(step, k)
        return inputs, labels

    _take = _look

    # ------------------------------------------------------------ torchtitan's checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where all slots' loaders stand, and the states of this place: bytes, under a name of the place's own.

        Without a job it is the shape of what will be loaded: empty bytes.
        """
        state = b"" if self._loader is None else json.dumps(codec.encode(self._loader.state_dict(), "data")).encode()
        return {f"place_{self._place}": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there, with any number of groups that share as many microbatches.

        Raises:
            UsageError: it is of another number of microbatches or places.
        """
        data = state_dict.get(f"place_{self._place}")
        if not data:
            return
        self._loaded = codec.decode(json.loads(data))
        if self._loader is not None:
            self._loader.load_state_dict(self._loaded)


class _Streams(StreamLoader):
    def advice(self, size: int) -> str:
        kb = -(-size // 1024)
        return f", or give --fault_tolerance.stream_state_kb {kb}" if kb <= STATE_KB_MAX else ""


class _LoaderStream:
    """One loader as a stream. torchtitan's own keep their state as a pickle; here it is what that was made of."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._plain = isinstance(loader, ParallelAwareDataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> Any:
        return StatefulDataLoader.state_dict(self._loader) if self._plain else self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._plain:
            StatefulDataLoader.load_state_dict(self._loader, state)
        else:
            self._loader.load_state_dict(state)


def _state_is_torchtitans(kind: Any) -> bool:
    """Whether a loader's state is put into a pickle as `_LoaderStream` knows it."""
    own = ParallelAwareDataloader
    return bool(kind.state_dict is own.state_dict and kind.load_state_dict is own.load_state_dict)


def _begin_worker(then: Any, number: int) -> None:
    """In a loader's worker: it ends with its trainer, and holds none of its connections, which peers wait for."""
    die_with_parent()
    part_from_sockets()
    if then is not None:
        then(number)
