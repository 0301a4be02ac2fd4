"""Processes: tie a child to its parent, watch one that is not our child, see whether one is stopped, kill a tree."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (run in the child, before exec)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP, SIGTSTP) or by a tracer."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def exit_code_of_zombie(pid: int) -> int | None:
    """What an ended process that its parent has not yet asked about ended with; negative for a signal.

    Returns:
        None if the parent was faster, or the kernel does not tell.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        status = int(fields[-1])  # field 52, exit_code, in the form of waitpid
    except (OSError, ValueError, IndexError):
        return None
    return os.waitstatus_to_exitcode(status)


def kill_tree(pid: int) -> list[int]:
    """Kills a process and all its descendants with SIGKILL, the process first so that it starts no more.

    Only what stands below `pid` is touched. Returns the pids that were killed.
    """
    try:
        root = psutil.Process(pid)
        below = root.children(recursive=True)
    except psutil.Error:
        return []
    killed = []
    for process in (root, *below):
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil checks the start time: a pid that was given away is not hit
            killed.append(process.pid)
    for child in below:  # whoever was started between the look and the kill
        with contextlib.suppress(psutil.Error):
            for late in child.children(recursive=True):
                late.kill()
                killed.append(late.pid)
    return killed


def watch_exit(pid: int, ended: Callable[[], None]) -> Callable[[], None]:
    """Calls `ended` from the running event loop once a process (any, not only a child) has ended.

    Returns:
        A function that stops watching.

    Raises:
        ProcessLookupError: if there is no such process any more.
    """
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(pid)

    def stop() -> None:
        loop.remove_reader(descriptor)
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def readable() -> None:
        stop()
        ended()

    loop.add_reader(descriptor, readable)
    return stop
