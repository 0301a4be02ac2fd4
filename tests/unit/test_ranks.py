"""The ranks of one node as processes: what they are told, who dies with whom, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightkeeper.errors import ToldError
from lightkeeper.manager.ranks import RankProcesses, Rendezvous, open_rendezvous
from lightkeeper.manager.sessions import kill_sessions

TOLD = """
import json, os, sys
print(json.dumps({k: v for k, v in os.environ.items()}), file=open(sys.argv[1] + os.environ["RANK"], "w"))
"""
STARTS_OTHERS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
subprocess.run(["sh", "-c", "sleep 600 & echo $! > " + sys.argv[1] + ".new"])
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


async def until(holds, what: str, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def told(tmp_path: Path, ranks: range, world_size: int, environment: dict[str, str], **more: int) -> list[dict]:
    async def run() -> None:
        command = (script(tmp_path, TOLD), str(tmp_path / "told-"))
        rendezvous = Rendezvous("10.1.2.3", 4711)  # of another node: no store is served here
        processes = RankProcesses(command, ranks, world_size, environment, "i7", rendezvous, **more)
        codes: dict[int, int] = {}
        processes.start()
        processes.watch(codes.__setitem__)
        await until(lambda: len(codes) == len(ranks), "all have ended")
        await processes.close()
        assert set(codes.values()) == {0}

    asyncio.run(run())
    return [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in ranks]


def test_ranks_are_told_what_torchrun_tells(tmp_path: Path, capsys) -> None:
    first, second = told(tmp_path, range(2, 4), 6, clean() | {"X": "y"}, node_rank=1, nodes=3, restart=2)
    wanted = {
        "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "6", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4711", "TORCHELASTIC_RUN_ID": "i7",
        "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "X": "y",
    }  # fmt: skip
    for index, got in enumerate((first, second)):
        assert {name: got.get(name) for name in wanted} == wanted
        assert (got["RANK"], got["LOCAL_RANK"], got["ROLE_RANK"]) == (str(2 + index), str(index), str(2 + index))
    assert capsys.readouterr().err.count("OMP_NUM_THREADS") == 1


def test_one_rank_keeps_all_threads_and_what_was_set_is_left(tmp_path: Path, capsys) -> None:
    (alone,) = told(tmp_path, range(1), 1, clean())
    assert "OMP_NUM_THREADS" not in alone and alone["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    for got in told(tmp_path, range(2), 2, clean() | {"OMP_NUM_THREADS": "3"}):
        assert got["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in capsys.readouterr().err


def test_codes_and_signals_are_told_and_close_takes_all_away(tmp_path: Path) -> None:
    ends = (
        "import os, signal, sys\nif os.environ['RANK'] == '0':\n    sys.exit(9)\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    )

    async def run() -> None:
        processes = RankProcesses((script(tmp_path, ends),), range(2), 2, clean(), "i", Rendezvous())
        codes: dict[int, int] = {}
        processes.start()
        pids = processes.pids
        processes.watch(codes.__setitem__)
        await until(lambda: len(codes) == 2, "both have ended")
        assert codes == {0: 9, 1: -signal.SIGSEGV} and processes.running() == []
        assert all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids.values())
        await processes.close()
        assert not any(psutil.pid_exists(pid) for pid in pids.values())

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["rank", "group"])
def test_what_a_rank_started_ends_with_it_though_its_parent_is_gone(tmp_path: Path, victim: str) -> None:
    """A look at the tree below a rank would find none of it: the rank is dead before anybody looked."""
    mark = tmp_path / "orphan"
    unrelated = subprocess.Popen(["sleep", "600"])  # a child of the launcher that is none of the group's

    async def run() -> None:
        processes = RankProcesses((script(tmp_path, STARTS_OTHERS), str(mark)), range(1), 1, clean(), "i", Rendezvous())
        codes: dict[int, int] = {}
        processes.start()
        processes.watch(codes.__setitem__)
        await until(mark.exists, "the script has started what outlives its parent")
        orphan, rank = int(mark.read_text()), processes.pids[0]
        others = [child.pid for child in psutil.Process(rank).children()]
        assert lives(orphan) and len(others) == 1
        if victim == "rank":
            os.kill(rank, signal.SIGKILL)
            await until(lambda: codes == {0: -9}, "its end is told")
        processes.kill()
        await until(lambda: not any(map(lives, (orphan, rank, *others))), "nothing is left", 3)
        await processes.close()

    try:
        asyncio.run(run())
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    waits = script(tmp_path, "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    starts = (
        "import os, sys, time\nfrom lightkeeper.manager.ranks import RankProcesses, Rendezvous\n"
        f"RankProcesses(({waits!r}, sys.argv[1]), range(1), 1, dict(os.environ), 'i', Rendezvous()).start()\n"
        "time.sleep(600)\n"
    )
    mark = tmp_path / "pid"
    launcher = subprocess.Popen([sys.executable, "-c", starts, str(mark)])
    try:
        asyncio.run(until(lambda: mark.exists() and mark.read_text() != "", "the rank runs"))
    finally:
        launcher.kill()
        launcher.wait()
    asyncio.run(until(lambda: not lives(int(mark.read_text())), "the rank has ended", 3))


def test_a_frozen_rank_is_killed_at_the_close(tmp_path: Path) -> None:
    async def run() -> None:
        command = (script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"),)
        processes = RankProcesses(command, range(1), 1, clean(), "i", Rendezvous())
        processes.start()
        pid = processes.pids[0]
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is frozen")
        await processes.close(within_s=0.1)
        assert not psutil.pid_exists(pid)

    asyncio.run(run())


def test_no_sessions_no_kill() -> None:
    assert kill_sessions(()) == []


def test_a_rendezvous_needs_an_address_of_this_node() -> None:
    with pytest.raises(ToldError, match=r"cannot listen at 203\.0\.113\.7"):
        open_rendezvous(2, "203.0.113.7")
