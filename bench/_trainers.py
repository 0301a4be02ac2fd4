"""Trainers for the benches: processes of a fork server that has torch imported, so that one starts in 0.02 s."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightkeeper.demo.job import LocalJob

PRELOAD = [
    "torch",
    "torchft",
    "lightkeeper.manager.trainer",
    "lightkeeper.manager.gloo",
    "lightkeeper.bench._compute",
]


class TrainerFailed(RuntimeError):
    """A bench's trainer did not return; the message holds its last words."""


class Trainers:
    """Starts functions as trainers and gathers what they return.

    Args:
        folder: their output goes to ``<folder>/output``.
    """

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._output = folder / "output"
        self._output.mkdir(parents=True, exist_ok=True)
        self.results: Any = self._context.Queue()
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str, environment: Mapping[str, str], function: Callable[..., Any], *arguments: Any) -> None:
        """Starts ``function(*arguments)`` in a process of its own; what it returns is put under `name`."""
        output = self._output / f"{name}.txt"
        process = self._context.Process(
            target=_run, args=(name, dict(environment), output, self.results, function, arguments), name=name
        )
        process.start()
        self.processes[name] = process

    def result_of(self, count: int, timeout_s: float) -> dict[str, Any]:
        """What the next `count` trainers returned, by name.

        Raises:
            TrainerFailed: if one ended with an error instead (a fault's victim may), or time ran out.
        """
        found: dict[str, Any] = {}
        until = time.monotonic() + timeout_s
        while len(found) < count:
            try:
                name, value = self.results.get(timeout=0.5)
            except queue.Empty:
                failed = [n for n, p in self.processes.items() if p.exitcode is not None and p.exitcode > 0]
                if failed or time.monotonic() > until:
                    words = "\n".join((self._output / f"{n}.txt").read_text()[-2000:] for n in failed)
                    raise TrainerFailed(f"{', '.join(failed) or 'time ran out'}: {words}") from None
                continue
            found[name] = value
        return found

    def end(self) -> None:
        """Kills what is left."""
        for process in self.processes.values():
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def local_job(folder: Path, groups: int) -> Iterator[tuple[Trainers, Callable[[str], dict[str, str]]]]:
    """A lighthouse and a place for trainers; gives the environment of a group by its name."""
    names = tuple(f"g{i}" for i in range(groups))
    with LocalJob(folder, names) as job:
        address = job.start_lighthouse()
        trainers = Trainers(folder)

        def environment(group: str) -> dict[str, str]:
            return {
                "LIGHTKEEPER_GROUP": group,
                "LIGHTKEEPER_GROUPS": str(groups),
                "LIGHTKEEPER_LIGHTHOUSE": address,
                "LIGHTKEEPER_TOKEN": job.token,
                "LIGHTKEEPER_RUN_FOLDER": str(folder),
            }

        try:
            yield trainers, environment
        finally:
            trainers.end()


def train_timed(steps: int, microbatches: int, microbatch_s: float, gradient_mb: float) -> None:
    """One group of ours with timed compute, with AdamW.

    Args:
        steps: of the run.
        microbatches: of a step, over all groups.
        microbatch_s: how long one takes, in seconds.
        gradient_mb: size of its gradients; the state is three times as large.
    """
    import torch

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    model = stack(gradient_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = lightkeeper.Manager(model, optimizer)
    inputs = torch.randn(8, WIDTH)
    for step in manager.steps(steps, microbatches):
        optimizer.zero_grad()
        for _ in step.microbatches():
            start = time.monotonic()
            (model(inputs).square().mean() / step.total).backward()
            time.sleep(max(0.0, microbatch_s - (time.monotonic() - start)))
        optimizer.step()


def say(line: str) -> None:
    """What a bench is doing, for whoever waits for it."""
    print(line, file=sys.stderr, flush=True)


def _run(
    name: str,
    environment: Mapping[str, str],
    output: Path,
    results: Any,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    results.put((name, function(*arguments)))
