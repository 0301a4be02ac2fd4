"""A supervised job over a cluster that starts nothing, for the tests of the supervisor's service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightkeeper.events import read_run
from lightkeeper.events.of_supervisor import GroupEnded
from lightkeeper.events.schema import Finished
from lightkeeper.events.writer import EventLog
from lightkeeper.supervisor.aside import Aside
from lightkeeper.supervisor.clusters.interface import CannotStart, Exited, Heard, NodeLost
from lightkeeper.supervisor.jobfile import JobFile
from lightkeeper.supervisor.quarantine_file import QuarantineFile
from lightkeeper.supervisor.service import Service
from lightkeeper.supervisor.tables import read_table

WITHIN_S = 60.0


class Nodes:
    """A cluster in memory. `refuses` says why a process cannot be started: node and name in, "" if it can."""

    def __init__(self, running: Sequence[tuple[str, str]] = (), ended: Sequence[Exited] = ()) -> None:
        self.running, self._ended = set(running), ended
        self.starts: list[tuple[str, str]] = []
        self.signals: list[tuple[str, str, int]] = []
        self.closed: bool | None = None
        self.refuses: Callable[[str, str], str] = lambda node, name: ""

    async def open(self, heard: Heard) -> list[tuple[str, str]]:
        self.heard = heard
        for one in self._ended:
            heard(one)
        return sorted(self.running)

    async def start(self, node: str, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        if why := self.refuses(node, name):
            raise CannotStart(why)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write("lighthouse: listening on 127.0.0.1:1234, term 1\n" if name == "lighthouse" else "")
        self.starts.append((node, name))
        self.running.add((node, name))

    async def signal(self, node: str, name: str, number: int) -> None:
        self.signals.append((node, name, number))

    async def kill(self, node: str, name: str) -> None:
        if (node, name) in self.running:
            self.ends(node, name, -9)

    async def close(self, end: bool) -> None:
        self.closed = end

    def ends(self, node: str, name: str, code: int | None) -> None:
        self.running.discard((node, name))
        self.heard(Exited(node, name, code))

    def loses(self, node: str) -> None:
        self.running = {one for one in self.running if one[0] != node}
        self.heard(NodeLost(node, "gone"))


class Job:
    """One supervised job of two groups on three nodes."""

    def __init__(self, folder: Path, nodes: Nodes | None = None, **more: Any) -> None:
        table = {
            "name": "j", "command": ["t.py"], "groups": 2, "cluster": {"nodes": 3}, "preflight": {"enabled": False},
            "burn_in": {"enabled": False}, **more,
        }  # fmt: skip
        self.folder, self.nodes = folder, nodes or Nodes()
        self.told: list[tuple[str, str]] = []
        self.aside = Aside(QuarantineFile(folder / "quarantine.json"), "j")
        self.file = read_table(JobFile, table, "job.toml")

    def run(self, meanwhile: Callable[[Job], Awaitable[None]]) -> int:
        """Runs the supervisor, and beside it what a test does."""

        async def both() -> int:
            self.service = Service(
                self.file,
                self.folder,
                self.nodes,
                self.file.nodes,
                self.aside,
                lambda message: self.told.append((message.what, message.summary)),
            )
            run = asyncio.create_task(self.service.run())
            doing = asyncio.ensure_future(meanwhile(self))
            await asyncio.wait([run, doing], return_when=asyncio.FIRST_COMPLETED, timeout=WITHIN_S)
            if doing.done():
                await doing
            doing.cancel()
            return await asyncio.wait_for(run, WITHIN_S)

        return asyncio.run(both())

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    async def until_started(self, *wanted: tuple[str, str]) -> None:
        await self.until(lambda: set(wanted) <= set(self.nodes.starts))

    def finish(self) -> None:
        """All that runs ends well, the run being finished."""
        for node, name in sorted(self.nodes.running):
            if name != "lighthouse":
                EventLog(self.folder, f"rank {name}/0", job="j", group=name, incarnation="i").write(Finished(step=9))
                self.nodes.ends(node, name, 0)

    def reasons(self, group: str) -> list[str]:
        return [e.reason for e in read_run(self.folder).events if isinstance(e, GroupEnded) and e.group == group]

    def judged(self) -> list[tuple[str, str, str]]:
        events = read_run(self.folder).events
        return [(e.group, e.whose, e.failure) for e in events if isinstance(e, GroupEnded)]
