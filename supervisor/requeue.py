"""Puts a run whose time is over back where it came from, by a command of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

REQUEUE_S_MAX = 60.0


async def requeue(argv: Sequence[str], log: Path) -> str:
    """Why the run does not go on by itself; "" if it does.

    Args:
        argv: the command.
        log: where its output goes.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        async with asyncio.timeout(REQUEUE_S_MAX):
            code = await process.wait()
        problem = "" if code == 0 else f"ended with {code}; see {log}"
    except TimeoutError:  # before OSError, which it is
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        problem = f"did not end within {REQUEUE_S_MAX:g} s"
    except OSError as error:
        problem = error.strerror or str(error)
    return problem and f"the run does not go on by itself: {shlex.join(argv)}: {problem}"
