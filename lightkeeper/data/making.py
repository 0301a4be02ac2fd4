"""How one batch is made from its samples, in a worker or here: the same numbers wherever that is."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightkeeper.manager.randomness import COLLATE, seed_sample

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Task:
    """A batch to be made.

    Attributes:
        step: index of the step.
        k: index of the microbatch.
        first: number of the first sample in the whole microbatch, which the group's ranks may have split.
        indices: of the samples in the data set.
    """

    step: int
    k: int
    first: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A batch."""

    batch: Any


@dataclass(frozen=True)
class Failure:
    """Why there is no batch.

    Attributes:
        index: of the sample that failed; None if the samples were there and could not be put together or sent.
        kind: name of the exception's class.
        message: its text.
        trace: its traceback.
    """

    index: int | None
    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class Recipe:
    """Everything that making a batch needs.

    Attributes:
        dataset: map-style: ``dataset[index]``, or all at once by ``dataset.__getitems__(indices)``, if it has that.
        collate: makes a batch of a list of samples.
        seed: of the random state for each sample.
        worker_init: called with the worker's number in each worker first.
    """

    dataset: Any
    collate: Collate
    seed: int
    worker_init: Callable[[int], None] | None = None

    def make(self, task: Task) -> Made | Failure:
        """Makes the batch; whatever the data set raises becomes a `Failure`.

        The random state is set from (seed, step, microbatch, the sample's number in it) before each sample, and before
        the samples are put together; if the data set gives them all at once, by that of the first.
        """
        at: int | None = None
        try:
            if getattr(self.dataset, "__getitems__", None):
                seed_sample(self.seed, task.step, task.k, task.first)
                found = self.dataset.__getitems__(list(task.indices))
            else:
                found = []
                for offset, at in enumerate(task.indices):
                    seed_sample(self.seed, task.step, task.k, task.first + offset)
                    found.append(self.dataset[at])
            at = None
            seed_sample(self.seed, task.step, task.k, COLLATE)
            return Made(self.collate(found))
        except Exception as error:  # the user's code, whatever it raises: told where the batch is asked for
            return failure_of(error, at)


def failure_of(error: BaseException, index: int | None = None) -> Failure:
    """An exception, ready to be sent."""
    return Failure(index, type(error).__name__, str(error), traceback.format_exc())


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Puts the random state of torch (CPU), `random` and numpy back as it was."""
    numpy = sys.modules.get("numpy")
    state, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def describe(task: Task) -> str:
    """``microbatch 2 of step 3 (samples 5, 17, 3, ...)``."""
    return f"microbatch {task.k} of step {task.step} (samples {_few(task.indices)})"


def _few(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
