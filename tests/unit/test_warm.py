"""Processes that wait for a rank to be: what they become, and which of them are never used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from lightkeeper.manager import warm
from lightkeeper.manager.ranks import RankProcesses, Rendezvous
from lightkeeper.manager.warm import WarmRanks, lasting

TELLS = (
    "import json, os, signal, sys\n"
    "told = dict(env=dict(os.environ), argv=sys.argv, file=__file__, name=__name__, path=sys.path[0],\n"
    "    early='wave' in sys.modules, policy=os.sched_getscheduler(0), pid=os.getpid(),\n"
    "    ignores=signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,\n"
    "    fds=[os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2 and\n"
    "         os.path.exists(f'/proc/self/fd/{fd}')])\n"
    "with open(sys.argv[1] + os.environ['RANK'], 'w') as file:\n    json.dump(told, file)\n"
)
MODULES = ("wave",)  # small, and nobody imports it by chance


class Pool:
    """A pool, the environment it was started with, and what it said."""

    def __init__(self, folder: Path, count: int = 1, modules: tuple[str, ...] = MODULES) -> None:
        (folder / "script.py").write_text(TELLS)
        self.folder, self.said = folder, list[str]()
        self.command = (str(folder / "script.py"), str(folder / "told-"))
        self.warm = WarmRanks(count, self.command, self.said.append, modules)
        self.environment = {**os.environ, "RANK": "0", "MASTER_PORT": "1", "STAYS": "so"}

    async def become_ready(self) -> list[int]:
        await self.warm.look(self.environment)
        pids = [waits.process.pid for waits in self.warm.waiting]
        await until(self.all_ready, "they are ready")
        return pids

    async def all_ready(self) -> bool:
        await self.warm.look(self.environment)
        return all(waits.ready for waits in self.warm.waiting)


@contextlib.asynccontextmanager
async def pool(folder: Path, count: int = 1, modules: tuple[str, ...] = MODULES) -> AsyncIterator[Pool]:
    made = Pool(folder, count, modules)
    try:
        yield made
    finally:
        made.warm.close()


async def until(holds, what: str, within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not (await holds() if asyncio.iscoroutinefunction(holds) else holds()):
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_it_becomes_the_rank_and_nothing_shows_but_that_its_imports_are_done(tmp_path: Path) -> None:
    async def run() -> tuple[list[int], list[dict]]:
        async with pool(tmp_path, 2) as made:
            pids = await made.become_ready()
            ranks = RankProcesses(made.command, range(2), 2, made.environment, "i2", Rendezvous("h", 9), restart=1)
            taken = await made.warm.take(ranks.environment_of(0))
            assert taken == [], "they were started with other variables than these ranks have"
            made.environment = ranks.environment_of(0)
            await made.become_ready()
            pids = [waits.process.pid for waits in made.warm.waiting]
            codes: dict[int, int] = {}
            ranks.start(await made.warm.take(made.environment))
            assert made.warm.waiting == []
            ranks.watch(codes.__setitem__)
            await until(lambda: codes == {0: 0, 1: 0}, "both have run the script")
            await ranks.close()
            wanted = [ranks.environment_of(rank) for rank in range(2)]
        told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
        for got, environment in zip(told, wanted, strict=True):
            assert got["env"] == environment
        return pids, told

    pids, told = asyncio.run(run())
    for pid, got in zip(pids, told, strict=True):
        assert got["pid"] == pid and got["early"]
        assert got["argv"] == [str(tmp_path / "script.py"), str(tmp_path / "told-")]
        assert (got["file"], got["name"], got["path"]) == (got["argv"][0], "__main__", str(tmp_path))
        assert got["policy"] == os.SCHED_OTHER and got["ignores"]
        assert not [name for name in got["fds"] if "socket" in name or "memfd" in name], got["fds"]
        assert got["env"]["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_a_mix_of_waiting_and_new_ranks(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(tmp_path, 1) as made:
            ranks = RankProcesses(made.command, range(2), 2, made.environment, "i2", Rendezvous("h", 9))
            made.environment = ranks.environment_of(0)
            (pid,) = await made.become_ready()
            codes: dict[int, int] = {}
            ranks.start(await made.warm.take(made.environment))
            ranks.watch(codes.__setitem__)
            await until(lambda: codes == {0: 0, 1: 0}, "both have run the script")
            await ranks.close()
            told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
            assert [got["early"] for got in told] == [True, False] and told[0]["pid"] == pid
            assert all(got["ignores"] for got in told)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["killed", "frozen", "variable", "python"])
def test_a_broken_one_is_never_used_and_is_replaced(tmp_path: Path, monkeypatch, how: str) -> None:
    monkeypatch.setattr(warm, "ANSWER_S", 8.0)

    async def run() -> None:
        async with pool(tmp_path) as made:
            (pid,) = await made.become_ready()
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
                await until(lambda: not lives(pid), "it is dead")
            elif how == "frozen":
                os.kill(pid, signal.SIGSTOP)
            elif how == "variable":
                made.environment["STAYS"] = "not so"
            else:
                monkeypatch.setattr(warm, "python_state", lambda: (None,))
            assert await made.warm.take(made.environment) == []
            await until(made.all_ready, "another one waits")
            (other,) = (waits.process.pid for waits in made.warm.waiting)
            assert other != pid and not lives(pid)
            (taken,) = await made.warm.take(made.environment)
            assert taken.process.pid == other
            taken.end()
        outdated = how in ("variable", "python")
        assert [line for line in made.said if f"pid {pid}" in line and "out of date" in line] or not outdated

    asyncio.run(run())


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_look_replaces_what_broke(tmp_path: Path, monkeypatch, how: str) -> None:
    monkeypatch.setattr(warm, "ANSWER_S", 8.0)

    async def run() -> None:
        async with pool(tmp_path) as made:
            (pid,) = await made.become_ready()
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            await until(lambda: how == "frozen" or not lives(pid), "it is dead")
            (other,) = await made.become_ready()
            assert other != pid and not lives(pid)
            why = "it ended with -9" if how == "killed" else "it did not answer for"
            assert len(made.said) == 1 and f"(pid {pid}) is replaced: {why}" in made.said[0]

    asyncio.run(run())


def test_one_that_still_imports_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def run() -> None:
        async with pool(tmp_path, modules=("slow_to_import",)) as made:
            made.environment["PYTHONPATH"] = str(tmp_path)
            await made.warm.look(made.environment)
            (waits,) = made.warm.waiting
            assert await waits.answers(60) and not waits.ready
            assert await made.warm.take(made.environment) == [] and made.warm.waiting == [waits]
            monkeypatch.setattr(warm, "IMPORT_S_MAX", 0.0)
            await made.warm.look(made.environment)
            assert "its imports took more than" in made.said[0] and made.warm.waiting != [waits]

    asyncio.run(run())


def test_imports_that_fail_are_given_up_in_one_line(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(warm, "LOOK_S", 0.05)
    monkeypatch.setattr(warm, "AFTER_S", 0.0)

    async def run() -> Pool:
        async with pool(tmp_path, modules=("no_such_module",)) as made:
            await asyncio.wait_for(made.warm.keep(made.environment, lambda: True), 60)
            assert await made.warm.take(made.environment) == []
            return made

    said = asyncio.run(run()).said
    assert len(said) == 4 and said[-1].startswith("keeps no process ready for a restart: 3 of them broke")
    assert all("it ended with 1" in line for line in said[:-1])
    assert capfd.readouterr().err.count("ModuleNotFoundError: No module named 'no_such_module'") == 3


def test_they_end_with_the_launcher(tmp_path: Path) -> None:
    starts = (
        "import asyncio, os, sys\nfrom lightkeeper.manager.warm import WarmRanks\n"
        "async def run():\n"
        "    warm = WarmRanks(1, ('x.py',), print, ('wave',))\n"
        "    await warm.look(dict(os.environ))\n"
        "    print(warm.waiting[0].process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(run())\n"
    )
    launcher = psutil.Popen([sys.executable, "-c", starts], stdout=-1)
    try:
        pid = int(launcher.stdout.readline())
        assert lives(pid)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    asyncio.run(until(lambda: not lives(pid), "it has ended"))


def test_what_differs_between_starts_is_no_reason() -> None:
    base = {"A": "b", "RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "i1", "LIGHTKEEPER_SOCKET": "/x"}
    other = {"A": "b", "RANK": "3", "MASTER_PORT": "2", "TORCHELASTIC_RUN_ID": "i2", "LIGHTKEEPER_SOCKET": "/y"}
    assert lasting(base) == lasting(other) == {"A": "b"}
