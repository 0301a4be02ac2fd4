"""The stacks of ranks, by whichever of three means still works: py-spy, the rank's own handler, what the kernel shows.

py-spy reads a process from outside, also one that is stopped, where it is installed and may. The handler (`handler.py`)
answers even while the interpreter lock is held. Of a stopped rank, and of one that has no handler yet, the kernel tells
where each thread stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.manager.evidence.handler import handler_of, handles
from lightkeeper.manager.processes import has_ended, is_stopped

LOOK_S = 0.01
QUIET_S = 0.03  # a dump that has not grown for so long is whole
ANSWER_S_MAX = 0.5  # a handler answers within milliseconds
THREADS_MAX = 64
SPY = "py-spy"


@dataclass(frozen=True)
class Stacks:
    """What was found of one rank.

    Attributes:
        by: ``py-spy``, ``handler`` or ``kernel``.
        text: the stacks.
        missing: why there is no better one; empty if none is wanted.
    """

    by: str
    text: bytes
    missing: str = ""


def ask(pid: int, rank: int, folder: Path) -> bool:
    """Has the rank's own handler write the stacks now, and returns; whether there is one that can hear it."""
    found = handler_of(folder, rank)
    if found is None or is_stopped(pid) or not handles(pid, found[0]):
        return False
    number, path = found
    with contextlib.suppress(OSError):
        os.truncate(path, 0)  # what an earlier incident left
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False


async def stacks_of(pid: int, rank: int, folder: Path, asked: bool, until_s: float) -> Stacks | None:
    """A rank's stacks.

    Args:
        pid: its process.
        rank: its index.
        folder: the group's own folder.
        asked: what `ask` returned.
        until_s: on the monotonic clock.

    Returns:
        None for a process that has ended and left none.
    """
    spied = await _by_spy(pid, until_s)
    if isinstance(spied, bytes):
        return Stacks(SPY, spied)
    why = spied
    if asked and (handler := handler_of(folder, rank)) is not None:
        answer = await _answer(pid, handler[1], min(until_s, time.monotonic() + ANSWER_S_MAX))
        if answer:
            return Stacks("handler", answer)
        why = f"its handler did not answer; {why}"
    elif is_stopped(pid):
        why = f"it is stopped; {why}"
    else:
        why = f"it has no handler yet; {why}"
    text = kernel_view(pid)
    return Stacks("kernel", text, f"no Python stack: {why}") if text else None


async def _by_spy(pid: int, until_s: float) -> bytes | str:
    """What py-spy finds, or why it finds nothing."""
    program = shutil.which(SPY)
    if program is None:
        return "no py-spy on PATH"
    stopped = ("--nonblocking",) if is_stopped(pid) else ()  # there is nothing left to stop
    spy = await asyncio.create_subprocess_exec(
        program, "dump", *stopped, "--pid", str(pid),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            out, error = await spy.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            spy.send_signal(signal.SIGKILL)
        await spy.wait()
        return "py-spy took too long"
    if spy.returncode == 0 and out.strip():
        return out
    return f"py-spy: {error.decode(errors='replace').strip().partition(chr(10))[0][:200] or 'found nothing'}"


async def _answer(pid: int, path: Path, until_s: float) -> bytes:
    """What the handler has written, once that grows no more."""
    size, since_s = 0, time.monotonic()
    while (now := time.monotonic()) < until_s:
        try:
            found = path.stat().st_size
        except OSError:
            return b""
        if found != size:
            size, since_s = found, now
        elif size and now - since_s >= QUIET_S:
            break
        elif not size and has_ended(pid):
            return b""
        await asyncio.sleep(LOOK_S)
    try:
        return path.read_bytes()
    except OSError:
        return b""


def kernel_view(pid: int) -> bytes:
    """Where each thread of a process stands, as /proc has it; empty if there is no such process."""
    if has_ended(pid):
        return b""
    told = [*_file(pid, "status"), *_file(pid, "cmdline")]
    with contextlib.suppress(OSError):
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:THREADS_MAX]:
            for name in ("comm", "wchan", "syscall", "stack"):
                told += _file(pid, f"task/{thread}/{name}")
    return "".join(told).encode()


def _file(pid: int, name: str) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return []
    return [f"{name}: {text}\n" if "\n" not in text else f"{name}:\n{text}\n"]
