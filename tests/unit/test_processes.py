"""Processes that are not our children: how they ended, whether they are stopped; killing a tree and no more."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightkeeper.manager import processes
from lightkeeper.manager.processes import die_with_parent, is_stopped, kill_tree, state_of, watch_exit

BOUND_S = 60.0
TELLS_EXIT = tuple(int(x) for x in platform.release().split(".")[:2]) >= (6, 15)


def eventually(condition, what: str) -> None:
    until = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def grandchild(code: str) -> tuple[subprocess.Popen[str], int]:
    """A child that starts a grandchild; returns the child and the grandchild's pid. The child reaps it at once."""
    script = (
        "import subprocess, sys;"
        f"p = subprocess.Popen([sys.executable, '-c', {code!r}]);"
        "print(p.pid, flush=True); p.wait(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


async def exit_of(pid: int, then) -> int | None:
    ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    watch_exit(pid, ended.set_result)
    then()
    return await asyncio.wait_for(ended, BOUND_S)


@pytest.mark.skipif(
    not TELLS_EXIT, reason="before Linux 6.15 the kernel does not tell how a process ended that is not our child"
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_how_a_process_that_is_not_our_child_was_killed(number: int) -> None:
    child, pid = grandchild("import time; time.sleep(60)")
    try:
        assert asyncio.run(exit_of(pid, lambda: os.kill(pid, number))) == -number
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not TELLS_EXIT, reason="as above")
@pytest.mark.parametrize("code", [0, 3])
def test_what_a_process_that_is_not_our_child_exited_with(code: int) -> None:
    child, pid = grandchild(f"import sys; sys.stdin.read(1); sys.exit({code})")
    try:
        assert child.stdin is not None
        stdin = child.stdin
        assert asyncio.run(exit_of(pid, stdin.close)) == code
    finally:
        child.kill()
        child.wait()


def test_how_our_own_child_ended_also_before_it_is_reaped() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert asyncio.run(exit_of(child.pid, child.kill)) == -signal.SIGKILL
    finally:
        child.wait()


@pytest.mark.skipif(not TELLS_EXIT, reason="as above")
def test_how_it_ended_is_known_also_if_its_parent_reaps_it_while_we_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells it from the reaping on, /proc until the reaping: asked in this order, neither may know."""
    child = subprocess.Popen(["sleep", "600"])
    descriptor = os.pidfd_open(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    real = processes.fcntl.ioctl

    def reaped_just_after(*given):
        try:
            return real(*given)
        finally:
            child.wait()

    monkeypatch.setattr(processes.fcntl, "ioctl", reaped_just_after)
    try:
        assert processes.exit_code(child.pid, descriptor) == -signal.SIGKILL
    finally:
        os.close(descriptor)


def test_watching_a_process_that_is_gone_says_so() -> None:
    child = subprocess.Popen(["true"])
    child.wait()

    async def scene() -> None:
        watch_exit(child.pid, lambda code: None)

    with pytest.raises(ProcessLookupError):
        asyncio.run(scene())


def test_stopped_is_seen_and_seen_to_end() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(child.pid), "it is not seen to be stopped")
        child.send_signal(signal.SIGCONT)
        eventually(lambda: not is_stopped(child.pid), "it is not seen to go on")
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)


def test_a_name_with_brackets_does_not_hide_the_state(tmp_path) -> None:
    script = tmp_path / "a) T (b"
    script.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(script), "60"])
    try:
        eventually(lambda: psutil.Process(child.pid).name() == "a) T (b", "it has not started")
        assert not is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()


TREE = """
import subprocess, sys
script, depth = sys.argv[1], int(sys.argv[2])
children = [subprocess.Popen([sys.executable, "-c", script, script, str(depth - 1)]) for _ in range(2 if depth else 0)]
print("up", flush=True)
import time
from pathlib import Path
time.sleep(600)
"""


def test_kill_tree_kills_all_below_and_nothing_beside() -> None:
    beside = subprocess.Popen(["sleep", "600"])
    root = subprocess.Popen([sys.executable, "-c", TREE, TREE, "2"], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: len(psutil.Process(root.pid).children(recursive=True)) == 6, "the tree has not grown")
        below = psutil.Process(root.pid).children(recursive=True)
        killed = kill_tree(root.pid)
        assert set(killed) == {root.pid, *(p.pid for p in below)}
        assert root.wait(timeout=BOUND_S) == -signal.SIGKILL
        eventually(lambda: not any(p.is_running() and p.status() != "zombie" for p in below), "a descendant lives on")
        assert beside.poll() is None and psutil.Process(os.getpid()).is_running()
    finally:
        for process in (beside, root):
            process.kill()
            process.wait()


def test_kill_tree_of_a_stopped_process_and_of_none() -> None:
    child = subprocess.Popen(["sleep", "600"])
    child.send_signal(signal.SIGSTOP)
    assert kill_tree(child.pid) == [child.pid]
    assert child.wait(timeout=BOUND_S) == -signal.SIGKILL
    assert kill_tree(child.pid) == []


def test_a_process_tied_to_its_parent_dies_with_it() -> None:
    script = (
        "import subprocess, sys; from lightkeeper.manager.processes import die_with_parent;"
        "p = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent); print(p.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    eventually(lambda: not orphan.is_running() or orphan.status() == "zombie", "it outlives its parent")
    assert callable(die_with_parent)


def test_a_process_tied_to_its_parent_may_end_in_good_order(tmp_path: Path) -> None:
    shell = f"trap 'touch {tmp_path}/ended; exit' TERM; echo up; while :; do sleep 0.02; done"
    script = (
        "import functools, signal, subprocess, sys; from lightkeeper.manager.processes import die_with_parent;"
        f"p = subprocess.Popen(['sh', '-c', {shell!r}], stdout=subprocess.PIPE,"
        " preexec_fn=functools.partial(die_with_parent, signal.SIGTERM));"
        "p.stdout.readline(); print(p.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline()
    parent.kill()
    parent.wait()
    eventually((tmp_path / "ended").exists, "it was not asked to end")


def test_what_a_process_does_is_said_in_a_word() -> None:
    sleeping = subprocess.Popen(["sleep", "600"])
    try:
        eventually(lambda: state_of(sleeping.pid) == "sleeping", "it does not sleep")
        assert state_of(os.getpid()) == "running"
        sleeping.send_signal(signal.SIGSTOP)
        os.waitpid(sleeping.pid, os.WUNTRACED)
        assert state_of(sleeping.pid) == "stopped"
    finally:
        sleeping.kill()
        sleeping.wait()
    assert state_of(sleeping.pid) == ""
