"""What a step costs the manager of a large group: its processor time at 8, 64 and 512 ranks, eight to a node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from lightkeeper.bench._nodes import NaiveRanks, Nodes
from lightkeeper.bench._trainers import say
from lightkeeper.bench.vote import TOKEN, CountingLighthouse
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.spawn import PARENT_VARIABLE, SOCKET_VARIABLE

PER_NODE = 8
STEPS = {8: 400, 64: 200, 512: 60}  # by ranks
WARM_STEPS = 10
IDLE_S = 3.0
STEP_S_MAX = 60.0
TARGET = 0.2  # of what it costs to serve each rank by a call of its own, at 512 ranks


def run() -> dict[str, Any]:
    """Processor time per step, and while no step is done; beside it a bare server that is called once by each rank."""
    ours: dict[str, Any] = {}
    peer: dict[str, Any] = {}
    for ranks in STEPS:
        say(f"votes: {ranks} ranks on {ranks // PER_NODE} nodes")
        ours[f"cpu_ms_{ranks}"], ours[f"idle_percent_{ranks}"] = asyncio.run(_ours(ranks))
        peer[f"cpu_ms_{ranks}"] = asyncio.run(_naive(ranks))
    most = max(STEPS)
    ratio = ours[f"cpu_ms_{most}"] / peer[f"cpu_ms_{most}"]
    return {
        "bench": "votes", "ours": ours, "peer": peer, "ratio": ratio, "target": TARGET, "met": ratio <= TARGET,
    }  # fmt: skip


async def _ours(ranks: int) -> tuple[float, float]:
    """Milliseconds of the manager's processor time per step, and percent of a core while its ranks compute."""
    with tempfile.TemporaryDirectory() as name, CountingLighthouse() as lighthouse:
        path = Path(name) / "manager.sock"
        settings = Settings(
            group="g0", lighthouse=lighthouse.address, token=TOKEN, ranks=ranks, nnodes=ranks // PER_NODE,
        )  # fmt: skip
        variables = {**settings.to_environment(), SOCKET_VARIABLE: str(path), PARENT_VARIABLE: str(os.getpid())}
        manager = psutil.Popen([sys.executable, "-m", "lightkeeper.manager.main"], env={**os.environ, **variables})
        try:
            async with Nodes(settings, path, os.getpid()) as nodes:
                await nodes.until(WARM_STEPS, STEP_S_MAX)
                before = _cpu_s(manager)
                await nodes.until(WARM_STEPS + STEPS[ranks], STEP_S_MAX)
                cpu_s = _cpu_s(manager) - before
                nodes.pause()
                before = _cpu_s(manager)
                await asyncio.sleep(IDLE_S)
                idle_s = _cpu_s(manager) - before
                manager.kill()  # before its nodes leave it
        finally:
            manager.kill()
            manager.wait()
    return 1000 * cpu_s / STEPS[ranks], 100 * idle_s / IDLE_S


async def _naive(ranks: int) -> float:
    """Milliseconds per step of a server that does nothing but wait for a call of each rank, and answer them."""
    server = psutil.Popen([sys.executable, "-m", "lightkeeper.bench._nodes", str(ranks)], stdout=subprocess.PIPE)
    try:
        port = int((await asyncio.to_thread(server.stdout.readline)).decode())
        async with NaiveRanks(port, ranks, PER_NODE) as clients:
            await clients.steps(WARM_STEPS)
            before = _cpu_s(server)
            await clients.steps(STEPS[ranks] // 2)
            cpu_s = _cpu_s(server) - before
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    return 1000 * cpu_s / (STEPS[ranks] // 2)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
