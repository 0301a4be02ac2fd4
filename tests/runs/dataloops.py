"""Loops that read their data through the product's loaders; every sample that went into a microbatch is traced."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import sharded_loops as sharded
import torch
import torch.distributed as dist
from loops import Trace, make, per_step
from misbehaviour import Behaviour
from torch import nn
from training import fail_after_before

import lightkeeper
from lightkeeper.data import DealtSampler, ShareLoader, StreamLoader

DEFAULTS: dict[str, Any] = {
    "samples": 100,
    "size": 3,
    "workers": 1,
    "prefetch": 4,
    "load_s": 0.0,
    "leave": "",
    "state_bytes": 0,
    "trace_ready": False,
    "ends": 0,
    "fail_after_before": [],
}


class Numbers:
    """Sample i: its number, and eight values that depend on it and, as an augmentation does, on the random state."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.load_s = load_s

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(self.load_s)
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(8)


def sampler_of(o: dict[str, Any]) -> DealtSampler:
    return DealtSampler(o["samples"], o["size"], per_step(o["microbatches"]), o["seed"])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()


def linger(o: dict[str, Any]) -> None:
    time.sleep(0.002 if o["hurry"] and os.path.exists(o["hurry"]) else o["delay"])


def ask_leave(o: dict[str, Any], manager: Any) -> None:
    """Once, as soon as the file is there."""
    if o["leave"] and os.path.exists(o["leave"]):
        o["leave"] = ""
        manager.leave("the machine gives notice")


def share(o: dict[str, Any]) -> None:
    """Map-style data through a `ShareLoader`."""
    o = {**DEFAULTS, **o}
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()})
    loader = ShareLoader(
        Numbers(o["load_s"]), sampler_of(o), manager, workers=o["workers"], prefetch=o["prefetch"]
    )  # fmt: skip
    behaviour = Behaviour(o["behave"], manager, optimizer, trace)
    trace("workers", loader.workers.pids if loader.workers else [])
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        behaviour.step_begins(step, model)
        ask_leave(o, manager)
        optimizer.zero_grad()
        for k in step.microbatches():
            if o["trace_ready"]:
                trace("ready", step.index, k, (step.index, k) in loader._ahead.ready)
            ids, x = loader.batch(step.index, k)
            trace("forward", step.index, k)
            trace("ids", step.index, k, ids.tolist(), x.double().sum().item())
            loss = loss_of(model, x)
            linger(o)
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
            behaviour.after_backward(step, k)
        optimizer.step()
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]))
    loader.close()
    trace.done(model, optimizer)


class Source:
    """The stream of a slot: item n is (n, eight values that depend on slot and n); it has a state.

    It is endless, or ends after `ends` items and as many as the slot's number.
    """

    def __init__(self, slot: int, ends: int = 0) -> None:
        self.slot, self.n, self.ends = slot, 0, ends + slot if ends else 1 << 60

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        while self.n < self.ends:
            self.n += 1
            yield self.n - 1, torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * self.slot + self.n - 1))

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def stream(o: dict[str, Any]) -> None:
    """Iterable data through a `StreamLoader`; the heavier loops' faults are here too."""
    o = {**DEFAULTS, **o}
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()})
    most = o["microbatches"] if isinstance(o["microbatches"], int) else max(o["microbatches"])
    loader = StreamLoader(manager, lambda slot: Source(slot, o["ends"]), most, state_bytes=o["state_bytes"])
    if o["ends"]:
        manager.extra("ended", dtype=torch.int64, before=lambda step, k: 0 if loader.has(step, k) else 1)
    if o["fail_after_before"]:
        fail_after_before(manager, trace, o["ends"], o["fail_after_before"][0], "cancels")
    behaviour = Behaviour(o["behave"], manager, optimizer, trace)
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        behaviour.step_begins(step, model)
        ask_leave(o, manager)
        if o["ends"] and int(step.before["ended"]):
            trace("cancels", step.index, int(step.before["ended"]))
            manager.cancel()
            continue
        optimizer.zero_grad()
        for k, (n, x) in loader.over(step):
            trace("forward", step.index, k)
            trace("ids", step.index, k, n)
            loss = loss_of(model, x)
            linger(o)
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
            behaviour.after_backward(step, k)
        optimizer.step()
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]))
    trace("positions", loader.positions.tolist())
    trace.done(model, optimizer)


def split(o: dict[str, Any]) -> None:
    """Both loaders in a group of several ranks, each of which has a part of every microbatch."""
    o = {**sharded.DEFAULTS, **DEFAULTS, **o}
    trace = Trace(o["trace"])
    model, optimizer, _, place = sharded.build(o)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()}, place=place)
    here = manager.place
    loader = ShareLoader(Numbers(), sampler_of(o), manager, workers=o["workers"], prefetch=o["prefetch"])
    streams = StreamLoader(manager, lambda slot: Source(100 * here.index + slot), o["microbatches"], state_bytes=64)
    for step in manager.steps(until=o["steps"], microbatches=o["microbatches"]):
        optimizer.zero_grad()
        for k, (ids, x) in loader.over(step):
            n, y = streams.batch(step.index, k)
            trace("forward", step.index, k)
            trace("ids", step.index, k, here.index, ids.tolist(), n)
            loss = sharded.loss_of(model, torch.cat([x, y]))
            linger(o)
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total / here.count)
        optimizer.step()
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]), sharded.digest)
    loader.close()
    dist.destroy_process_group()


LOOPS = {"share": share, "stream": stream, "split": split}
