"""Many histories, on several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass

from lightkeeper.manager.processes import die_with_parent
from lightkeeper.simulator.history import plan_history, run_history
from lightkeeper.simulator.report import Report

BATCH = 20


@dataclass(frozen=True)
class Runs:
    """Which histories.

    Attributes:
        first: the first seed.
        count: how many.
        groups: of each; 0 draws it from the seed.
        window_s: faults strike until then.
        faults: how many strike, on average.
    """

    first: int = 0
    count: int = 1000
    groups: int = 0
    window_s: float = 24.0
    faults: float = 12.0


def run_batch(runs: Runs) -> Report:
    """Runs histories one after another."""
    report = Report()
    for seed in range(runs.first, runs.first + runs.count):
        report.add(run_history(plan_history(seed, runs.groups, runs.window_s, runs.faults)))
    return report


def run_all(runs: Runs, workers: int, progress: Callable[[Report, int], None]) -> Report:
    """Runs histories on several processes; seeds decide what happens, and not who runs them.

    Args:
        runs: which ones.
        workers: processes.
        progress: told the sums so far and how many histories were run.
    """
    total, done = Report(), 0
    if workers == 1:
        for batch in _batches(runs):
            total.merge(run_batch(batch))
            done += batch.count
            progress(total, done)
        return total
    context = multiprocessing.get_context("spawn")
    batches = _batches(runs)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=die_with_parent) as pool:
        running = {pool.submit(run_batch, batch): batch for batch in _some(batches, 2 * workers)}
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                batch = running.pop(future)
                total.merge(future.result())
                done += batch.count
                running.update({pool.submit(run_batch, more): more for more in _some(batches, 1)})
            progress(total, done)
    return total


def _batches(runs: Runs) -> Iterator[Runs]:
    for start in range(0, runs.count, BATCH):
        size = min(BATCH, runs.count - start)
        yield Runs(runs.first + start, size, runs.groups, runs.window_s, runs.faults)


def _some(batches: Iterator[Runs], count: int) -> list[Runs]:
    return [batch for _, batch in zip(range(count), batches, strict=False)]
