"""From the SIGKILL of a trainer to its group's next forward, with and without a process that waits, beside torchrun."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightkeeper.bench._supervised import run_stages
from lightkeeper.bench._trainers import TrainerFailed, say
from lightkeeper.demo.job import LocalJob
from lightkeeper.events import read_run
from lightkeeper.events.schema import Committed, Event, Joined, Rejoined

GROUPS = ("g0", "g1")
VICTIM = "g1"
MICROBATCHES = 4
MICROBATCH_S = 0.05
GRADIENT_MB = 4.0
WARM_RUNS = 3  # a job each: a group that died twice within ten minutes is held back
TARGET_S = 1.0
WAIT_S = 240.0
READY = "torch is imported and waits"

T = TypeVar("T")


def run() -> dict[str, Any]:
    """Kills with and without a process that waits, below torchrun, which heals nothing, and of a supervised job."""
    warm = []
    for number in range(WARM_RUNS):
        say(f"restart: ours, a process waits, {number + 1} of {WARM_RUNS}")
        warm.append(_ours(True))
    say("restart: ours, no process waits")
    cold = _ours(False)
    say("restart: torchrun --max-restarts")
    peer_s = _torchrun()
    group, job = run_stages()
    ours = {name: statistics.median(case[name] for case in warm) for name in warm[0]}
    return {
        "bench": "restart",
        "ours": {
            **ours,
            **{f"cold_{name}": value for name, value in cold.items()},
            **{f"supervised group, {stage}": seconds for stage, seconds in group.items()},
            **{f"supervised whole job, {stage}": seconds for stage, seconds in job.items()},
            "runs": warm,
        },
        "peer": {"computes_again_s": peer_s},
        "ratio": ours["asks_to_join_s"] / peer_s,
        "target": {"asks_to_join_s": TARGET_S},
        "met": ours["asks_to_join_s"] <= TARGET_S,
    }


def _ours(warm: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, LocalJob(Path(name), GROUPS) as job:
        job.start_lighthouse()
        for group in GROUPS:
            keeps = str(int(warm and group == VICTIM))
            options = {"LIGHTKEEPER_RESTARTS": "3", "LIGHTKEEPER_WARM": keeps}
            job.start_group(group, ["-m", "lightkeeper.bench.restart", name], options)

        def first(holds: Callable[[Event], bool]) -> Event | None:
            return next((event for event in read_run(Path(name)).events if holds(event)), None)

        commit = _until(job, lambda: first(lambda e: isinstance(e, Committed) and e.group == VICTIM and e.step >= 5))
        if warm:
            _until(job, lambda: READY in job.output(VICTIM))
        killed_ns = time.monotonic_ns()
        os.kill(commit.pid, signal.SIGKILL)
        _until(job, lambda: first(lambda e: isinstance(e, Rejoined) and e.group == VICTIM))
        forward_ns = _until(job, lambda: _forward_ns(Path(name), VICTIM, killed_ns))
        joined = _until(
            job, lambda: first(lambda e: isinstance(e, Joined) and e.group == VICTIM and e.mono_ns > killed_ns)
        )
        return {
            "asks_to_join_s": round((joined.mono_ns - killed_ns) / 1e9, 3),
            "heal_s": round((forward_ns - joined.mono_ns) / 1e9, 3),
            "computes_again_s": round((forward_ns - killed_ns) / 1e9, 3),
        }


def _torchrun() -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            "-m",
            "lightkeeper.bench.restart",
            name,
            "plain",
        ]
        with (folder / "out").open("wb") as output:
            agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            pid = int(_until(None, lambda: next((p.read_text() for p in folder.glob("pid-*")), None)))
            _until(None, lambda: _forward_ns(folder, "plain", 0))
            killed_ns = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
            again_ns = _until(None, lambda: _forward_ns(folder, "plain", killed_ns))
            for path in folder.glob("pid-*"):
                os.kill(int(path.read_text()), signal.SIGKILL) if int(path.read_text()) != pid else None
        finally:
            agent.kill()
            agent.wait()
    return round((again_ns - killed_ns) / 1e9, 3)


def _until(job: LocalJob | None, found: Callable[[], T | None]) -> T:
    """What is looked for, once it is there.

    Raises:
        TrainerFailed: if a launcher failed, or time ran out.
    """
    end = time.monotonic() + WAIT_S
    while not (value := found()):
        failed = job.failed() if job is not None else ""
        if failed or time.monotonic() > end:
            words = job.output(failed or VICTIM)[-2000:] if job is not None else ""
            raise TrainerFailed(f"{failed or 'time ran out'}: {words}")
        time.sleep(0.05)
    return value


def _forward_ns(folder: Path, group: str, after_ns: int) -> int | None:
    """When the first start of the group after a time computed first, monotonic nanoseconds."""
    found = sorted(int(path.read_text()) for path in folder.glob(f"forward-{group}-*"))
    return next((ns for ns in found if ns > after_ns), None)


# ---------------------------------------------------------------- what runs in the groups


def train(folder: Path) -> None:
    """One group with timed compute; says when it computed first."""
    import torch

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    model = stack(GRADIENT_MB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = lightkeeper.Manager(model, optimizer)
    inputs, told = torch.randn(8, WIDTH), False
    for step in manager.steps(100_000, MICROBATCHES):
        optimizer.zero_grad()
        for _ in step.microbatches():
            start = time.monotonic()
            loss = model(inputs).square().mean() / step.total
            if not told:
                told = _tell(folder, "forward", manager.settings.group, time.monotonic_ns())
            loss.backward()
            time.sleep(max(0.0, MICROBATCH_S - (time.monotonic() - start)))
        optimizer.step()


def plain(folder: Path) -> None:
    """The same without lightkeeper, alone."""
    import torch

    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    _tell(folder, "pid", "plain", os.getpid())
    model = stack(GRADIENT_MB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, told = torch.randn(8, WIDTH), False
    while True:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if not told:
            told = _tell(folder, "forward", "plain", time.monotonic_ns())
        loss.backward()
        optimizer.step()
        time.sleep(MICROBATCH_S)


def _tell(folder: Path, what: str, group: str, value: int) -> bool:
    path = folder / f".{what}-{os.getpid()}"
    path.write_text(str(value))
    path.rename(folder / f"{what}-{group}-{os.getpid()}")
    return True


if __name__ == "__main__":
    (plain if "plain" in sys.argv else train)(Path(sys.argv[1]))
