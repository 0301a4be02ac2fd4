"""What every cluster must do. A further implementation is a further line in `CLUSTERS`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import lightkeeper.supervisor.clusters.local
from lightkeeper.supervisor.clusters.interface import (
    CannotStart,
    Cluster,
    Exited,
    Happening,
    NodeCame,
    NodeLeaving,
    NodeLost,
)
from lightkeeper.supervisor.clusters.local import Local

SLEEPS = "import sys, time; print('up', flush=True); time.sleep(60)"
FORKS = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    "start_new_session=True); print(child.pid, flush=True); time.sleep(60)"
)
DAEMON = (
    "import os, sys, time\n"
    "if os.fork(): sys.exit(os.wait()[1])\n"
    "os.setsid()\n"
    "if pid := os.fork(): print(pid, flush=True); os._exit(0)\n"
    "time.sleep(60)"
)
WITHIN_S = 60.0


def local(folder: Path, orphan_s: float = 60.0) -> Local:
    """What nobody supervises for so long ends; the next supervisor may take a while to come."""
    return Local(folder / "nodes", ["n0", "n1"], orphan_s=orphan_s)


CLUSTERS: dict[str, Callable[..., Local]] = {"local": local}


class Heard:
    """What a cluster has told."""

    def __init__(self) -> None:
        self.all: list[Happening] = []

    async def wait_for(self, wanted: Happening | type[Any]) -> Happening:
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            for one in self.all:
                if one == wanted or (isinstance(wanted, type) and isinstance(one, wanted)):
                    return one
            await asyncio.sleep(0.02)
        raise AssertionError(f"{wanted} was not told, but {self.all}")


@asynccontextmanager
async def opened(make: Callable[[Path], Local], folder: Path) -> AsyncIterator[tuple[Local, Heard, list[Any]]]:
    heard = Heard()
    cluster = make(folder)
    running = await cluster.open(heard.all.append)
    try:
        yield cluster, heard, running
    finally:
        await cluster.close(end=True)


async def start(cluster: Cluster, folder: Path, code: str, name: str = "g0", node: str = "n0") -> str:
    """What it prints first."""
    log = folder / f"{name}.log"
    await cluster.start(node, name, [sys.executable, "-c", code], {"PATH": os.environ["PATH"]}, log)
    assert log.exists()
    end = time.monotonic() + WITHIN_S
    while "\n" not in log.read_text() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return log.read_text().strip()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.fixture(params=CLUSTERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Local]:
    return CLUSTERS[request.param]


def test_exit_codes_and_signals_are_told(make: Callable[[Path], Local], tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, heard, running):
            assert running == []
            await cluster.start(
                "n1", "short", [sys.executable, "-c", "raise SystemExit(7)"], {}, tmp_path / "short.log"
            )
            await heard.wait_for(Exited("n1", "short", 7))
            await start(cluster, tmp_path, SLEEPS)
            await cluster.signal("n0", "g0", signal.SIGTERM)
            await heard.wait_for(Exited("n0", "g0", -signal.SIGTERM))
            await cluster.signal("n0", "g0", signal.SIGTERM)  # nothing is there any more
            await cluster.kill("n0", "g0")

    asyncio.run(run())


def test_a_kill_leaves_nothing_that_was_started(make: Callable[[Path], Local], tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, heard, _):
            below = int(await start(cluster, tmp_path, FORKS))
            await cluster.kill("n0", "g0")
            await heard.wait_for(Exited("n0", "g0", -signal.SIGKILL))
            await until(lambda: gone(below))  # though it had a session of its own

    asyncio.run(run())


def test_a_daemon_that_left_its_parents_is_ended_with_what_started_it(
    make: Callable[[Path], Local], tmp_path: Path
) -> None:
    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, heard, _):
            daemon = int(await start(cluster, tmp_path, DAEMON))
            await heard.wait_for(Exited("n0", "g0", 0))
            await until(lambda: gone(daemon))

    asyncio.run(run())


def test_a_host_that_is_frozen_when_the_next_supervisor_comes_is_replaced(
    make: Callable[[Path], Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first() -> tuple[int, int]:
        cluster = make(tmp_path)
        await cluster.open(lambda _: None)
        await start(cluster, tmp_path, SLEEPS)
        host = cluster.pid_of("n0")
        started = psutil.Process(host).children()[0].pid
        os.kill(host, signal.SIGSTOP)
        await cluster.close(end=False)
        return host, started

    async def second(host: int, started: int) -> None:
        async with opened(make, tmp_path) as (cluster, _, running):
            assert running == [] and cluster.pid_of("n0") != host
            await until(lambda: gone(started))
            await start(cluster, tmp_path, SLEEPS, "g1")

    frozen = asyncio.run(first())
    monkeypatch.setattr(lightkeeper.supervisor.clusters.local, "HOST_S_MAX", 8.0)  # in which the next comes up
    asyncio.run(second(*frozen))


def test_one_name_stands_for_one_process_and_what_cannot_start_is_said(
    make: Callable[[Path], Local], tmp_path: Path
) -> None:
    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, _, _):
            await start(cluster, tmp_path, SLEEPS)
            with pytest.raises(CannotStart, match="g0 runs here already"):
                await cluster.start("n0", "g0", ["true"], {}, tmp_path / "x.log")
            with pytest.raises(CannotStart, match="no-such-program"):
                await cluster.start("n0", "g1", ["/no-such-program"], {}, tmp_path / "y.log")
            await start(cluster, tmp_path, SLEEPS, "g0b", "n1")

    asyncio.run(run())


def test_a_lost_node_is_told_and_nothing_runs_on_there(
    make: Callable[[Path], Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightkeeper.supervisor.clusters.local, "BEAT_S", 0.3)

    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, heard, _):
            await start(cluster, tmp_path, SLEEPS)
            pid = psutil.Process(cluster.pid_of("n0")).children()[0].pid
            os.kill(cluster.pid_of("n0"), signal.SIGKILL)
            lost = await heard.wait_for(NodeLost)
            assert isinstance(lost, NodeLost) and lost.node == "n0"
            with pytest.raises(CannotStart):  # at once: its host comes back
                await cluster.start("n0", "g1", ["true"], {}, tmp_path / "x.log")
            await until(lambda: gone(pid))
            await heard.wait_for(NodeCame("n0"))
            await start(cluster, tmp_path, SLEEPS, "g2")
            heard.all.clear()
            await asyncio.sleep(5 * lightkeeper.supervisor.clusters.local.BEAT_S)  # of the host before
            assert not heard.all, "the one that stands for it now is left alone"

    asyncio.run(run())


def test_a_node_that_does_not_answer_is_lost(
    make: Callable[[Path], Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightkeeper.supervisor.clusters.local, "BEAT_S", 0.1)

    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, heard, _):
            await start(cluster, tmp_path, SLEEPS)
            pid = psutil.Process(cluster.pid_of("n0")).children()[0].pid
            os.kill(cluster.pid_of("n0"), signal.SIGSTOP)
            monkeypatch.setattr(lightkeeper.supervisor.clusters.local, "HOST_S_MAX", 5.0)  # once all are there
            lost = await heard.wait_for(NodeLost)
            assert isinstance(lost, NodeLost) and lost.node == "n0"
            await until(lambda: gone(pid))

    asyncio.run(run())


def test_the_next_supervisor_finds_what_runs_and_hears_what_has_ended(
    make: Callable[[Path], Local], tmp_path: Path
) -> None:
    async def first() -> None:
        cluster = make(tmp_path)
        await cluster.open(lambda _: None)
        await start(cluster, tmp_path, SLEEPS)
        await cluster.start("n1", "g1", [sys.executable, "-c", "import time; time.sleep(0.3)"], {}, tmp_path / "g1.log")
        await cluster.close(end=False)

    async def second() -> None:
        async with opened(make, tmp_path) as (_, heard, running):
            assert ("n0", "g0") in running
            await heard.wait_for(Exited("n1", "g1", 0))

    asyncio.run(first())
    time.sleep(0.4)
    asyncio.run(second())


def test_nodes_of_which_one_cannot_be_opened_are_given_back(tmp_path: Path) -> None:
    """The folder of the second is a file; the host of the first is there by then."""

    async def run() -> None:
        cluster = local(tmp_path)
        (tmp_path / "nodes").mkdir()
        (tmp_path / "nodes" / "n1").write_text("")
        with pytest.raises(OSError, match="n1"):
            await cluster.open(lambda happening: None)
        pid = cluster.pid_of("n0")
        assert not gone(pid)
        await cluster.close(end=True)
        await until(lambda: gone(pid))

    asyncio.run(run())


def test_a_node_is_drained_and_taken_back(make: Callable[[Path], Local], tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(make, tmp_path) as (cluster, heard, _):
            await start(cluster, tmp_path, SLEEPS)
            cluster.drain("n0", "new firmware")
            await heard.wait_for(NodeLeaving("n0", "new firmware"))
            await cluster.signal("n0", "g0", signal.SIGTERM)
            await heard.wait_for(Exited("n0", "g0", -signal.SIGTERM))
        heard.all.clear()
        async with opened(make, tmp_path) as (cluster, heard, _):
            await heard.wait_for(NodeLeaving("n0", "new firmware"))  # also the next supervisor hears of it
            cluster.undrain("n0")
            await heard.wait_for(NodeCame("n0"))

    asyncio.run(run())


def test_without_a_supervisor_all_ends_in_time(make: Callable[..., Local], tmp_path: Path) -> None:
    async def run() -> int:
        cluster = make(tmp_path, 8.0)  # for what is started before it is left
        await cluster.open(lambda _: None)
        await start(cluster, tmp_path, SLEEPS)
        pid = psutil.Process(cluster.pid_of("n0")).children()[0].pid
        await cluster.close(end=False)
        return pid

    pid = asyncio.run(run())
    asyncio.run(until(lambda: gone(pid)))
