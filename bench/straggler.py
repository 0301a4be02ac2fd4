"""What a slow group costs the others, with work dealt by speed and dealt evenly."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightkeeper.bench._trainers import local_job, say
from lightkeeper.errors import UsageError
from lightkeeper.events import read_run
from lightkeeper.events.schema import Activated, Committed
from lightkeeper.lighthouse.deal import deal
from lightkeeper.lighthouse.names import EVEN

GROUPS = 4
MICROBATCHES = 24
MICROBATCH_S = 0.08
GRADIENT_MB = 4.0
SLOW = "g2"
MEASURED = 20  # the last so many steps
STEPS_MIN = 50  # the first change comes after 20 steps at the earliest
RUN_S_MAX = 400.0
FINGERPRINT_EVERY = 5
TARGET = 1.25
TOLERANCE = 1e-4  # of the largest weight: the order of summation differs


@dataclass
class Run:
    """One run: what its steps took at the end, what its groups held, and how its work was dealt."""

    step_s: float
    bits_equal: bool
    weights: Any
    changes: list[str] = field(default_factory=list)
    shares: dict[str, int] = field(default_factory=dict)


def run(speed: float = 0.7, steps: float = 56) -> dict[str, Any]:
    """Four groups with timed compute: all alike; one slower and work dealt evenly; the same and dealt by speed.

    Args:
        speed: of the slow group, as a share of the others'.
        steps: of each run; the last 20 are measured.
    """
    if not 0.05 <= speed < 1 or steps < STEPS_MIN:
        raise UsageError(f"bench straggler takes --speed from 0.05 to below 1 and --steps from {STEPS_MIN}")
    say(f"straggler: {GROUPS} groups alike, {steps:.0f} steps")
    alike = _run(int(steps), 1.0, "speed")
    say(f"straggler: {SLOW} at {speed:g} of the speed, equal shares")
    even = _run(int(steps), speed, "even")
    say(f"straggler: {SLOW} at {speed:g} of the speed, dealt by speed")
    dealt = _run(int(steps), speed, "speed")
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(dealt.weights, even.weights, strict=True))
    ratio = dealt.step_s / alike.step_s
    bits_equal = alike.bits_equal and even.bits_equal and dealt.bits_equal
    return {
        "bench": "straggler",
        "ours": {
            "step_ratio": round(ratio, 3),
            "step_s": round(dealt.step_s, 4),
            "fault_free_step_s": round(alike.step_s, 4),
            "bits_equal": bits_equal,
            "weights_off": off,
            "changes": dealt.changes,
            "shares": dealt.shares,
            "changes_fault_free": alike.changes,
        },
        "peer": {"equal_shares_step_ratio": round(even.step_s / alike.step_s, 3)},
        "ratio": {"best_possible_step_ratio": round(_best(speed), 3)},
        "target": {"step_ratio": TARGET, "weights_off": TOLERANCE, "bits_equal": True},
        "met": ratio <= TARGET and bits_equal and off <= TOLERANCE and not alike.changes,
    }


def _best(speed: float) -> float:
    """Step time with the best shares, by that without a slow group."""
    speeds = [round(EVEN * (speed if f"g{slot}" == SLOW else 1.0)) for slot in range(GROUPS)]
    ends = max(len(share) * EVEN / by for share, by in zip(deal(MICROBATCHES, speeds), speeds, strict=True))
    return ends / (MICROBATCHES / GROUPS)


def _run(steps: int, speed: float, how: str) -> Run:
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_job(folder, GROUPS) as (trainers, environment):
            for slot in range(GROUPS):
                group = f"g{slot}"
                more = {"LIGHTKEEPER_FINGERPRINT_EVERY": str(FINGERPRINT_EVERY), "LIGHTKEEPER_DEAL": how}
                microbatch_s = MICROBATCH_S / (speed if group == SLOW else 1.0)
                given = {**environment(group), **more}
                trainers.start(group, given, train, steps, microbatch_s, str(folder / f"{group}.pt"))
            trainers.result_of(GROUPS, RUN_S_MAX)
        events = read_run(folder).events
        weights = torch.load(folder / "g0.pt", weights_only=True)
    commits = [e for e in events if isinstance(e, Committed)]
    digests = defaultdict(set)
    for event in commits:
        if event.fingerprint:
            digests[event.step].add(event.fingerprint)
    measured = [e.seconds for e in commits if e.step >= steps - MEASURED]
    changes = [e.cause for e in events if isinstance(e, Activated) and e.process == "lighthouse"][1:]
    shares = {e.group: len(e.microbatches) for e in commits if e.step == steps - 1}
    bits_equal = bool(digests) and all(len(found) == 1 for found in digests.values())
    return Run(statistics.median(measured), bits_equal, weights, changes, shares)


def train(steps: int, microbatch_s: float, weights_to: str) -> None:
    """One group with timed compute, whose microbatches take so long."""
    import torch

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    model = stack(GRADIENT_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = lightkeeper.Manager(model, optimizer)
    for step in manager.steps(steps, MICROBATCHES):
        optimizer.zero_grad()
        for k in step.microbatches():
            start = time.monotonic()
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step.index + k))
            ((model(inputs) - inputs).square().mean() / step.total).backward()
            time.sleep(max(0.0, microbatch_s - (time.monotonic() - start)))
        optimizer.step()
    torch.save([parameter.detach() for parameter in model.parameters()], weights_to)
