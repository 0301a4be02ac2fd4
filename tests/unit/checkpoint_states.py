"""Models and optimizers of many kinds, saved and loaded in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightkeeper.checkpoint.content import Names, wholes
from lightkeeper.checkpoint.manifest import Manifest, State
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.checkpoint.restoring import Restored, restore
from lightkeeper.checkpoint.writing import write
from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.snapshot import Snapshotter


class Counting(nn.Module):
    """Has an extra state, a buffer that is kept and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("not_kept", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "pair": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]
        assert state["pair"] == (1, 2)


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x.abs().long().clamp(0, 10)[:, 0])).float()


def plain() -> nn.Module:
    """Linear layers, BatchNorm, an extra state."""
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), Counting(), nn.Linear(6, 3))


def compiled() -> nn.Module:
    """As `torch.compile` wraps it; not run."""
    model = plain()
    model[0] = torch.compile(model[0], backend="eager")
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def checkpointed() -> nn.Module:
    """As activation checkpointing wraps it, one wrapper in another."""
    inner = nn.Sequential(nn.Linear(8, 6), checkpoint_wrapper(nn.Linear(6, 6)))
    return nn.Sequential(checkpoint_wrapper(inner), nn.Linear(6, 3))


def bf16() -> nn.Module:
    """Parameters of two dtypes."""
    return nn.Sequential(nn.Linear(8, 6).to(torch.bfloat16), nn.Linear(6, 3))


@contextmanager
def data_parallel() -> Iterator[nn.Module]:
    """As DistributedDataParallel wraps it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield nn.parallel.DistributedDataParallel(plain())
    finally:
        dist.destroy_process_group()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    """Some steps, with gradients that are made up."""
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            draw = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()


def registry_of(**objects: Any) -> StateRegistry:
    """All of their state."""
    registry = StateRegistry()
    for name, obj in objects.items():
        registry.register(name.replace("_", "-"), obj)
    return registry.whole()[0]


def entry(step: int) -> Entry:
    """The name of a state."""
    return Entry(Epoch(3, Term(1, "lh")), step)


def save(path: Path, step: int = 7, load: bool = True, **objects: Any) -> Manifest:
    """Saves them to a folder that is to be made; as rank 0 of one."""
    registry = registry_of(**objects)
    snapshotter = Snapshotter(registry)
    name = entry(step - 1)
    snapshot = snapshotter.begin(name).wait()
    path.mkdir(parents=True)
    written = write(path, snapshot, wholes(registry), Names(registry), registry.differing(), Ranks(1), load)
    snapshotter.release(name)
    return Manifest(
        step=step, state=State(3, 1, "lh", step - 1), job="j", group="g0", incarnation="1", wall=1.0, ranks=1, seed=1,
        microbatches=6 * step, held=written.held, files=written.files, bytes=written.bytes, loaded=written.loaded,
    )  # fmt: skip


def load(path: Path, manifest: Manifest, **objects: Any) -> Restored:
    """Loads them in place."""
    return restore(path, manifest, Names(registry_of(**objects)), Ranks(1))


def fingerprint(**objects: Any) -> str:
    """Of everything in them, names and exact types included."""
    return registry_of(**objects).fingerprint()


def quietly(do: Any) -> Any:
    """What torch says of a load without process group is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return do()
