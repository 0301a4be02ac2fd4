"""What one group does for all of them: whoever leads saves, writes figures down and validates.

The lead is the group in the lowest slot of those at work; when it is lost, or leaves, the next one goes on. Here is
whom the parts ask (`Where`), and the two small parts: validation, and the profiler, which every group has for itself.
Checkpoints are in `checkpoint.py`, TensorBoard and Weights & Biases in `figures.py`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.validate import BaseValidator
from torchtitan.tools import filesystem


class Where(Protocol):
    """Where a rank's run stands.

    Attributes:
        live: whether the step at hand was done with the others, not replayed or followed.
        lead: whether this group leads in it: true on all of its ranks.
        step: torchtitan's count: steps done, the one at hand among them.
        group: this group's name.
    """

    @property
    def live(self) -> bool: ...  # noqa: D102
    @property
    def lead(self) -> bool: ...  # noqa: D102
    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> str: ...  # noqa: D102

    def expect(self, phase: str) -> AbstractContextManager[None]:
        """What the training thread does meanwhile is no step: "checkpoint", "evaluation" or "profile"."""


def leads(where: Where) -> bool:
    """Whether what is done once for all groups is done here, after the step at hand."""
    return where.live and where.lead


def per_group_folders(config: Any, group: str) -> Any:
    """A copy of a trainer's config in which every group writes into a folder of its own, except checkpoints.

    Args:
        config: a `Trainer.Config`.
        group: name of the group.

    Returns:
        Its `dump_folder` is a folder of that name in the one given, and its `checkpoint.folder` says in full what it
        was relative to that: it is the same in all groups. (A remote address stays what it is.)
    """
    config, checkpoint = copy.copy(config), copy.copy(config.checkpoint)
    shared = config.dump_folder if filesystem.is_remote(config.dump_folder) else os.path.abspath(config.dump_folder)
    checkpoint.folder = filesystem.join(shared, checkpoint.folder)
    config.checkpoint = checkpoint
    config.dump_folder = filesystem.join(config.dump_folder, group)
    return config


# ------------------------------------------------------------ validation


class LeadValidator(BaseValidator):
    """Validates where the run is led; the other groups go on, and wait in the next step's reduce.

    Args:
        inner: the validator that the config built.
        where: the run.
    """

    def __init__(self, inner: BaseValidator, where: Where) -> None:
        super().__init__(config=inner.config)
        self._inner, self._where = inner, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def should_validate(self, step: int) -> bool:
        """As the inner one says, where the run is led."""
        return leads(self._where) and bool(self._inner.should_validate(step))

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validates, and leaves model and random state as they were: the next step is the same in all groups."""
        if leads(self._where):
            with self._where.expect("evaluation"), as_before(model_parts):
                self._inner.validate(model_parts, step)


@contextlib.contextmanager
def as_before(model_parts: list[nn.Module]) -> Iterator[None]:
    """Forward passes inside leave no trace.

    Modes, buffers (a mixture of experts counts its tokens in one, also while it evaluates) and random state are put
    back. And what `fully_shard` gathered is given up: else the root's parameters would stay whole until the next
    backward pass, and a group that has no microbatch in the next step has none.
    """
    modules = [module for part in model_parts for module in part.modules()]
    modes = [(module, module.training) for module in modules]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for part in model_parts for buffer in part.buffers()]
    state = _random_state()
    try:
        yield
    finally:
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
        _set_random_state(*state)


def _random_state() -> tuple[Any, ...]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), devices, random.getstate(), np.random.get_state()


def _set_random_state(cpu: torch.Tensor, devices: list[torch.Tensor], python: Any, numpy: Any) -> None:
    torch.set_rng_state(cpu)
    if devices:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(python)
    np.random.set_state(numpy)


# ------------------------------------------------------------ profiler


class MarkedProfiler:
    """torchtitan's profiler, told the step that a heal led to, and marked while it writes. Every group has its own.

    Args:
        inner: the profiler that the config built.
        where: the run.
    """

    def __init__(self, inner: Any, where: Where) -> None:
        self._inner, self._where = inner, where

    def __enter__(self) -> MarkedProfiler:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool:
        with self._marked():
            return bool(self._inner.__exit__(*error))

    def step(self) -> None:
        """The step at hand is done."""
        for profiler in self._at_work():
            profiler.step_num = self._where.step - 1  # it counts on; a heal has moved the step by more than one
        with self._marked():
            self._inner.step()

    def _at_work(self) -> list[Any]:
        both = (self._inner.torch_profiler, self._inner.memory_profiler)
        return [profiler for profiler in both if profiler is not None]

    def _marked(self) -> AbstractContextManager[None]:
        return self._where.expect("profile") if self._at_work() else contextlib.nullcontext()


class MarkedProfilerConfig:
    """Stands for a config's `profiler`: builds the same, marked."""

    def __init__(self, inner: Any, where: Where) -> None:
        self._inner, self._where = inner, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def build(self, **more: Any) -> MarkedProfiler:
        """As torchtitan's trainer calls it."""
        return MarkedProfiler(self._inner.build(**more), self._where)
