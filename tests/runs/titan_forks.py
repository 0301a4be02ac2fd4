"""A job whose trainers are torchtitan's, forked from one process that has imported it: the import takes many seconds.

Run as a program it is that process: a line of JSON on its standard input is a trainer to fork, and a line on its
standard output tells its pid or, later, how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

POLL_S = 0.02
START_S_MAX = 240.0


class Forked:
    """A trainer as `multiprocessing` would show it: its pid, and its exit code once it has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: int | None = None
        self.exitcode: int | None = None

    def join(self, within_s: float) -> None:
        """Waits for its end."""
        end = time.monotonic() + within_s
        while self.exitcode is None and time.monotonic() < end:
            time.sleep(POLL_S)


class ForkServer:
    """That process, and the trainers it has forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._asked: dict[str, Forked] = {}
        self._running: dict[int, Forked] = {}
        self._number = 0
        self._told = threading.Thread(target=self._listen, daemon=True)
        self._told.start()

    def fork(self, name: str, options: dict[str, Any], environment: dict[str, str], output: Path) -> Forked:
        """A new trainer."""
        self._number += 1
        child = self._asked[str(self._number)] = Forked(name)
        assert self._process.stdin is not None
        print(json.dumps([str(self._number), options, environment, str(output)]), file=self._process.stdin, flush=True)
        end = time.monotonic() + START_S_MAX
        while child.pid is None:
            assert time.monotonic() < end and self._process.poll() is None, f"{name} was not forked"
            time.sleep(POLL_S)
        return child

    def close(self) -> None:
        """Ends it, when all trainers have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, key, value = json.loads(line)
            if kind == "forked":
                child = self._asked.pop(key)
                self._running[value] = child
                child.pid = value
            else:
                self._running.pop(key).exitcode = value


def serve() -> None:
    """Forks what is asked for until the input ends."""
    import titan_loop

    buffer = b""
    alive = True
    running: set[int] = set()
    while alive or running:
        ready, _, _ = select.select([0] if alive else [], [], [], POLL_S)
        for _ in ready:
            got = os.read(0, 1 << 16)
            alive = bool(got)
            *lines, buffer = (buffer + got).split(b"\n")
            for line in lines:
                key, *given = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(titan_loop.run, *given)
                running.add(pid)
                print(json.dumps(["forked", key, pid]), flush=True)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                print(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]), flush=True)


def _become(run: Any, options: dict[str, Any], environment: dict[str, str], output: str) -> None:
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        run(options)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as Python would show it
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
