"""What the groups of a chaos job train: a small model, for as long as it takes.

The run ends once the file that `--stop` names is there: whoever sees it puts that into the entry, so that all groups
end after the same step. Groups of several ranks use DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightkeeper
from lightkeeper.chaos.acts import RAISE, STALL

WIDTH, DEPTH, SAMPLES = 64, 3, 8
STEPS_MAX = 1_000_000
STALL_S = 1e6


def _obey(orders: list[int]) -> None:
    if STALL in orders:
        time.sleep(STALL_S)
    if RAISE in orders:
        raise RuntimeError("as ordered")


def main() -> None:
    """Train until somebody says stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stop", type=Path, required=True, help="file whose being there ends the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--microbatches", type=int, default=6, help="of a step, over all groups")
    parser.add_argument("--microbatch-s", type=float, default=0.05, help="seconds that one takes at least")
    parser.add_argument("--checkpoints", type=Path, help="folder of the run's checkpoints; without it there are none")
    parser.add_argument("--every", type=int, default=20, help="steps between two of them")
    parser.add_argument("--takes-orders", action="store_true", help="stand still, or raise, at a signal")
    parser.add_argument("--moments", type=Path, help="folder to say in when everything was imported")
    options, orders = parser.parse_args(), list[int]()
    if options.takes_orders:
        for number in (STALL, RAISE):
            signal.signal(number, lambda number, _: orders.append(number))
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.moments is not None:
        getattr(lightkeeper, "Checkpoints")  # noqa: B009 - what that imports is imported now, as by the optimizer
        group = os.environ["LIGHTKEEPER_GROUP"]
        (options.moments / f"imported-{group}-{os.getpid()}").write_text(str(time.time()))
    manager = lightkeeper.Manager(model, optimizer, seed=options.seed, extras={"loss": (), "stop": ()})
    if options.checkpoints is not None:
        checkpoints = lightkeeper.Checkpoints(manager, options.checkpoints, every=options.every)
        checkpoints.load()
    for step in manager.steps(until=STEPS_MAX, microbatches=options.microbatches):
        optimizer.zero_grad()
        for _ in step.microbatches():
            _obey(orders)
            began = time.monotonic()
            x = torch.randn(SAMPLES, WIDTH)  # by the random state that the step sets: the same whoever computes it
            loss = (model(x) - x.flip(-1)).square().mean()
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total / manager.place.count)
            step.contribute("stop", float(options.stop.exists()))
            time.sleep(max(0.0, options.microbatch_s - (time.monotonic() - began)))
        optimizer.step()
        if float(step.reduced["stop"]):
            manager.finish()
            break
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
