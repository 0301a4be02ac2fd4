"""What runs in a trainer process of these tests: a small model in the user's loop, and the ways in which it misbehaves.

Every forward pass and every applied step is also written to a trace of the test's own, so that a claim of the event
log can be held against what the process really did. A line is one `write`, so a SIGKILL loses none.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from misbehaviour import Behaviour
from torch import nn

import lightkeeper
from lightkeeper.manager import randomness

SETTLE_S = 1.0
DEFAULTS: dict[str, Any] = {
    "trace": "",
    "steps": 10,
    "microbatches": 6,
    "delay": 0.0,
    "dropout": 0.2,
    "seed": 1,
    "width": 16,
    "lr": 1e-2,
    "optimizer": "adamw",
    "behave": "",
    "loop": "train",
    "warm_up": 0,
    "hurry": "",
    "scale": 1.0,
    "register": "",
    "replay_delay": 0.0,
    "die_in": "",
    "batch_norm": False,
    "facts": "",
    "save": "",
    "resume": "",
    "checkpoints": {},
    "slow_save": 0.0,
    "stuck": "",
    "broken": "",
    "begin": "",
}


class Trace:
    """Appends lines of JSON."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._most = 0
        gc.disable()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def __call__(self, kind: str, *values: Any) -> None:
        os.write(self._file, (json.dumps([kind, time.monotonic(), *values]) + "\n").encode())

    def applied(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float, of: Any = None
    ) -> None:
        """A step has been applied; `of` digests the state if it is not held whole here."""
        self._most = max(self._most, descriptors()) if step < 2 else self._most
        self("applied", step, (of or digest)(model, optimizer), loss)

    def done(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The script's end: nothing that the run opened after its first steps may still be open.

        Groups are taken down by threads of their own, so they get a moment; the garbage collector gets none.
        """
        until = time.monotonic() + SETTLE_S
        while (still := descriptors()) > self._most and time.monotonic() < until:
            time.sleep(0.01)
        self("descriptors", self._most, still)
        self("done", digest(model, optimizer), weights(model))


def run(options: dict[str, Any]) -> None:
    """Runs one of the loops below by its name."""
    options = {**DEFAULTS, **options}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from dataloops import LOOPS as OF_DATA  # they take their parts from here
    from saving import LOOPS as OF_SAVING
    from training import LOOPS as OF_TRAINING

    {**LOOPS, **OF_TRAINING, **OF_DATA, **OF_SAVING}[options["loop"]](options)


# ---------------------------------------------------------------- the model


def make(o: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    w = o["width"]
    norm = [nn.BatchNorm1d(w)] if o["batch_norm"] else []
    model = nn.Sequential(
        nn.Linear(8, w), *norm, nn.Tanh(), nn.Dropout(o["dropout"]), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1)
    )
    with torch.no_grad():
        for parameter in model.parameters() if o["scale"] != 1.0 else ():
            parameter.mul_(o["scale"])
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[o["optimizer"]]
    return model, kind(model.parameters(), lr=o["lr"])


def schedule_of(o: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """A warm-up, or None."""
    if not o["warm_up"]:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / o["warm_up"]))


def scalars(optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    """What is not a tensor, with exact types and all digits."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    rest = {} if schedule is None else {k: v for k, v in schedule.state_dict().items() if k != "lr_lambdas"}
    return repr((groups, sorted(rest.items())))


def forward(model: nn.Module, step: int, k: int) -> torch.Tensor:
    """The loss of microbatch `k` of `step`; its data depends on nothing else, its dropout on the random state."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + k))
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters and all of the optimizer's tensors; the test's own, not the product's fingerprint."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            hashed.update(name.encode())
            hashed.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return hashed.hexdigest()[:16]


def weights(model: nn.Module) -> list[float]:
    return [float(x) for parameter in model.parameters() for x in parameter.detach().flatten()[:4]]


def per_step(microbatches: int | list[int]) -> int | Callable[[int], int]:
    if isinstance(microbatches, int):
        return microbatches
    return lambda step: microbatches[step % len(microbatches)]


# ---------------------------------------------------------------- loops


def gold(o: dict[str, Any]) -> None:
    """The plain loop without lightkeeper: one process does all microbatches of every step."""
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    schedule = schedule_of(o, optimizer)
    total_of = per_step(o["microbatches"])
    for step in range(o["steps"]):
        total = total_of if isinstance(total_of, int) else total_of(step)
        optimizer.zero_grad()
        whole = 0.0
        for k in range(total):
            randomness.seed_microbatch(o["seed"], step, k, 0)
            loss = forward(model, step, k)
            (loss / total).backward()
            whole += float(loss.detach() / total)
        randomness.seed_apply(o["seed"], step)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        trace.applied(step, model, optimizer, whole)
        trace("scalars", step, scalars(optimizer, schedule))
        if o["save"]:
            save(o["save"].format(step + 1), step + 1, model, optimizer, schedule)
    trace.done(model, optimizer)


def save(path: str, steps: int, *parts: Any) -> None:
    """A checkpoint of the user's own: parts may be None."""
    states = [None if part is None else part.state_dict() for part in parts]
    torch.save({"steps": steps, "states": states}, path)


def load(path: str, *parts: Any) -> int:
    """Loads it; how many steps it has behind it."""
    saved = torch.load(path, weights_only=False)
    for part, state in zip(parts, saved["states"], strict=True):
        if part is not None:
            part.load_state_dict(state)
    return int(saved["steps"])


def lingers_s(o: dict[str, Any]) -> float:
    """Seconds over a microbatch."""
    return 0.002 if o["hurry"] and os.path.exists(o["hurry"]) else float(o["delay"])


def train(o: dict[str, Any]) -> None:
    """The user's loop."""
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()})
    behaviour = Behaviour(o["behave"], manager, optimizer, trace)
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        behaviour.step_begins(step, model)
        optimizer.zero_grad()
        for k in step.microbatches():
            trace("forward", step.index, k)
            loss = forward(model, step.index, k)
            time.sleep(lingers_s(o) * (random.uniform(0.95, 1.05) if "noise" in behaviour.words else 1.0))
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
            if behaviour.after_backward(step, k):
                break
        if behaviour.at("break", step.index):
            continue
        optimizer.step()
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]))
        if behaviour.leaves_early(step.index):
            break
    behaviour.ends()
    trace.done(model, optimizer)


def plain_calls(o: dict[str, Any]) -> None:
    """The same loop without generators: begin, share, enter, reduce, commit."""
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()})
    for index in range(o["steps"]):
        step = manager.begin(o["microbatches"])
        assert step.index == index, (step.index, index)
        optimizer.zero_grad()
        while True:
            share = step.share()
            for position, k in enumerate(share):
                step.enter(k, last=position == len(share) - 1)
                trace("forward", step.index, k)
                loss = forward(model, step.index, k)
                time.sleep(o["delay"])
                (loss / step.total).backward()
                step.contribute("loss", loss.detach() / step.total)
            if step.reduce():
                break
        step.commit()
        optimizer.step()
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]))
    manager.finish()
    trace.done(model, optimizer)


def with_extras(o: dict[str, Any]) -> None:
    """Extras of every kind: numbers, a float32 vector, an int64 count."""
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    extras = {"loss": (), "load": ((5,), torch.float32), "tokens": ((), torch.int64)}
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras=extras)
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        for k in step.microbatches():
            trace("forward", step.index, k)
            loss = forward(model, step.index, k)
            time.sleep(o["delay"])
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
            step.contribute("load", torch.full((5,), float(k)) + torch.arange(5))
            step.contribute("tokens", 2**40 + k)
        optimizer.step()
        reduced = {name: value.tolist() for name, value in step.reduced.items()}
        kinds = {name: str(value.dtype) for name, value in step.reduced.items()}
        trace.applied(step.index, model, optimizer, reduced["loss"])
        trace("extras", step.index, reduced, kinds)
    trace.done(model, optimizer)


class Tally:
    """State of the user's own. Each member's `state_dict` notes on which thread it ran, and whether mid-forward."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.steps, self.mean, self.busy = trace, 0, torch.zeros(3), False

    def state_dict(self) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread() or self.busy:
            self.trace("read-at-a-bad-time", threading.current_thread().name, self.busy)
        return {"steps": self.steps, "mean": self.mean, "text": f"after {self.steps}", "pair": (1, 2.5, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["text"] == f"after {state['steps']}" and state["pair"] == (1, 2.5, None)
        self.steps, self.mean = state["steps"], state["mean"]
        self.trace("tally-loaded", self.steps)

    def add(self, loss: float) -> None:
        self.steps += 1
        self.mean += (loss - self.mean) / self.steps


def healing(o: dict[str, Any]) -> None:
    """The user's loop with everything that a returning group must get right; slow until the file `hurry` is there."""
    trace = Trace(o["trace"])
    model, optimizer = make(o)
    schedule = schedule_of(o, optimizer)
    tally = Tally(trace)
    manager = lightkeeper.Manager(model, optimizer, seed=o["seed"], extras={"loss": ()})
    if o["resume"]:
        manager.resume(load(o["resume"], model, optimizer, schedule))
    if schedule is not None and "forget-schedule" not in o["behave"]:
        manager.register("schedule", schedule)
    if o["register"] == "tally":
        manager.register("tally", tally)
    elif o["register"] == "unknown":
        tally.mean = object()  # type: ignore[assignment]
        manager.register("tally", tally)
    elif o["register"]:
        manager.register(o["register"], tally)
    behaviour = Behaviour(o["behave"], manager, optimizer, trace)
    behaviour.heal_faults(o)
    for step in manager.steps(until=o["steps"], microbatches=per_step(o["microbatches"])):
        trace("begins", step.index, step.live, step.lead, float(next(model.parameters()).detach().abs().max()))
        behaviour.step_begins(step, model)
        optimizer.zero_grad()
        for k in step.microbatches():
            trace("forward", step.index, k)
            tally.busy = True
            loss = forward(model, step.index, k)
            time.sleep(lingers_s(o))
            tally.busy = False
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
        if step.lead:
            trace("leads", step.index)
        time.sleep(0 if step.live else o["replay_delay"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
        tally.add(float(step.reduced["loss"]))
        trace.applied(step.index, model, optimizer, float(step.reduced["loss"]))
        trace("scalars", step.index, scalars(optimizer, schedule))
        if o["register"] == "tally":
            trace("tally", step.index, tally.steps, tally.mean.tolist())
    trace.done(model, optimizer)


def sharded(name: str) -> Callable[[dict[str, Any]], None]:
    def run_it(o: dict[str, Any]) -> None:
        import sharded_loops  # imports what only these need

        getattr(sharded_loops, name)(o)

    return run_it


LOOPS: dict[str, Callable[[dict[str, Any]], None]] = {
    "sharded": sharded("train"),
    "sharded-gold": sharded("gold"),
    "gold": gold,
    "train": train,
    "plain_calls": plain_calls,
    "with_extras": with_extras,
    "healing": healing,
}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
