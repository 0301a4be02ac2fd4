"""A loop with the facts of training, each by a word of the option `facts`, and the same loop in one plain process.

Words: tokens, scaler, clip, cosine, bf16, averages, amax, chunked, checkpoint, reentrant, compile=BACKEND, sharded.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from pathlib import Path
from typing import Any

import sharded_loops
import torch
import torch.distributed as dist
from loops import Trace, per_step, scalars
from misbehaviour import Behaviour, await_line
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import lightkeeper
from lightkeeper.manager import randomness
from lightkeeper.manager.groups import GroupFailed
from lightkeeper.manager.within import Place

BATCH_NORM = ("*running_mean", "*running_var", "*num_batches_tracked")
OVERFLOWS_EVERY = 5  # steps; the loss of microbatch 0 is infinite in the third of them


class Amax(nn.Module):
    """Scales by what the forward passes of this process have seen, as delayed float8 scaling does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax_history", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.amax_history = torch.cat([self.amax_history[1:], x.detach().abs().max().reshape(1)])
        return x


class Model(nn.Module):
    """A body and a head, so that the loss can be taken in chunks."""

    def __init__(self, width: int, dropout: float, words: set[str]) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(width)] if "averages" in words else []
        seen = [Amax()] if "amax" in words else []
        self.first = nn.Sequential(nn.Linear(8, width), *norm, *seen, nn.Tanh(), nn.Dropout(dropout))
        self.block = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 1)
        self.reentrant = "reentrant" in words
        self.checkpoints = self.reentrant or "checkpoint" in words

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return checkpoint(self.block, h, use_reentrant=self.reentrant) if self.checkpoints else self.block(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Training:
    """Model, optimizer, and what computes a microbatch and applies a step; alike in the plain process."""

    def __init__(self, o: dict[str, Any]) -> None:
        pairs = dict(word.partition("=")[::2] for word in o["facts"].split())
        self.words = set(pairs)
        self.model: Any = Model(o["width"], o["dropout"], self.words)
        if "compile" in self.words:
            self.model = torch.compile(self.model, backend=pairs["compile"])
        self.mesh = None
        if "sharded" in self.words and "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
            self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model, mesh=self.mesh)
        self.place = Place(0, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=o["lr"])
        self.schedule = None
        if "cosine" in self.words:
            warm, whole = 5, o["steps"]
            rate = lambda done: min((done + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * done / whole))  # noqa: E731
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled="scaler" in self.words)

    def tokens(self, step: int, k: int) -> int:
        """This place's part of the microbatch's tokens."""
        whole = 3 + (7 * step + 5 * k) % 6
        return len(range(self.place.index, whole, self.place.count))

    def compute(self, step: int, k: int, divisor: float) -> float:
        """Forward and backward of a microbatch; its part of the step's loss."""
        rows = 3 + (7 * step + 5 * k) % 6 if "tokens" in self.words else 4
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1000 * step + k))
        x = x[self.place.index :: self.place.count]
        y = x.sum(1, keepdim=True)
        whole = divisor if "tokens" in self.words else rows * divisor
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in self.words):
            if "chunked" in self.words:
                return self._chunked(x, y, whole)
            loss = (self.model(x) - y).float().pow(2).sum() / whole
        if "scaler" in self.words and step % OVERFLOWS_EVERY == 2 and k == 0:
            loss = loss * math.inf
        self.scaler.scale(loss * self.place.count).backward()  # FSDP takes the mean over the ranks
        value = float(loss.detach())
        return value if math.isfinite(value) else 0.0

    def _chunked(self, x: torch.Tensor, y: torch.Tensor, whole: float) -> float:
        h = self.model.body(x)
        cut = h.detach().requires_grad_()
        total = 0.0
        for one, target in zip(cut.split(2), y.split(2), strict=True):
            loss = (self.model.head(one) - target).float().pow(2).sum() / whole
            self.scaler.scale(loss).backward()
            total += float(loss.detach())
        h.backward(cut.grad)
        return total

    def apply(self) -> None:
        if "clip" in self.words:
            self.scaler.unscale_(self.optimizer)
            lightkeeper.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()

    def scalars(self) -> str:
        return scalars(self.optimizer, self.schedule) + repr(sorted(self.scaler.state_dict().items()))

    def buffers(self) -> str:
        """Digest of the buffers that all groups have alike."""
        names = [name for name, _ in self.model.named_buffers() if "amax" not in name]
        parts = [self.model.get_buffer(name).numpy().tobytes() for name in names]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def training(o: dict[str, Any]) -> None:
    """The user's loop; slow until the file `hurry` is there."""
    trace = Trace(o["trace"])
    t = Training(o)
    manager = lightkeeper.Manager(
        t.model, t.optimizer, seed=o["seed"], extras={"loss": ()},
        exclude=("*amax_history",) if "amax" in t.words else (),
        average_buffers=BATCH_NORM if "averages" in t.words else (), place=t.mesh,
    )  # fmt: skip
    t.place = manager.place
    manager.extra("whose", dtype=torch.int64, agreed=True)
    manager.extra("stop", dtype=torch.int64, agreed=True)
    if "tokens" in t.words:

        def count(step: int, k: int) -> int:
            trace("counted", step, k)
            if f"raise-counting:{step}" in o["behave"].split():
                raise ValueError("a bug in what counts")
            return t.tokens(step, k)

        manager.extra("tokens", dtype=torch.int64, before=count)
    if t.schedule is not None:
        manager.register("schedule", t.schedule)
    if "scaler" in t.words:
        manager.register("scaler", t.scaler)
    behaviour = Behaviour(o["behave"], manager, t.optimizer, trace)
    behaviour.heal_faults(o)
    if "fail-after-before" in behaviour.words and manager.rank == manager.place.count - 1:
        fail_after_before(manager, trace, behaviour.words["fail-after-before"], behaviour.words["await"])
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        trace("begins", step.index, step.live, step.lead, 0.0)
        behaviour.step_begins(step, t.model)
        step.agree("whose", os.getpid())
        step.agree("stop", int(step.index == behaviour.words.get("stop", -1)))
        t.optimizer.zero_grad()
        for k in step.microbatches():
            trace("forward", step.index, k)
            divisor = int(step.before["tokens"]) if "tokens" in t.words else step.total
            loss = t.compute(step.index, k, divisor)
            time.sleep(0.002 if o["hurry"] and os.path.exists(o["hurry"]) else o["delay"])
            step.contribute("loss", loss)
            behaviour.after_backward(step, k)
        t.apply()
        trace.applied(
            step.index, t.model, t.optimizer, float(step.reduced["loss"]), sharded_loops.digest if t.mesh else None
        )
        trace("scalars", step.index, t.scalars())
        before = {name: int(value) for name, value in step.before.items()}
        assert all(int(step.reduced[name]) == value for name, value in before.items())
        trace("tally", step.index, int(step.reduced["whose"]), before, t.buffers())
        if step.reduced["stop"]:
            manager.finish()
            break
    if t.mesh is None:
        trace.done(t.model, t.optimizer)
        return
    last = sharded_loops.weights(t.model)
    dist.destroy_process_group()
    trace("done", sharded_loops.digest(t.model, t.optimizer), last)


def plain_training(o: dict[str, Any]) -> None:
    """One process, without lightkeeper, does all microbatches of every step."""
    trace = Trace(o["trace"])
    t = Training(o)
    total_of = per_step(o["microbatches"])
    for step in range(o["steps"]):
        total = total_of if isinstance(total_of, int) else total_of(step)
        tokens = sum(t.tokens(step, k) for k in range(total))
        t.optimizer.zero_grad()
        base = {name: buffer.clone() for name, buffer in t.model.named_buffers()}
        after: dict[str, torch.Tensor] = {name: torch.zeros(buffer.shape).double() for name, buffer in base.items()}
        whole = 0.0
        for k in range(total):
            for name, buffer in t.model.named_buffers():
                buffer.copy_(base[name])
            randomness.seed_microbatch(o["seed"], step, k, 0)
            whole += t.compute(step, k, tokens if "tokens" in t.words else total)
            for name, buffer in t.model.named_buffers():
                after[name] += buffer.double() / total
        for name, buffer in t.model.named_buffers():
            buffer.copy_(after[name] if buffer.is_floating_point() else after[name].round())
        randomness.seed_apply(o["seed"], step)
        t.apply()
        trace.applied(step, t.model, t.optimizer, whole)
        trace("scalars", step, t.scalars())
    trace.done(t.model, t.optimizer)


def fail_after_before(manager: Any, trace: Trace, step: int, other: int, does: str = "forward") -> None:
    """The reduce at the start of `step` completes everywhere but here; the group `other` computes by then (or `does`
    what its trace says).
    """
    real = manager._before.reduce
    failed: list[int] = []

    def reduce(*arguments: Any) -> None:
        real(*arguments)
        if manager._before._step != step or failed:
            return
        failed.append(step)
        rank = f".{manager.rank}" if manager.place.count > 1 else ""
        await_line(Path(trace.path).parent / f"trace-g{other}{rank}", does, step)
        manager._before._across = manager._before._value = None
        manager._before._epoch = -1
        trace("failed-after-before", step)
        raise GroupFailed("made to fail after it had succeeded")

    manager._before.reduce = reduce


LOOPS = {"training": training, "plain_training": plain_training}
