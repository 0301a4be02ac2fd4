"""Processes: tie a child to its parent, watch one that is not our child, see whether one is stopped, kill a tree."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import threading
from collections.abc import Callable

import psutil

from lightkeeper.manager.exits import describe_exit

_PR_SET_PDEATHSIG = 1
_STATES = {b"R": "running", b"S": "sleeping", b"D": "waiting for a device", b"T": "stopped", b"t": "traced"}
_LIBC = ctypes.CDLL(None, use_errno=True)  # here: in a forked child another thread's loader lock would never be freed
# linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info of 64 bytes), whose last field is exit_code
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel for a signal when the thread that started this process ends (run in the child, before exec).

    Args:
        number: the signal; SIGTERM lets it end in good order.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def heed_parent_alone() -> None:
    """In a child that `multiprocessing` forked: SIGTERM ends it if its parent sent it (`Process.terminate`).

    From anybody else it is ignored: who asks a whole process group to end means the parent, which still needs the
    child until it has. (A handler is not told who sent a signal, and would replace the child's own.)
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_if_parent_asks, args=(os.getppid(),), name="lightkeeper", daemon=True).start()


def _end_if_parent_asks(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)  # this thread alone takes it, as the default or the child's own handler says


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP, SIGTSTP) or by a tracer."""
    return _state(pid) in (b"T", b"t")


def state_of(pid: int) -> str:
    """What the main thread of a process does, in a word; empty if it is not there or does something rare."""
    return _STATES.get(_state(pid), "")


def has_ended(pid: int) -> bool:
    """Whether a process is no more, or only waits for its parent to ask how it ended."""
    return _state(pid) in (b"", b"Z", b"X")


def _state(pid: int) -> bytes:
    """As `ps` shows it; empty for a process that is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def exit_code(pid: int, descriptor: int) -> int | None:
    """What a process that has ended, not necessarily our child, ended with; negative for a signal.

    Args:
        pid: its pid.
        descriptor: its pidfd.

    Returns:
        None if the kernel does not tell: before Linux 6.15 only until its parent has asked.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # there until its parent has asked
            return os.waitstatus_to_exitcode(int(file.read().rpartition(b")")[2].split()[-1]))
    except (OSError, ValueError, IndexError):
        pass
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *(0,) * 13))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)  # there from then on
    except OSError:
        return None  # an older kernel
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None


class Trees:
    """Processes and all that they started, remembered, so that it can be killed when its root is dead already.

    A data-loader worker that outlives its trainer would keep memory, ports and the trainer's connections.
    """

    def __init__(self) -> None:
        self._seen: dict[int, psutil.Process] = {}

    def look(self, *roots: int) -> None:
        """Takes note of the roots and of what stands below them now."""
        self._seen = {pid: process for pid, process in self._seen.items() if process.is_running()}
        for root in roots:
            with contextlib.suppress(psutil.Error, OSError):  # OSError: out of descriptors, for instance
                top = psutil.Process(root)
                for process in (top, *top.children(recursive=True)):
                    self._seen.setdefault(process.pid, process)

    def kill(self, *roots: int) -> list[int]:
        """Kills all of them with SIGKILL, twice, for what was started between the look and the kill."""
        killed: dict[int, None] = {}
        for _ in range(2):
            self.look(*roots)
            for process in self._seen.values():
                if process.pid == os.getpid():
                    continue  # rank 0 may have started this very process
                with contextlib.suppress(psutil.Error, OSError):
                    process.kill()  # psutil checks the start time: a pid that was given away is not hit
                    killed[process.pid] = None
        return list(killed)


def kill_tree(pid: int) -> list[int]:
    """Kills a process and all its descendants. Only what stands below `pid` is touched."""
    return Trees().kill(pid)


class Watched:
    """A process, not necessarily a child, and whether it has ended.

    Args:
        pid: the process.
        name: what it is, for people.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid, self.name = pid, name
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = -1

    def how_it_ended(self) -> str:
        """``torchrun (pid 4711) was killed by SIGKILL``; empty while it lives.

        Its end is to be seen before that of any process that the kernel killed for it (`die_with_parent`).
        """
        if self._descriptor < 0:
            return f"{self.name} (pid {self.pid}) {describe_exit(None)}"
        if not select.select([self._descriptor], [], [], 0)[0]:
            return ""
        return f"{self.name} (pid {self.pid}) {describe_exit(exit_code(self.pid, self._descriptor))}"


def watch_exit(pid: int, ended: Callable[[int | None], None]) -> None:
    """Calls `ended` from the running event loop once a process (any, not only a child) has ended.

    Args:
        pid: the process.
        ended: told its exit code, as `exit_code` gives it.

    Raises:
        ProcessLookupError: if there is no such process any more.
    """
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(pid)

    def readable() -> None:
        loop.remove_reader(descriptor)
        code = exit_code(pid, descriptor)
        os.close(descriptor)
        ended(code)

    loop.add_reader(descriptor, readable)
