"""What saving and restoring costs, tier by tier, beside torch.distributed.checkpoint alone on the same storage."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightkeeper.bench._trainers import Trainers, local_job, say
from lightkeeper.events import read_run
from lightkeeper.events.of_checkpoints import CheckpointLoaded, CheckpointSaved
from lightkeeper.events.schema import Committed, Event, Healed

GROUPS = 2
STATE_MB = 256  # parameters and the two moments of AdamW
STEP_S = 0.4  # of timed compute
EVERY, LOCAL_EVERY = 12, 6
SAVES = 3  # that are looked at, after the first one
RUN_S_MAX = 180.0
TARGET_STALL_S = 0.05
TARGET_STEP = 1.05  # of a usual step, one with a save under way

T = TypeVar("T", bound=Event)


def run(state_mb: float = STATE_MB, folder: str = "") -> dict[str, Any]:
    """Two groups that save, lose a process, lose a node, and begin again; then torch alone.

    Args:
        state_mb: size of the state, in MiB.
        folder: on the storage that is measured; a temporary one.
    """
    with tempfile.TemporaryDirectory(dir=folder or None) as name:
        say(f"checkpoint: ours, {state_mb:g} MiB in {name}")
        ours = _ours(state_mb, Path(name))
        say(f"checkpoint: {ours}; torch alone")
        peer = _alone(state_mb, Path(name) / "alone")
    stall, beside = ours["stall_s"], ours["step_beside_a_save"]
    return {
        "bench": "checkpoint",
        "ours": ours,
        "peer": peer,
        "ratio": {
            "stall": round(stall / peer["stall_s"], 3),
            "save": round(ours["save_shared_s"] / peer["save_shared_s"], 3),
            "restore": round(ours["restore_shared_s"] / peer["restore_shared_s"], 3),
        },
        "target": {"stall_s": TARGET_STALL_S, "step_beside_a_save": TARGET_STEP},
        "met": stall <= TARGET_STALL_S and beside <= TARGET_STEP,
    }


# ---------------------------------------------------------------- ours


class _Run:
    """The groups of one job, started again and again."""

    def __init__(
        self, folder: Path, trainers: Trainers, environment: Callable[[str], dict[str, str]], mb: float
    ) -> None:
        self.folder, self.shared, self.local = folder, folder / "shared", folder / "local"
        self._trainers, self._environment, self._mb, self._starts = trainers, environment, mb, 0

    def start(self, *groups: str) -> None:
        self._starts += 1
        for group in groups:
            name = f"{group}-{self._starts}"
            places = (str(self.shared), str(self.local))
            self._trainers.start(name, self._environment(group), train, self._mb, *places)

    def kill(self, *groups: str) -> None:
        for name, process in self._trainers.processes.items():
            if name.split("-")[0] in groups and process.is_alive():
                process.kill()
                process.join()

    def events(self, kind: type[T]) -> list[T]:
        return [event for event in read_run(self.folder).events if isinstance(event, kind)]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + RUN_S_MAX
        while not holds():
            failed = [n for n, p in self._trainers.processes.items() if p.exitcode not in (None, 0, -9)]
            if failed or time.monotonic() > end:
                raise RuntimeError(f"checkpoint: not within {RUN_S_MAX:.0f} s, or {failed} failed: {what}")
            time.sleep(0.1)


def _ours(state_mb: float, folder: Path) -> dict[str, Any]:
    with local_job(folder, GROUPS) as (trainers, environment):
        job = _Run(folder, trainers, environment, state_mb)
        job.start("g0", "g1")
        job.until(lambda: len(_of(job.events(CheckpointSaved), "shared")) > SAVES, "the saves")
        saved, commits = job.events(CheckpointSaved), job.events(Committed)
        job.kill("g1")  # a process dies: its peer's memory has the state
        job.start("g1")
        job.until(lambda: bool(job.events(Healed)), "the return")
        before = len(_of(job.events(CheckpointSaved), "shared"))
        job.until(lambda: len(_of(job.events(CheckpointSaved), "shared")) > before, "another save")
        job.kill("g0", "g1")
        shutil.rmtree(job.local)  # the nodes are gone, with their disks
        job.start("g0", "g1")
        job.until(lambda: len(_of(job.events(CheckpointLoaded), "shared")) == GROUPS, "the load from shared storage")
        later = len(_of(job.events(CheckpointSaved), "local"))
        job.until(lambda: len(_of(job.events(CheckpointSaved), "local")) >= later + 2 * GROUPS, "saves on local disks")
        job.kill("g0", "g1")
        job.start("g0", "g1")
        job.until(lambda: len(_of(job.events(CheckpointLoaded), "local")) == GROUPS, "the load from local disks")
        job.kill("g0", "g1")
        healed, loaded = job.events(Healed)[0], job.events(CheckpointLoaded)
    return {**_saving(saved, commits), **_restoring(healed, loaded)}


def _of(events: list[Any], tier: str) -> list[Any]:
    return [event for event in events if event.tier == tier]


def _saving(saved: list[CheckpointSaved], commits: list[Committed]) -> dict[str, Any]:
    shared, local = _of(saved, "shared")[1:], _of(saved, "local")[GROUPS:]
    steps = {event.step: event.seconds for event in commits if event.group == shared[0].group and event.step > 2}
    beside = {step for event in saved for step in _steps_beside(event, commits)}
    usual = statistics.median([seconds for step, seconds in steps.items() if step not in beside])
    slow = [seconds for step, seconds in steps.items() if step in beside]
    return {
        "state_mb": round(shared[0].bytes / (1 << 20)),
        "step_s": round(usual, 3),
        "stall_s": _median(shared, "stood_s"),
        "step_beside_a_save": round(statistics.median(slow) / usual, 3),
        "save_memory_s": _median(shared, "copy_s"),
        "save_memory_gb_per_s": _rate(shared, "copy_s"),
        "save_local_s": _median(local, "write_s"),
        "save_local_gb_per_s": _rate(local, "write_s"),
        "save_shared_s": _median(shared, "write_s"),
        "save_shared_gb_per_s": _rate(shared, "write_s"),
    }


def _steps_beside(saved: CheckpointSaved, commits: list[Committed]) -> list[int]:
    begins_ns = saved.mono_ns - int((saved.copy_s + saved.write_s) * 1e9)
    return [e.step for e in commits if begins_ns <= e.mono_ns and e.mono_ns - e.seconds * 1e9 <= saved.mono_ns]


def _restoring(healed: Healed, loaded: list[CheckpointLoaded]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "restore_memory_s": round(healed.seconds, 3),
        "restore_memory_gb_per_s": round(healed.bytes / healed.seconds / 1e9, 3),
    }
    for tier in ("local", "shared"):
        found[f"restore_{tier}_s"] = _median(_of(loaded, tier), "seconds")
        found[f"restore_{tier}_gb_per_s"] = _rate(_of(loaded, tier), "seconds")
    return {**found, "restored_bits_compared": all(event.compared for event in loaded)}


def _median(events: list[Any], name: str) -> float:
    return round(statistics.median(getattr(event, name) for event in events), 3)


def _rate(events: list[Any], name: str) -> float:
    return round(statistics.median(event.bytes / max(getattr(event, name), 1e-9) for event in events) / 1e9, 3)


def train(state_mb: float, shared: str, local: str) -> None:
    """One group with timed compute, which saves; it is killed."""
    import torch

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    model = stack(state_mb / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = lightkeeper.Manager(model, optimizer)
    lightkeeper.Checkpoints(manager, shared, every=EVERY, local=local, local_every=LOCAL_EVERY).load()
    inputs = torch.randn(1, WIDTH)
    for step in manager.steps(1_000_000, GROUPS):
        optimizer.zero_grad()
        for _ in step.microbatches():
            start = time.monotonic()
            (model(inputs).square().mean() / step.total).backward()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - start)))
        optimizer.step()


# ---------------------------------------------------------------- torch alone


def _alone(state_mb: float, folder: Path) -> dict[str, Any]:
    trainers = Trainers(folder)
    try:
        trainers.start("alone", {}, alone, state_mb, str(folder))
        return dict(trainers.result_of(1, timeout_s=RUN_S_MAX)["alone"])
    finally:
        trainers.end()


def alone(state_mb: float, folder: str) -> dict[str, Any]:
    """Saves and loads the same state by torch.distributed.checkpoint, with its files fsynced."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from lightkeeper.bench._compute import stack

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    model = stack(state_mb / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    saves, stalls, loads = [], [], []
    size = 0
    for i in range(SAVES + 1):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        path = Path(folder) / f"{i}"
        start = time.monotonic()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        saves.append(time.monotonic() - start)
        start = time.monotonic()
        dcp.load(state, checkpoint_id=path)
        loads.append(time.monotonic() - start)
        size = sum(file.stat().st_size for file in path.iterdir())
        start = time.monotonic()
        saving: Any = dcp.async_save(state, checkpoint_id=Path(folder) / f"async-{i}")
        stalls.append(time.monotonic() - start)  # the loop may go on when it returns
        saving.result()
    save_s, load_s = statistics.median(saves[1:]), statistics.median(loads[1:])
    return {
        "stall_s": round(statistics.median(stalls[1:]), 3),
        "save_shared_s": round(save_s, 3),
        "save_shared_gb_per_s": round(size / save_s / 1e9, 3),
        "restore_shared_s": round(load_s, 3),
        "restore_shared_gb_per_s": round(size / load_s / 1e9, 3),
    }
