"""What stands for a node on this machine: a process that starts what runs there, and for a while goes on alone.

It serves one supervisor after another on a socket in the node's folder. When none has been there for `--orphan-s` it
kills what it started and ends; when it is killed itself, the kernel kills what it started. While there is a file
`drain` in the folder the node is to be left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from lightkeeper.manager.processes import die_with_parent
from lightkeeper.manager.sessions import kill_sessions
from lightkeeper.manager.spawn import STARTED_AS_VARIABLE

LINE_BYTES_MAX = 4 << 20
SOCKET, PID, DRAIN = "host.sock", "host.pid", "drain"
WHY_BYTES_MAX = 200
GONE_S_MAX = 5.0
POLL_S = 0.05


class Host:
    """The processes of one node.

    Args:
        folder: the node's.
        orphan_s: for how long it goes on without a supervisor.
    """

    def __init__(self, folder: Path, orphan_s: float) -> None:
        self.folder, self.orphan_s = folder, orphan_s
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.below: dict[str, dict[int, psutil.Process]] = {}  # all that a process was seen to have started
        self.ended: dict[str, int] = {}  # not yet acknowledged
        self.writer: asyncio.StreamWriter | None = None
        self.alone_since = time.monotonic()
        self.drained = self._look_drained()
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Serves until it is told to end, or nobody comes."""
        for process in marked(self._mark("")):  # of a host before, which was killed
            with contextlib.suppress(psutil.Error):
                process.kill()
        path = self.folder / SOCKET
        path.unlink(missing_ok=True)
        with short(path) as address:
            server = await asyncio.start_unix_server(self._serve, address, limit=LINE_BYTES_MAX)
        (self.folder / PID).write_text(str(os.getpid()))
        async with server:
            watching = asyncio.create_task(self._watch())
            await self.over.wait()
            watching.cancel()
        self._kill_all()
        path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.writer is not None:
            self.writer.close()  # the newest one counts
        self.writer = writer
        if self.drained is not None:
            self._say({"is": "drained", "why": self.drained}, writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                try:
                    answer = self._do(msgspec.json.decode(line))
                except (OSError, KeyError, TypeError, msgspec.DecodeError) as error:
                    answer = {"is": "answer", "problem": f"{type(error).__name__}: {error}"}
                self._say(answer, writer)
        if self.writer is writer:
            self.writer, self.alone_since = None, time.monotonic()
        writer.close()

    def _do(self, order: dict[str, Any]) -> dict[str, Any]:
        what, name = order["do"], order.get("name", "")
        if what == "start":
            self._start(name, order["argv"], order["environment"], Path(order["log"]))
        elif what == "signal" and name in self.children:
            os.kill(self.children[name].pid, int(order["number"]))
        elif what == "kill" and name in self.children:
            self._kill(name)
        elif what == "forget":
            self.ended.pop(name, None)
        elif what == "end":
            self.over.set()
        running = [one for one, child in self.children.items() if child.poll() is None]
        return {"is": "answer", "problem": "", "running": running, "ended": self.ended}

    def _start(self, name: str, argv: list[str], environment: dict[str, str], log: Path) -> None:
        if name in self.children:
            raise OSError(f"{name} runs here already")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            os.fsync(output.fileno())
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**environment, STARTED_AS_VARIABLE: self._mark(name)},
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self.children[name], self.below[name] = child, {}
        self.ended.pop(name, None)

    def _kill(self, name: str) -> None:
        child = self.children[name]
        self._look_below(name)
        kill_sessions([child.pid])
        for process in self.below[name].values():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _look_below(self, name: str) -> None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.children[name].pid).children(recursive=True):
                self.below[name].setdefault(process.pid, process)

    async def _watch(self) -> None:
        """Tells who has ended, with all below it; ends when nobody comes."""
        looked_s = 0.0
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            for name, child in list(self.children.items()):
                if child.poll() is None:
                    if now - looked_s > 1.0:
                        self._look_below(name)
                    continue
                await self._clear(name)
                del self.children[name], self.below[name]
                self.ended[name] = child.returncode
                self._say({"is": "exited", "name": name, "code": child.returncode}, self.writer)
            if (drained := self._look_drained()) != self.drained:
                self.drained = drained
                self._say({"is": "drained", "why": drained}, self.writer)
            looked_s = now if now - looked_s > 1.0 else looked_s
            if self.writer is None and now - self.alone_since > self.orphan_s:
                names = ", ".join(self.children) or "nothing"
                print(f"{time.ctime()}: no supervisor for {self.orphan_s:g} s: ends {names}", flush=True)
                self.over.set()

    def _look_drained(self) -> str | None:
        """What the file says by which an operator takes the node out of service; None if there is none."""
        try:
            with (self.folder / DRAIN).open("rb") as file:
                return file.read(WHY_BYTES_MAX).decode(errors="replace").strip() or "drained"
        except OSError:
            return None

    def _mark(self, name: str) -> str:
        """Told to a process, and by it to all that it starts, daemons too."""
        return f"{self.folder.absolute()}:{name}:" if name else f"{self.folder.absolute()}:"

    async def _clear(self, name: str) -> None:
        """Nothing of it is left: whatever it started and did not end itself is killed."""
        for process in marked(self._mark(name)):
            self.below[name].setdefault(process.pid, process)
        end = time.monotonic() + GONE_S_MAX
        while (
            left := [process for process in self.below[name].values() if _lives(process)]
        ) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            await asyncio.sleep(POLL_S)

    def _kill_all(self) -> None:
        for name in list(self.children):
            self._kill(name)
        for process in marked(self._mark("")):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GONE_S_MAX)

    def _say(self, what: dict[str, Any], writer: asyncio.StreamWriter | None) -> None:
        if writer is not None and not writer.is_closing():
            writer.write(msgspec.json.encode(what) + b"\n")


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """The address of a socket in a folder whose path may be longer than the 107 bytes that an address has."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that were told a mark that begins so."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(STARTED_AS_VARIABLE, "").startswith(mark):
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def main() -> None:
    """Runs one host."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--orphan-s", type=float, required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    host: Host | None = None

    async def run() -> None:
        nonlocal host
        host = Host(options.folder, options.orphan_s)
        await host.run()

    try:
        asyncio.run(run())
    finally:
        if host is not None:
            host._kill_all()


if __name__ == "__main__":
    main()
