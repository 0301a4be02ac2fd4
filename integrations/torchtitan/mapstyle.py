"""A dataloader for torchtitan over a map-style data set: which samples a batch holds is a pure function of the step.

So nothing of it is saved or handed over: a run that is resumed, and a group that takes over a microbatch, read what
they should by its number. In a job of replica groups `lightkeeper.data.ShareLoader` reads the own share of the next
steps ahead (`MapSteps`); without fault tolerance torchtitan iterates over it as over any other (`MapDataLoader`), and
its ranks get the very same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal

import tyro
from torch.utils.data import default_collate
from torchtitan.components.dataloader import BaseDataLoader

from lightkeeper.data import DealtSampler, ShareLoader
from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.data import Batch, StepLoader
from lightkeeper.manager.trainer import Manager


class MapDataLoader(BaseDataLoader):
    """Batches of a map-style data set, one rank's part of them.

    Batch n of rank r of W has samples (n W + r) B to (n W + r + 1) B of an endless row: the data set in a seeded order,
    then again in another. With replica groups the same row is dealt by step, microbatch and place.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What is read, and how."""

        dataset: Annotated[Any, tyro.conf.arg(constructor=str, metavar="NAME")] = ""
        """A function, or its dotted name: given ``tokenizer``, ``seq_len`` and ``path`` it makes a map-style data set,
        whose samples are ``(inputs, labels)``, `inputs` a dict with "input"."""

        collate: Annotated[Callable[[list[Any]], Any], tyro.conf.Suppress] = default_collate
        """Makes ``(inputs, labels)`` of a list of samples."""

        seed: int = 0
        """Of the order, and of the random state before each sample."""

        infinite: bool = True
        """Read the data set again and again; else once, and the run ends before the step that lacks samples."""

        num_workers: int = 2
        """Processes of each rank; 0 makes each batch when it is asked for."""

        prefetch: int | None = None
        """Batches that are there or being made, at most; two for each worker, and 8, if not given."""

        context: Literal["fork", "forkserver", "spawn"] = "fork"
        """How the processes are started."""

        pin_memory: bool = False
        """Copy batches to page-locked memory."""

        def samples(self, tokenizer: Any, seq_len: int) -> Any:
            """The data set.

            Raises:
                UsageError: there is no such function, or what it makes has no length.
            """
            make = self.dataset if callable(self.dataset) else _named(self.dataset)
            dataset = make(tokenizer=tokenizer, seq_len=seq_len, path=self.dataset_path)
            if not hasattr(dataset, "__len__"):
                raise UsageError(f"the data set of MapDataLoader, a {type(dataset).__name__}, has no length")
            return dataset

        def loader(self, dataset: Any, sampler: DealtSampler, manager: Manager | None = None) -> ShareLoader:
            """Reads it ahead."""
            return ShareLoader(
                dataset, sampler, manager, collate=self.collate, workers=self.num_workers, prefetch=self.prefetch,
                seed=self.seed, context=self.context, pin_memory=self.pin_memory,
            )  # fmt: skip

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        seq_len: int = 0,
        local_batch_size: int = 1,
        **_: Any,
    ) -> None:
        dataset = config.samples(tokenizer, seq_len)
        size = local_batch_size * dp_world_size
        sampler = DealtSampler(len(dataset), size, 1, config.seed, rank=dp_rank, world_size=dp_world_size)
        self._until = None if config.infinite else len(dataset) // size
        self._loader = config.loader(dataset, sampler)
        self._read = 0

    def __iter__(self) -> Iterator[Batch]:
        """From where it stands."""
        while self._until is None or self._read < self._until:
            inputs, labels = self._loader.batch(self._read, 0)
            self._read += 1
            yield inputs, labels
        if self._until:
            self._read = 0  # a validator iterates again

    def state_dict(self) -> dict[str, Any]:
        """How many batches were read."""
        return {"read": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after so many."""
        self._read = state_dict.get("read", 0)


class MapSteps(StepLoader):
    """The same in a job of replica groups.

    Args:
        config: what is read, and how.
        slots: microbatches of a step.
        places: data-parallel ranks of a group.
        tokenizer: torchtitan's.
        seq_len: of a sample.
        local_batch_size: samples that a rank has of a microbatch.
    """

    def __init__(
        self,
        config: MapDataLoader.Config,
        slots: int,
        places: int,
        *,
        tokenizer: Any = None,
        seq_len: int = 0,
        local_batch_size: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        self._config, self._slots = config, slots
        self._dataset = config.samples(tokenizer, seq_len)
        self._sampler = DealtSampler(len(self._dataset), local_batch_size * places, slots, config.seed)

    def _bound(self, manager: Manager) -> int:
        self._loader = self._config.loader(self._dataset, self._sampler, manager)
        return self._slots

    def _has(self, step: int, k: int) -> bool:
        read = self._sampler.consumed_before(step) + (k + 1) * self._sampler.size
        return self._config.infinite or read <= self._sampler.n

    def _look(self, step: int, k: int) -> Batch:
        inputs, labels = self._loader.batch(step, k, keep=True)
        return inputs, labels

    def _take(self, step: int, k: int) -> Batch:
        inputs, labels = self._loader.batch(step, k)
        return inputs, labels

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the step's number says it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing was saved."""


def _named(name: str) -> Callable[..., Any]:
    """The function of a dotted name."""
    module, _, function = name.rpartition(".")
    if not module:
        raise UsageError(f"dataloader.dataset is {name!r}: give the dotted name of a function that makes the data set")
    try:
        make = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise UsageError(f"dataloader.dataset is {name!r}: {error}") from None
    if not callable(make):
        raise UsageError(f"dataloader.dataset is {name!r}: {module} has no function {function}")
    found: Callable[..., Any] = make
    return found
