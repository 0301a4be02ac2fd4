"""A loop that saves by `lightkeeper.Checkpoints` and begins from what was saved, on a storage that may misbehave."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

from loops import Tally, Trace, digest, forward, make, per_step, scalars, schedule_of
from misbehaviour import Behaviour
from torch import nn

import lightkeeper
from lightkeeper.checkpoint import saver


def saving(o: dict[str, Any]) -> None:
    """The loop of `loops.healing`, with checkpoints; what it begins with is in its trace."""
    trace = Trace(o["trace"])
    misbehaves(o)
    model, optimizer = make(o)
    schedule = schedule_of(o, optimizer)
    tally = Tally(trace)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()})
    if schedule is not None:
        manager.register("schedule", schedule)
    manager.register("tally", tally)
    samples = {"samples": lambda step: 4 * sum(map(total_of(o), range(step)))}
    checkpoints = lightkeeper.Checkpoints(manager, **{**samples, **o["checkpoints"]})
    begun = checkpoints.load()
    trace("loaded", begun, digest(model, optimizer), scalars(optimizer, schedule), tally.steps, buffers(model))
    awaits(o["begin"])
    behaviour = Behaviour(o["behave"], manager, optimizer, trace)
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        trace("begins", step.index, step.live, step.lead)
        behaviour.step_begins(step, model)
        optimizer.zero_grad()
        for k in step.microbatches():
            trace("forward", step.index, k)
            loss = forward(model, step.index, k)
            time.sleep(0.002 if o["hurry"] and os.path.exists(o["hurry"]) else o["delay"])
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        tally.add(float(step.reduced["loss"]))
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]))
        trace("scalars", step.index, scalars(optimizer, schedule))
        trace("tally", step.index, tally.steps, tally.mean.tolist())
        trace("buffers", step.index, buffers(model))
    trace.done(model, optimizer)


def total_of(o: dict[str, Any]) -> Callable[[int], int]:
    """Microbatches by step."""
    found = per_step(o["microbatches"])
    return (lambda step: found) if isinstance(found, int) else found


def buffers(model: nn.Module) -> str:
    """Digest of the buffers."""
    return hashlib.sha256(b"".join(b.numpy().tobytes() for b in model.buffers())).hexdigest()[:16]


def awaits(path: str) -> None:
    """Returns once this file is there, if one is named."""
    while path and not os.path.exists(path):
        time.sleep(0.01)


def misbehaves(o: dict[str, Any]) -> None:
    """The storage of this process from now on.

    `slow_save`: seconds that every fsync takes, and every beginning of a deletion. `stuck`: a file; while it is there
    no fsync returns. `broken`: a file; while it is there the saving thread raises what nobody foresaw.
    """
    real_fsync, real_rmtree = os.fsync, shutil.rmtree

    def fsync(handle: int) -> None:
        while o["stuck"] and os.path.exists(o["stuck"]):
            time.sleep(0.01)
        time.sleep(o["slow_save"])
        real_fsync(handle)

    def rmtree(path: Any, *arguments: Any, **how: Any) -> None:
        time.sleep(o["slow_save"])
        real_rmtree(path, *arguments, **how)

    os.fsync, shutil.rmtree = fsync, rmtree  # type: ignore[assignment]
    real_write = saver.write

    def write(*arguments: Any) -> Any:
        if o["broken"] and os.path.exists(o["broken"]):
            raise LookupError("nobody foresaw this")
        return real_write(*arguments)

    saver.write = write


LOOPS = {"saving": saving}
