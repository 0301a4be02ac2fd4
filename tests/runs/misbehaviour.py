"""What goes wrong in the tests' loops, on request."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from facts import whole_lines
from torch import nn

from lightkeeper.manager.faults import Fault
from lightkeeper.manager.groups import GroupFailed
from lightkeeper.manager.watch import Watcher

if TYPE_CHECKING:
    from loops import Trace

AWAIT_S_MAX = 60.0


class _Keeper(Watcher):
    """Notes that it is to keep the last committed step, and takes its time over that."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    def keeps(self, reason: str) -> None:
        manager, seconds = self.behaviour.manager, self.behaviour.words["keeps"]
        self.behaviour.trace("keeps", manager.page.step - 1, manager._registry.fingerprint(), reason)
        time.sleep(seconds)
        self.behaviour.trace("kept")


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
        if "keeps" in self.words:
            manager.watch(_Keeper(self))
        if "ends-slowly" in self.words:
            atexit.register(self._end_slowly)
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

    def _end_slowly(self) -> None:
        print("ends slowly", flush=True)
        time.sleep(self.words["ends-slowly"])

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
        self._await_others(reducer._step)
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
            self.trace("reduced", step)
            self._await_others(step)
            self.trace("failed-after-reduce", step)
            raise GroupFailed("made to fail after it had succeeded")

    def _vote_late(self, reducer: Any) -> None:
        """Holds the vote on a step that was reduced well until the group's manager has promised another epoch."""
        if self.words.get("late-vote") != reducer._step:
            return
        del self.words["late-vote"]
        self.trace("reduced", reducer._step)
        epochs, until = self.manager._epochs, time.monotonic() + AWAIT_S_MAX
        while epochs._below <= self.manager._plan.epoch:
            assert time.monotonic() < until, "no recovery began"
            time.sleep(0.001)
        self.trace("voted-late", reducer._step)

    def _await_others(self, step: int) -> None:
        """Returns once the groups that `await:N` and `await-too:N` name have applied the step, so that each is a donor,
        and those of `reduced:N` and `reduced-too:N`, which miss it as well, have reduced it.
        """
        for word, does in (("await", "applied"), ("reduced", "reduced")):
            for group in [self.words[name] for name in (word, f"{word}-too") if name in self.words]:
                await_line(self.trace.path.parent / f"trace-g{group}", does, step)

    def _transient(self, reducer: Any) -> None:
        step = reducer._step
        every = self.words["transient-every"]
        if step % every == min(2, every - 1) and step not in getattr(self, "failed", set()):
            self.failed = {*getattr(self, "failed", set()), step}
            self._await_others(step)
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


def await_line(trace: Path, does: str, step: int) -> None:
    """Returns once another process has traced that it does this at this step."""
    until = time.monotonic() + AWAIT_S_MAX
    while not any((kind, *values[:1]) == (does, step) for kind, _, *values in whole_lines(trace)):
        assert time.monotonic() < until, f"{trace.name}: not {does} {step}"
        time.sleep(0.005)
