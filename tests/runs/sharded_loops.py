"""The loops of groups of several ranks: one small model, spread over the ranks in several ways.

`layout` says how: ``fsdp`` (`fully_shard` over all ranks), ``hsdp`` (two replicas of shards), ``tp`` (tensor parallel
with sequence-parallel norms), ``fsdp-tp`` (both, 2 x 2), ``ddp`` (DistributedDataParallel), ``whole`` (one rank).
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import loops
import torch
import torch.distributed as dist
from misbehaviour import Behaviour
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lightkeeper
from lightkeeper.manager import joining, randomness
from lightkeeper.manager.groups import GroupFailed
from lightkeeper.manager.transfer.client import TransferFailed

SHAPE = (4, 4, 8)  # samples, their length, width
DEFAULTS: dict[str, Any] = {
    "layout": "fsdp",
    "sync": "every",
    "clip": 1.0,
    "parts": 2,
    "linger": 0.0,
    "checkpoints": {},
}


class Block(nn.Module):
    """A norm, two layers, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Identity()  # where tensor parallelism cuts the sequence into pieces
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to x."""
        return x + self.down(torch.tanh(self.up(self.norm(self.spread(x)))))


class Net(nn.Module):
    """Two blocks and a head; dropout where all ranks of a tensor-parallel group hold the same."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number per position."""
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


def build(o: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh | None, Any]:
    """The model spread as the layout says, its optimizer, its mesh, and the place to give to `Manager`."""
    torch.manual_seed(0)
    model: nn.Module = Net(SHAPE[-1], o["dropout"])
    layout, mesh, place = o["layout"], None, None
    if layout != "whole":
        dist.init_process_group("gloo")
    if layout == "fsdp":
        mesh = place = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        shard(model, mesh)
    elif layout == "hsdp":
        mesh = place = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        shard(model, mesh)
    elif layout == "tp":
        mesh, place = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), (0, 1)
        split(model, mesh)
    elif layout == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        place = mesh["dp"]
        split(model, mesh["tp"])
        shard(model, mesh["dp"])
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[o["optimizer"]]
    return model, kind(model.parameters(), lr=o["lr"]), mesh, place


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """`fully_shard`, block by block."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel, with norms over the sequence."""
    plan = {
        "spread": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)


def inputs(step: int, k: int) -> torch.Tensor:
    """The samples of a microbatch."""
    return torch.randn(*SHAPE, generator=torch.Generator().manual_seed(1000 * step + k))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Mean over what is given."""
    return (model(x) - x.sum(-1, keepdim=True)).pow(2).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's part of all parameters and of the optimizer's tensors; the test's own."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(local(parameter.detach()).numpy().tobytes())
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            hashed.update(name.encode() + local(value).numpy().tobytes())
    return hashed.hexdigest()[:16]


def whole_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters and of the optimizer's tensors, put together; all ranks of the group call it together."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(whole(parameter.detach()).numpy().tobytes())
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            hashed.update(name.encode() + whole(value).numpy().tobytes())
    return hashed.hexdigest()[:16]


def weights(model: nn.Module) -> list[float]:
    """Some of the whole parameters; all ranks of the group call it together."""
    return [float(x) for parameter in model.parameters() for x in whole(parameter.detach()).flatten()[:4]]


def fail_take(manager: Any, step: int, trace: loops.Trace) -> None:
    """In the first recovery of this step the epoch's group is no good for this rank, though it is for the others."""
    real = manager._epochs.take

    def take(epoch: int) -> Any:
        group = real(epoch)
        if manager.page.step == step and not failed:
            failed.append(epoch)
            trace("failed-take", epoch)
            raise GroupFailed("made to fail after it was formed")
        return group

    failed: list[int] = []
    manager._epochs.take = take


def lose_entry(step: int, trace: loops.Trace) -> None:
    """From this step on this rank finds no entry at any donor, once, while the others do."""
    real = joining.Joiner.next_entry
    lost: list[int] = []

    def next_entry(joiner: Any, after: Any, reducer: Any, wait_s: float) -> Any:
        if after.step >= step and not lost:
            lost.append(after.step)
            trace("lost", after.step)
            raise TransferFailed("made to find nothing")
        return real(joiner, after, reducer, wait_s)

    joining.Joiner.next_entry = next_entry  # type: ignore[method-assign]


def train(o: dict[str, Any]) -> None:
    """The user's loop of a sharded group."""
    o = {**DEFAULTS, **o}
    trace = loops.Trace(o["trace"])
    model, optimizer, _, place = build(o)
    manager = lightkeeper.Manager(
        model, optimizer, seed=o["seed"], extras={"loss": (), "samples": ((), torch.int64)}, place=place, sync=o["sync"]
    )
    manager.extra("counted", dtype=torch.int64, before=lambda step, k: SHAPE[0] // manager.place.count)
    manager.extra("word", agreed=True)
    behaviour = Behaviour(o["behave"] if manager.rank == o.get("rank", 0) else "", manager, optimizer, trace)
    behaviour.heal_faults(o)
    if "fail-take" in behaviour.words:
        fail_take(manager, behaviour.words.pop("fail-take"), trace)
    if "lose-entry" in behaviour.words:
        lose_entry(behaviour.words["lose-entry"], trace)
    if o["checkpoints"]:
        loaded = lightkeeper.Checkpoints(manager, **o["checkpoints"]).load()
        trace("loaded", loaded, whole_digest(model, optimizer))
    here = manager.place
    trace("place", here.index, here.count)
    for step in manager.steps(until=o["steps"], microbatches=loops.per_step(o["microbatches"])):
        trace("begins", step.index, step.live, step.lead)
        behaviour.step_begins(step, model)
        step.agree("word", 10 * step.index + manager.rank)
        optimizer.zero_grad()
        for k in step.microbatches():
            trace("forward", step.index, k)
            x = inputs(step.index, k)[here.index :: here.count]
            loss = loss_of(model, x)
            time.sleep(0.002 if o["hurry"] and os.path.exists(o["hurry"]) else o["delay"])
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total / here.count)
            step.contribute("samples", len(x))
        norm = lightkeeper.clip_grad_norm_(model.parameters(), o["clip"]) if o["clip"] else torch.zeros(())
        optimizer.step()
        assert int(step.before["counted"]) == step.total * SHAPE[0] and step.reduced["word"] == 10 * step.index
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]), digest)
        trace("norm", step.index, norm.item(), int(step.reduced["samples"]))
        if o["checkpoints"] and step.index == o["steps"] - 1:
            trace("whole", step.index + 1, whole_digest(model, optimizer))
    last = weights(model)
    if dist.is_initialized():
        dist.destroy_process_group()
    trace("done", digest(model, optimizer), last)


def gold(o: dict[str, Any]) -> None:
    """The plain loop: one process does all parts of all microbatches of every step."""
    o = {**DEFAULTS, **o, "layout": "whole"}
    trace = loops.Trace(o["trace"])
    model, optimizer, _, _ = build(o)
    total_of = loops.per_step(o["microbatches"])
    for step in range(o["steps"]):
        total = total_of if isinstance(total_of, int) else total_of(step)
        optimizer.zero_grad()
        all_of_it = 0.0
        for k in range(total):
            for part in range(o["parts"]):
                randomness.seed_microbatch(o["seed"], step, k, part)
                loss = loss_of(model, inputs(step, k)[part :: o["parts"]])
                (loss / total / o["parts"]).backward()
                all_of_it += float(loss.detach() / total / o["parts"])
        randomness.seed_apply(o["seed"], step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip"]) if o["clip"] else torch.zeros(())
        optimizer.step()
        trace.applied(step, model, optimizer, all_of_it)
        trace("norm", step, norm.item(), total * SHAPE[0])
    trace("done", loops.digest(model, optimizer), weights(model))
