"""`lightkeeper launch`: one command that starts one replica group, its manager and its ranks, and starts them again.

This process is the manager; the ranks are its children. Every start of the group has a manager, an incarnation and a
folder of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightkeeper.errors import UsageError
from lightkeeper.manager import exits, faults
from lightkeeper.manager.folders import SOCKET, make_folder
from lightkeeper.manager.ranks import RankProcesses, open_rendezvous
from lightkeeper.manager.restarts import GroupEnd, Restarts, may_restart
from lightkeeper.manager.service import ManagerService, new_incarnation
from lightkeeper.manager.spawn import SOCKET_VARIABLE
from lightkeeper.manager.warm import WarmRanks
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.cli.options import LaunchOptions


def run(options: LaunchOptions) -> int:
    """Starts the group, and again while it may; returns the exit code of its last start."""
    _check_command(options.command)
    return asyncio.run(Launcher(options).run())


def _check_command(command: tuple[str, ...]) -> None:
    usage = "lightkeeper launch ... -- SCRIPT ARGS, or -- -m MODULE ARGS"
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError(f"no module after -m: {usage}")
    elif not Path(command[0]).is_file():
        raise UsageError(f"no script {command[0]}: {usage}")


class Launcher:
    """Start after start of one group."""

    def __init__(self, options: LaunchOptions) -> None:
        self.settings, self.command = options.settings, options.command
        self.restarts = Restarts(options.restarts)
        self.warm = WarmRanks(self.settings.ranks, self.command, self._say) if options.warm else None
        self.starts = 0
        self._asked, self._asked_by = asyncio.Event(), ""
        self._service: ManagerService | None = None  # one that can be asked

    async def run(self) -> int:
        """Serves the group until it has ended for good; returns its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_leave, signal.Signals(number).name)
        try:
            return await self._serve_all()
        finally:
            if self.warm is not None:
                self.warm.close()

    async def _serve_all(self) -> int:
        while True:
            began_s = time.monotonic()
            service = ManagerService(self.settings, new_incarnation(), make_folder() / SOCKET)
            end = await self._serve(service)
            pause_s = self.restarts.after(end, time.monotonic() - began_s)
            if pause_s is None:
                if self.restarts.allowed and may_restart(end):
                    self._say(f"is not started again: its {self.restarts.allowed} restarts are used up")
                return end.code
            then = f" in {pause_s:.0f} s" if pause_s else ""
            left = f"{self.restarts.left} of {self.restarts.allowed} restarts left"
            self._say(f"is started again{then} ({service.machine.ending}); {left}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), pause_s)
            if self._asked.is_set():
                return exits.ASKED
            self.starts += 1

    def _asked_to_leave(self, name: str) -> None:
        self._asked.set()
        self._asked_by = name
        if self._service is not None:
            self._service.asked_to_leave(name)

    async def _serve(self, service: ManagerService) -> GroupEnd:
        """One start of the group, from its first process to its last."""
        serving = asyncio.create_task(service.run())
        ranks = self._ranks(service)
        ended: dict[int, int] = {}
        keeping: asyncio.Task[None] | None = None

        def rank_ended(rank: int, code: int) -> None:
            if not serving.done():
                ended[rank] = code
            service.local.ended(rank, code)

        try:
            while not service.local.path.exists():
                if serving.done():
                    return GroupEnd(serving.result())
                await asyncio.sleep(0.005)
            environment = ranks.environment_of(ranks.ranks.start)
            ranks.start(await self.warm.take(environment) if self.warm is not None else ())
            service.local.roots.update(ranks.pids.values())
            service.local.kill_also = ranks.kill
            ranks.watch(rank_ended)
            self._service = service
            if self._asked.is_set():
                service.asked_to_leave(self._asked_by)
            if self.warm is not None and self.restarts.left:
                keeping = asyncio.create_task(self.warm.keep(environment, service.is_complete))
            code = await serving
            asked = self._asked.is_set() or bool(service.machine.leaving)
            return GroupEnd(code, next(iter(ended.values()), None), asked)
        finally:
            self._service = None
            if keeping is not None:
                keeping.cancel()
            await ranks.close()
            shutil.rmtree(service.local.path.parent, ignore_errors=True)

    def _say(self, line: str) -> None:
        say(f"manager {self.settings.group}: {line}")

    def _ranks(self, service: ManagerService) -> RankProcesses:
        size = self.settings.ranks
        environment = {
            **os.environ,
            **self.settings.to_environment(),
            SOCKET_VARIABLE: str(service.local.path),
        }
        if self.starts:
            environment.pop(faults.VARIABLE, None)  # a fault on request strikes the first start
        return RankProcesses(
            self.command,
            range(size),
            size,
            environment,
            service.incarnation,
            open_rendezvous(size),
            restart=self.starts,
        )
