"""What a lighthouse costs and how soon it tells: 8 to 1,024 simulated managers over gRPC, beside torchft's."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lightkeeper.bench import _peer
from lightkeeper.bench._managers import Fleet, Simulated, batches
from lightkeeper.bench._trainers import say
from lightkeeper.demo.job import LocalJob
from lightkeeper.lighthouse import messages as m

SIZES = (8, 64, 256, 1024)
LARGEST = SIZES[-1]
STEADY_S = 20.0
SETTLE_S = 2.0
STEP_S = 1.0
ROUNDS = 5
TARGET = {"told_s": 1.0, "evicted_s": 2.5, "steady_cpu": 0.15, "memory_mb": 500.0}
GROWTH_MAX = 2.0  # of bytes per group, from the smallest job to the largest: O(N); a recovery may begin twice


def run() -> dict[str, Any]:
    """All sizes, each with a lighthouse of its own; then torchft's with as many groups."""
    ours: dict[str, Any] = {}
    peer: dict[str, Any] = {}
    for size in SIZES:
        say(f"lighthouse: {size} groups")
        ours[str(size)] = _apart(_ours, size)
    for size in SIZES:
        say(f"lighthouse: torchft, {size} groups")
        peer[str(size)] = _apart(_torchft, size)
    largest, theirs = ours[str(LARGEST)], peer[str(LARGEST)]
    return {
        "bench": "lighthouse",
        "ours": {**largest, "sizes": ours},
        "peer": {**theirs, "sizes": peer},
        "ratio": largest["told_s"] / theirs["round_s"],
        "target": {**TARGET, "bytes_growth": GROWTH_MAX},
        "met": all(largest[name] <= bound for name, bound in TARGET.items()) and _is_linear(ours),
    }


def _apart(measure: Callable[[int], dict[str, Any]], size: int) -> dict[str, Any]:
    """In a process of its own: gRPC's event loop does not outlive the first one that it ran in."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (size,))


def _is_linear(ours: dict[str, Any]) -> bool:
    """Whether the bytes grow no faster than the groups, in the steady state and per change."""
    for name in ("steady_bytes_per_minute", "break_bytes", "return_bytes", "back_bytes"):
        each = [ours[str(size)][name] / size for size in SIZES]
        if each[-1] > GROWTH_MAX * each[0]:
            return False
    return True


# ---------------------------------------------------------------- ours


@dataclass
class Run:
    """One lighthouse with its managers."""

    fleet: Fleet
    process: psutil.Process
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the lighthouse so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def bytes(self) -> int:
        """Payload of all messages so far, both ways."""
        return self.fleet.up_bytes + self.fleet.down_bytes


def _ours(size: int) -> dict[str, Any]:
    return asyncio.run(_measure(size))


async def _measure(size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, LocalJob(Path(name), ()) as job:
        address = job.start_lighthouse()
        run = Run(Fleet(address, job.token, size), psutil.Process(job.children["lighthouse"].pid))
        async with _living(run.fleet):
            await _admit(run)
            await _steady(run)
            victim = await _break(run)
            await _return(run, victim)
            await _silence(run)
            run.figures["memory_mb"] = round(run.process.memory_info().rss / 1e6, 1)
            await _restart(run, job)
        return run.figures


@contextlib.asynccontextmanager
async def _living(fleet: Fleet) -> AsyncIterator[None]:
    """Its managers look and its steps go on, until the end."""
    async with fleet.alive():
        steps = asyncio.create_task(_steps(fleet))
        try:
            yield
        finally:
            steps.cancel()


async def _steps(fleet: Fleet) -> None:
    while True:
        await asyncio.sleep(STEP_S)
        if fleet.stands_since is None and all(manager.number for manager in fleet.managers):
            fleet.step += 1


async def _admit(run: Run) -> None:
    """All come at once."""
    start, managers = time.monotonic(), run.fleet.managers
    await run.fleet.join()
    run.figures["admit_s"] = round(max(manager.heard["Activate"] for manager in managers) - start, 4)
    run.figures["admit_bytes"] = run.bytes
    assert managers[0].known is not None and len(managers[0].known.members) == run.fleet.size


async def _steady(run: Run) -> None:
    """Nothing happens: beats, while steps go on."""
    await asyncio.sleep(SETTLE_S + run.fleet.managers[0].beat_s)
    cpu_s, sent, messages, start = run.cpu_s, run.bytes, run.fleet.messages, time.monotonic()
    await asyncio.sleep(max(STEADY_S, 3 * run.fleet.managers[0].beat_s))
    seconds = time.monotonic() - start
    used_s = run.cpu_s - cpu_s
    run.figures["steady_cpu"] = round(used_s / seconds, 4)
    run.figures["steady_cpu_s_per_minute"] = round(60 * used_s / seconds, 2)
    run.figures["steady_bytes_per_minute"] = round(60 * (run.bytes - sent) / seconds)
    run.figures["steady_messages_per_s"] = round((run.fleet.messages - messages) / seconds, 1)
    run.figures["cpu_us_per_message"] = round(1e6 * used_s / max(1, run.fleet.messages - messages), 1)


async def _break(run: Run) -> Simulated:
    """A member dies inside a reduce: its stream breaks, and its peers' reduces fail."""
    fleet, victim = run.fleet, run.fleet.managers[run.fleet.size // 2]
    survivors = [manager for manager in fleet.managers if manager is not victim]
    before, sent = victim.number, run.bytes
    start = time.monotonic()
    fleet.managers.remove(victim)
    await victim.close()
    for manager in survivors:
        assert manager.known is not None
        failed = m.Failed(manager.known.epoch, fleet.step, "connection closed by peer", (victim.group,))
        manager.say(failed)
    await fleet.until(lambda: all(manager.number > before for manager in survivors), "an epoch without the dead")
    run.figures["told_s"] = _last(survivors, "Prepare", start)
    run.figures["activated_s"] = _last(survivors, "Activate", start)
    run.figures["break_bytes"] = run.bytes - sent
    return victim


async def _return(run: Run, victim: Simulated) -> None:
    """It comes back, has the state, and is switched in by the entry in which all carry its flag."""
    fleet, sent = run.fleet, run.bytes
    await asyncio.sleep(SETTLE_S)
    back = Simulated(fleet, victim.index, start=2)
    await back.connect()
    members = list(fleet.managers)
    fleet.managers.append(back)
    start = time.monotonic()
    sent = run.bytes
    back.join()
    await fleet.until(lambda: all(manager.planned is not None for manager in fleet.managers), "a planned epoch")
    run.figures["planned_s"] = round(time.monotonic() - start, 4)
    for manager in fleet.managers:
        manager.switch()
    number = members[0].number
    await fleet.until(lambda: all(m.number == number for m in fleet.managers), "the planned epoch")
    await asyncio.sleep(SETTLE_S)
    run.figures["return_bytes"] = run.bytes - sent
    assert back.known is not None and len(back.known.members) == fleet.size


async def _silence(run: Run) -> None:
    """A host is cut off without a word while all others stand in a reduce with it."""
    fleet = run.fleet
    await asyncio.sleep(SETTLE_S)
    victim = fleet.managers[fleet.size // 3]
    survivors = [manager for manager in fleet.managers if manager is not victim]
    before, sent = victim.number, run.bytes
    victim.mute = True
    start = fleet.stands_since = time.monotonic()
    await fleet.until(lambda: all(manager.number > before for manager in survivors), "an epoch without the silent")
    fleet.stands_since = None
    run.figures["evicted_s"] = _last(survivors, "Prepare", start)
    run.figures["evicted_first_s"] = round(min(manager.heard["Prepare"] for manager in survivors) - start, 4)
    run.figures["evicted_activated_s"] = _last(survivors, "Activate", start)
    run.figures["silence_bytes"] = run.bytes - sent
    assert survivors[0].known is not None and victim.group not in survivors[0].known.groups


async def _restart(run: Run, job: LocalJob) -> None:
    """The lighthouse is killed and started again with its log, and all come back to it at once."""
    fleet = run.fleet
    fleet.managers = [manager for manager in fleet.managers if not manager.mute]
    before = fleet.managers[0].number
    job.children["lighthouse"].kill()
    job.children["lighthouse"].wait()
    (job.folder / "output" / "lighthouse.txt").unlink()  # it names the address of the first
    fleet.address = job.start_lighthouse()
    for some in batches(fleet.managers):
        await asyncio.gather(*(manager.connect_again() for manager in some))
    start, sent = time.monotonic(), run.bytes
    for manager in fleet.managers:
        manager.join()
    await fleet.until(lambda: all("Welcome" in manager.heard for manager in fleet.managers), "a welcome")
    run.figures["back_s"] = _last(fleet.managers, "Welcome", start)
    run.figures["back_bytes"] = run.bytes - sent
    await asyncio.sleep(SETTLE_S)
    assert all(manager.number == before and "Prepare" not in manager.heard for manager in fleet.managers)


def _last(managers: list[Simulated], kind: str, start: float) -> float:
    return round(max(manager.heard[kind] for manager in managers) - start, 4)


# ---------------------------------------------------------------- the peer


def _torchft(size: int) -> dict[str, Any]:
    """One quorum round per step, which it cannot do without."""
    with _peer.lighthouse_process(size) as (address, pid):
        process = psutil.Process(pid)
        times = process.cpu_times()
        figures = asyncio.run(_peer.quorum_rounds(address, size, ROUNDS))
        after = process.cpu_times()
        used_s = after.user + after.system - times.user - times.system
        memory_mb = round(process.memory_info().rss / 1e6, 1)
        return {**figures, "cpu_s_per_round": round(abs(used_s) / ROUNDS, 4), "memory_mb": memory_mb}
