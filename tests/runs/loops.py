"""What runs in a trainer process of these tests: a small model in the user's loop, and the ways in which it misbehaves.

Every forward pass and every applied step is also written to a trace of the test's own, so that a claim of the event
log can be held against what the process really did. A line is one `write`, so a SIGKILL loses none.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightkeeper
from lightkeeper.manager import randomness
from lightkeeper.manager.faults import Fault
from lightkeeper.manager.groups import GroupFailed

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
    from training import LOOPS as OF_TRAINING

    {**LOOPS, **OF_TRAINING, **OF_DATA}[options["loop"]](options)


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
    trace.done(model, optimizer)


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
            time.sleep(o["delay"] * (random.uniform(0.95, 1.05) if "noise" in behaviour.words else 1.0))
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
            time.sleep(0.002 if o["hurry"] and os.path.exists(o["hurry"]) else o["delay"])
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


# ---------------------------------------------------------------- misbehaviour


class Behaviour:
    """What goes wrong, as ``NAME[:STEP]`` words in one string."""

    def __init__(self, text: str, manager: Any, optimizer: torch.optim.Optimizer, trace: Trace) -> None:
        words = [word.partition(":") for word in text.split()]
        self.words = {name: int(step or 0) for name, _, step in words}
        self.manager, self.optimizer, self.trace = manager, optimizer, trace
        self._hooked = False
        if "fail-after-reduce" in self.words:
            self._wrap_reduce(self._fail_after)
        if "late-vote" in self.words:
            self._wrap_reduce(self._vote_late)
        if "transient-every" in self.words:
            self._wrap_reduce(self._transient)
        if "never-reduces" in self.words:
            self._never_reduce()
        if "count-collectives" in self.words:
            self._count_collectives()
        if "die-serving" in self.words:
            self._die_serving()
        self.batches = None
        if "stubborn-child" in self.words:  # a daemon: `multiprocessing` terminates it at exit, and waits for it
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
        if "loader" in self.words:  # with a worker process, which each step needs
            numbers: Any = torch.utils.data.DataLoader(
                range(1 << 20),  # type: ignore[arg-type]
                num_workers=1,
                multiprocessing_context="fork",  # as in a script; a child of the tests' fork server has another default
            )
            self.batches = iter(numbers)
            trace("worker", self.batches._workers[0].pid)  # type: ignore[attr-defined]

    def at(self, name: str, step: int) -> bool:
        return self.words.get(name) == step

    # ------------------------------------------------------------ in the loop

    def step_begins(self, step: Any, model: nn.Module) -> None:
        if self.at("raise", step.index):
            raise ValueError("a bug of the user's")
        if self.at("exit-0", step.index):
            sys.exit(0)
        if self.at("exit-5", step.index):
            sys.exit(5)
        if self.batches is not None:
            next(self.batches)
        if self.at("ask-leave", step.index):
            self.manager.leave("the machine gives notice")
        if self.at("raise-in-hook", step.index):

            def hook(parameter: torch.Tensor) -> None:
                del parameter
                raise TypeError("a bug in a gradient hook")

            next(iter(model.parameters())).register_post_accumulate_grad_hook(hook)
        if self.at("cut", step.index):
            self._cut()
        if self.at("kill-in-reduce", step.index):
            self._kill_in_reduce(step.index)
        if self.at("deaf", step.index):
            self.manager._entries._server.close()
        if self.at("full-disk", step.index):
            self._fill_disk()

    def after_backward(self, step: Any, k: int) -> bool:
        """Returns whether the loop is to `break`."""
        if self.at("early-step", step.index):
            self.optimizer.step()
        if self.at("kill-after-backward", step.index) and k == step.share()[-1]:
            self.strike("kill", "compute", step.index)
        return self.at("break", step.index)

    def leaves_early(self, step: int) -> bool:
        """Whether the loop over the steps is left here, with a word to the others or without."""
        if self.at("finish-early", step):
            self.manager.finish()
        return self.at("finish-early", step) or self.at("leave-loop", step)

    def ends(self) -> None:
        if "sleep-at-end" in self.words:
            time.sleep(self.words["sleep-at-end"])

    # ------------------------------------------------------------ while a group heals

    def heal_faults(self, o: dict[str, Any]) -> None:
        """Words of a heal; `die_in` names a phase in which this rank dies when it first enters it."""
        from lightkeeper.manager import joining
        from lightkeeper.manager.state import restore, snapshot

        if o["die_in"]:
            real = self.manager._enter

            def enter(phase: str, index: int, microbatches: int = 0) -> None:
                if phase == o["die_in"]:
                    self.strike("kill", phase, index)
                real(phase, index, microbatches)

            self.manager._enter = enter
        if "die-sending" in self.words:
            self._before(snapshot.Snapshot, "range", lambda: self.strike("kill", "compute", self.manager.page.step))
        if "slow-sending" in self.words:  # milliseconds before each range
            pause_s = self.words["slow-sending"] / 1000
            self._before(snapshot.Snapshot, "range", lambda: (self.trace("sends"), time.sleep(pause_s)))
        if "die-receiving" in self.words:
            self._before(restore.Target, "arrived", lambda: self.strike("kill", "heal", self.manager.page.step))
        if "slow-follow" in self.words:  # milliseconds between an entry's arrival and the vote on it
            pause_s = self.words["slow-follow"] / 1000
            self._before(type(self.manager), "_follow", lambda: time.sleep(pause_s))
        if "slow-entries" in self.words:  # milliseconds before each entry is asked for
            pause_s = self.words["slow-entries"] / 1000
            self._before(joining.Joiner, "next_entry", lambda: time.sleep(pause_s))
        if "blind" in self.words:  # no entry is seen until this rank is named in a recovery

            def next_entry(joiner: Any, after: Any, reducer: Any, wait_s: float) -> None:
                time.sleep(wait_s / 10)

            joining.Joiner.next_entry = next_entry  # type: ignore[method-assign,assignment]
        if "miss-activating" in self.words:
            self._wrap_reduce(self._miss_activating)

    def _before(self, owner: Any, name: str, act: Callable[[], Any]) -> None:
        real = getattr(owner, name)

        def method(*arguments: Any, **named: Any) -> Any:
            act()
            return real(*arguments, **named)

        setattr(owner, name, method)

    def _miss_activating(self, reducer: Any) -> None:
        """Fails after the reduce that activates a planned epoch has succeeded."""
        if "miss-activating" not in self.words or reducer._outcome is None or not reducer._outcome.ready:
            return
        self._await_donor(reducer._step)
        self.trace("missed", reducer._step)
        del self.words["miss-activating"]
        reducer_miss = GroupFailed("made to fail after it had succeeded")
        raise reducer_miss

    # ------------------------------------------------------------ faults

    def strike(self, kind: str, phase: str, step: int) -> None:
        """A fault of the product's own injector, at a place of our choice; the event is written first."""
        injector = self.manager._injector
        injector._faults.append(Fault(kind, self.manager.settings.group, phase, step))
        injector.reached(phase, step)

    def _wrap_reduce(self, after: Callable[[Any], None]) -> None:
        """Calls `after(reducer)` each time a reduce has really succeeded."""
        from lightkeeper.manager.reducer import Reducer

        real = Reducer.reduce

        def reduce(reducer: Any, ready: int, timeout_s: float) -> Any:
            outcome = real(reducer, ready, timeout_s)
            after(reducer)
            return outcome

        Reducer.reduce = reduce  # type: ignore[method-assign]

    def _fail_after(self, reducer: Any) -> None:
        step = reducer._step
        if self.words.get("fail-after-reduce") == step:
            del self.words["fail-after-reduce"]
            self._await_donor(step)
            self.trace("failed-after-reduce", step)
            raise GroupFailed("made to fail after it had succeeded")

    def _vote_late(self, reducer: Any) -> None:
        """Holds the vote on a step that was reduced well until the group's manager has promised another epoch."""
        if self.words.get("late-vote") != reducer._step:
            return
        del self.words["late-vote"]
        epochs, until = self.manager._epochs, time.monotonic() + 10
        while epochs._below <= self.manager._plan.epoch:
            assert time.monotonic() < until, "no recovery began"
            time.sleep(0.001)
        self.trace("voted-late", reducer._step)

    def _await_donor(self, step: int) -> None:
        """Returns once the group that `await:N` names has applied the step, so that it is a donor."""
        if "await" not in self.words:
            return
        trace = self.trace.path.parent / f"trace-g{self.words['await']}"
        until = time.monotonic() + 10
        while not any(json.loads(line)[0::2][:2] == ["applied", step] for line in trace.read_text().splitlines()):
            assert time.monotonic() < until, "the donor does not apply the step"
            time.sleep(0.005)

    def _transient(self, reducer: Any) -> None:
        step = reducer._step
        every = self.words["transient-every"]
        if step % every == min(2, every - 1) and step not in getattr(self, "failed", set()):
            self.failed = {*getattr(self, "failed", set()), step}
            self._await_donor(step)
            self.trace("transient", step)
            raise GroupFailed("a transient network error")

    def _never_reduce(self) -> None:
        """From this step on every reduce raises here, before anything is sent; nobody's connection breaks first."""
        from lightkeeper.manager.reducer import Reducer

        real = Reducer.reduce

        def reduce(reducer: Any, ready: int, timeout_s: float) -> Any:
            if reducer._step < self.words["never-reduces"]:
                return real(reducer, ready, timeout_s)
            self.trace("raised", reducer._step)
            raise GroupFailed("the network card says no")

        Reducer.reduce = reduce  # type: ignore[method-assign]

    def _cut(self) -> None:
        """Cuts this group's connections while a reduce is under way, without anybody's death."""
        group = self.manager._group
        self.trace("cut", self.manager.page.step)
        threading.Timer(0.15, lambda: group.abort("the cable was pulled")).start()

    def _kill_in_reduce(self, step: int) -> None:
        """Dies once its first bucket of this step has been reduced, so that all members stand inside the reduce."""
        from lightkeeper.manager.reducer import Reducer

        real = Reducer._launch_extras

        def launch_extras(reducer: Any, ready: int) -> None:
            if reducer._step == step:
                self.strike("kill", "reduce", step)
            real(reducer, ready)

        Reducer._launch_extras = launch_extras  # type: ignore[method-assign]

    def _count_collectives(self) -> None:
        """Traces the number of collectives of each reduce."""
        from lightkeeper.manager.reducer import Reducer

        real = Reducer._launch_extras

        def launch_extras(reducer: Any, ready: int) -> None:
            real(reducer, ready)
            self.trace("collectives", len(reducer._pending))

        Reducer._launch_extras = launch_extras  # type: ignore[method-assign]

    def _fill_disk(self) -> None:
        """From now on this process's event file takes no further byte (its trace does)."""
        log = self.manager._record._log
        log._descriptor = os.open("/dev/full", os.O_WRONLY)

    def _die_serving(self) -> None:
        """Dies when a peer asks for the newest entry, which nothing else reads."""
        from lightkeeper.manager.reducer import Reducer

        def entry(reducer: Any) -> Any:
            self.trace("die-serving")
            os.kill(os.getpid(), signal.SIGKILL)

        Reducer.entry = entry  # type: ignore[method-assign]
