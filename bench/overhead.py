"""What the runtime costs without a fault, beside DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightkeeper.bench._trainers import local_job, say

GROUPS = 2
STEP_S = 0.2
BLOCK_STEPS = 20
BLOCKS = 6
WARM_STEPS = 4
CALIBRATIONS = 3
ONE_GROUP_STEPS = 8
TARGETS = {25: 1.02, 100: 1.04}


@dataclass(frozen=True)
class Case:
    """Megabytes of gradients, and microbatches per group and step."""

    gradient_mb: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.gradient_mb} MB, {self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"


CASES = tuple(Case(mb, microbatches) for mb in TARGETS for microbatches in (1, 4))


def run() -> dict[str, Any]:
    """Median step times of two groups, in alternating blocks of one run, and one group's bits."""
    step_s, plain_s, ratios, spread = {}, {}, {}, {}
    for case in CASES:
        say(f"overhead: {case}")
        measured = _measure(case)
        name = str(case)
        step_s[name], plain_s[name] = measured["step_s"], measured["plain_step_s"]
        ratios[name], spread[name] = measured["ratio"], measured["ratio_quartiles"]
    say("overhead: one group, bits")
    equal = _one_group_is_bit_equal()
    met = equal and all(ratios[str(case)] <= TARGETS[case.gradient_mb] for case in CASES)
    return {
        "bench": "overhead",
        "ours": {"step_s": step_s, "one_group_bit_equal": equal, "ratio_quartiles": spread},
        "peer": {"plain_step_s": plain_s},
        "ratio": ratios,
        "target": {f"{mb} MB": target for mb, target in TARGETS.items()},
        "met": met,
    }


def _measure(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, local_job(Path(folder), GROUPS) as (trainers, environment):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for slot in range(GROUPS):
            group = f"g{slot}"
            more = {**environment(group), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            trainers.start(group, more, alternate, slot, asdict(case))
        results = trainers.result_of(GROUPS, timeout_s=900)
    return dict(results["g0"])


def alternate(slot: int, case: dict[str, int]) -> dict[str, Any]:
    """One group's process: blocks of steps under the runtime and under DistributedDataParallel, in turns."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    mb, microbatches = case["gradient_mb"], case["microbatches"]
    dist.init_process_group("gloo", rank=slot, world_size=GROUPS)
    inputs = torch.randn(64, WIDTH)
    mine, theirs = stack(mb), stack(mb)
    wrapped = nn.parallel.DistributedDataParallel(theirs)
    my_optimizer, their_optimizer = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (mine, theirs))
    manager = lightkeeper.Manager(mine, my_optimizer)

    def ours() -> None:
        step = manager.begin(GROUPS * microbatches)
        my_optimizer.zero_grad()
        for _ in step.microbatches():
            (mine(inputs).square().mean() / step.total).backward()
        my_optimizer.step()

    def plain() -> None:
        their_optimizer.zero_grad()
        for _ in range(microbatches - 1):
            with wrapped.no_sync():
                (wrapped(inputs).square().mean() / microbatches).backward()
        (wrapped(inputs).square().mean() / microbatches).backward()
        their_optimizer.step()

    for _ in range(CALIBRATIONS):  # rows with which a plain step takes about STEP_S here, with both groups at work
        rows = torch.tensor([max(8, round(len(inputs) * STEP_S / _median_s(plain, WARM_STEPS)))])
        dist.broadcast(rows, src=0)
        inputs = torch.randn(int(rows), WIDTH)
    measured = _blocks({"ours": ours, "plain": plain}, dist.barrier)
    manager.finish()
    dist.destroy_process_group()
    ratios = [a / b for a, b in zip(measured["ours"], measured["plain"], strict=True)]
    return {
        "step_s": statistics.median(measured["ours"]),
        "plain_step_s": statistics.median(measured["plain"]),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartile, 3) for quartile in statistics.quantiles(ratios)],
    }


def _blocks(loops: dict[str, Callable[[], None]], barrier: Callable[[], None]) -> dict[str, list[float]]:
    """Median step of each block; who goes first changes from block to block."""
    for loop in loops.values():
        for _ in range(WARM_STEPS):
            loop()
    medians: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(BLOCKS):
        for name in sorted(loops, reverse=block % 2 == 1):
            barrier()
            medians[name].append(_median_s(loops[name], BLOCK_STEPS))
    return medians


def _median_s(loop: Callable[[], None], steps: int) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loop()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _one_group_is_bit_equal() -> bool:
    with tempfile.TemporaryDirectory() as folder, local_job(Path(folder), 1) as (trainers, environment):
        trainers.start("g0", environment("g0"), one_group, True)
        with_runtime = trainers.result_of(1, timeout_s=300)["g0"]
        trainers.start("plain", {}, one_group, False)
        without = trainers.result_of(1, timeout_s=300)["plain"]
    return bool(with_runtime == without)


def one_group(with_runtime: bool) -> str:
    """Fingerprint after a few steps of one group with dropout and AdamW, with the runtime or without it."""
    import torch
    from torch import nn

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack
    from lightkeeper.manager.randomness import seed_apply, seed_microbatch

    torch.set_num_threads(1)
    model = nn.Sequential(stack(25), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    microbatches = 4

    def compute() -> None:
        inputs = torch.randn(8, WIDTH)
        (model(inputs).square().mean() / microbatches).backward()

    if with_runtime:
        manager = lightkeeper.Manager(model, optimizer, seed=3)
        for step in manager.steps(ONE_GROUP_STEPS, microbatches):
            optimizer.zero_grad()
            for _ in step.microbatches():
                compute()
            optimizer.step()
    else:
        for index in range(ONE_GROUP_STEPS):
            optimizer.zero_grad()
            for k in range(microbatches):
                seed_microbatch(3, index, k, place=int(os.environ.get("RANK", "0")))
                compute()
            seed_apply(3, index)
            optimizer.step()
    return lightkeeper.fingerprint(model, optimizer)
