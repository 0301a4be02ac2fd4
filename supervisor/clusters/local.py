"""Nodes that are folders and process trees on this machine, each with a host process that stands for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightkeeper.supervisor.clusters.host import DRAIN, LINE_BYTES_MAX, PID, SOCKET, short
from lightkeeper.supervisor.clusters.interface import CannotStart, Exited, Heard, NodeCame, NodeLeaving, NodeLost

HOST_S_MAX = 20.0  # for a host to listen, or to answer
BEAT_S = 5.0  # how often a host is asked whether it is there
BACK_S = 1.0  # after which a node that was lost is tried again


class Local:
    """A cluster on this machine.

    Args:
        folder: of the nodes.
        names: theirs.
        orphan_s: for how long they go on without a supervisor.
    """

    def __init__(self, folder: Path, names: Sequence[str], orphan_s: float) -> None:
        self.folder, self.names, self._orphan_s = folder, tuple(names), orphan_s
        self._links: dict[str, _Link] = {}
        self._heard: Heard | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self, heard: Heard) -> list[tuple[str, str]]:
        """See `Cluster`."""
        self._heard = heard
        found: list[tuple[str, str]] = []
        for name in self.names:
            await self._take_up(name)
        for name, link in self._links.items():
            answer = await link.ask({"do": "list"})
            found += [(name, one) for one in answer["running"]]
            for one, code in answer["ended"].items():
                heard(Exited(name, one, code))
                await link.tell({"do": "forget", "name": one})
        return found

    async def start(self, node: str, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """See `Cluster`."""
        order = {
            "do": "start", "name": name, "argv": list(argv), "environment": dict(environment),
            "log": str(log.absolute()),
        }  # fmt: skip
        answer = await self._ask(node, order)
        if answer["problem"]:
            raise CannotStart(f"{name} cannot be started on {node}: {answer['problem']}")

    async def signal(self, node: str, name: str, number: int) -> None:
        """See `Cluster`."""
        with contextlib.suppress(CannotStart):
            await self._ask(node, {"do": "signal", "name": name, "number": number})

    async def kill(self, node: str, name: str) -> None:
        """See `Cluster`."""
        with contextlib.suppress(CannotStart):
            await self._ask(node, {"do": "kill", "name": name})

    async def close(self, end: bool) -> None:
        """See `Cluster`."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            if end:
                with contextlib.suppress(CannotStart):
                    await link.ask({"do": "end"})
            link.close()
        if end:
            await asyncio.gather(*(_gone(self.folder / name) for name in self.names))

    def pid_of(self, node: str) -> int:
        """The host's process: killing it is the loss of the node."""
        return int((self.folder / node / PID).read_text())

    def drain(self, node: str, why: str) -> None:
        """Takes a node out of service, as an operator does by this file."""
        (self.folder / node / DRAIN).write_text(why)

    def undrain(self, node: str) -> None:
        """Takes that back."""
        (self.folder / node / DRAIN).unlink(missing_ok=True)

    async def _ask(self, node: str, order: dict[str, Any]) -> dict[str, Any]:
        link = self._links.get(node)
        if link is None:
            raise CannotStart(f"{node} is gone")
        return await link.ask(order)

    async def _take_up(self, name: str) -> None:
        """Connects to the host that stands for a node; starts it if there is none."""
        folder = self.folder / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = await _Link.to(name, folder / SOCKET)
        if link is not None and not await _answers(link):
            link.close()
            link = None
        if link is None:
            _start_host(folder, self._orphan_s)
            end = time.monotonic() + HOST_S_MAX
            while link is None and time.monotonic() < end:
                await asyncio.sleep(0.02)
                link = await _Link.to(name, folder / SOCKET)
        if link is None:
            raise CannotStart(f"the host of node {name} did not come up in {folder}")
        self._links[name] = link
        for work in (self._listen(name, link), self._beat(name, link)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _beat(self, name: str, link: _Link) -> None:
        """A host that does not answer is lost."""
        while self._links.get(name) is link and not self._closed:
            await asyncio.sleep(BEAT_S)
            if not await _answers(link):
                return

    async def _listen(self, name: str, link: _Link) -> None:
        assert self._heard is not None
        async for message in link.messages():
            if message["is"] == "drained":
                self._heard(NodeCame(name) if message["why"] is None else NodeLeaving(name, message["why"]))
                continue
            self._heard(Exited(name, message["name"], message["code"]))
            await link.tell({"do": "forget", "name": message["name"]})
        if self._closed:
            return
        del self._links[name]
        self._heard(NodeLost(name, "its host ended"))
        while not self._closed and name not in self._links:
            await asyncio.sleep(BACK_S)
            try:
                await self._take_up(name)
            except (CannotStart, OSError):
                continue
            self._heard(NodeCame(name))


class _Link:
    """The connection to one host: orders are answered in their order, news come in between."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._name, self._reader, self._writer = name, reader, writer
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._asking = asyncio.Lock()
        self.gone = False
        self.pid = _peer(writer)
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def to(cls, name: str, path: Path) -> _Link | None:
        """The link to a host that listens; None if there is none."""
        try:
            with short(path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=LINE_BYTES_MAX)
        except (FileNotFoundError, ConnectionError):
            return None
        return cls(name, reader, writer)

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError, ValueError, msgspec.DecodeError):
            while line := await self._reader.readline():
                message = msgspec.json.decode(line)
                (self._answers if message["is"] == "answer" else self._news).put_nowait(message)
        self.gone = True
        self._answers.put_nowait(None)
        self._news.put_nowait(None)

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Has an order carried out.

        Raises:
            CannotStart: the host is gone.
        """
        async with self._asking:
            if self.gone:
                raise CannotStart(f"the host of node {self._name} is gone")
            self._writer.write(msgspec.json.encode(order) + b"\n")
            try:
                async with asyncio.timeout(HOST_S_MAX):
                    answer = await self._answers.get()
            except TimeoutError:
                self.kill()  # or its answer, when it comes, would be taken for that to the next order
                answer = None
        if answer is None:
            raise CannotStart(f"the host of node {self._name} does not answer")
        return answer

    def kill(self) -> None:
        """Ends the host, and with it all that it started."""
        self.gone = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def tell(self, order: dict[str, Any]) -> None:
        """As `ask`, but nothing follows from it."""
        with contextlib.suppress(CannotStart):
            await self.ask(order)

    async def messages(self) -> Any:
        """Who has ended, and that the node is drained, until the host is gone."""
        while (message := await self._news.get()) is not None:
            yield message

    def close(self) -> None:
        self._writer.close()


async def _answers(link: _Link) -> bool:
    try:
        await link.ask({"do": "list"})
    except CannotStart:
        return False
    return True


def _peer(writer: asyncio.StreamWriter) -> int:
    """The pid at the other end of a socket."""
    told = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


def _start_host(folder: Path, orphan_s: float) -> None:
    with (folder / "host.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "lightkeeper.supervisor.clusters.host", str(folder), "--orphan-s", str(orphan_s)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


async def _gone(folder: Path) -> None:
    """A host that was told to end has ended; one that does not is killed."""
    try:
        pid = int((folder / PID).read_text())
    except (OSError, ValueError):
        return  # there was none
    end = time.monotonic() + HOST_S_MAX
    while (folder / SOCKET).exists() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    if (folder / SOCKET).exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
