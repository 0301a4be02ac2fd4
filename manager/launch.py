"""`lightkeeper launch`: one command that starts one replica group, its manager and its ranks, and starts them again.

This process is the manager, or, on a node without it, the node's agent; the ranks are its children. Every start of the
group has a manager, an incarnation and a folder of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightkeeper.errors import UsageError
from lightkeeper.manager import faults, ncclenv
from lightkeeper.manager.addresses import own_host
from lightkeeper.manager.agent import NodeAgent
from lightkeeper.manager.folders import SOCKET, FolderNotMade, make_folder
from lightkeeper.manager.notice import Notice, watch_notice
from lightkeeper.manager.ranklogs import RankLogs
from lightkeeper.manager.ranks import END_S, RankProcesses, Rendezvous, open_rendezvous
from lightkeeper.manager.restarts import PAUSE_S_MAX, GroupEnd, Restarts, may_restart
from lightkeeper.manager.service import ManagerService, new_incarnation
from lightkeeper.manager.signals import NOTICE
from lightkeeper.manager.spawn import SOCKET_VARIABLE, STARTED_AS_VARIABLE
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
        if command[1] == "torchtitan.train" and importlib.util.find_spec("triton") is None:
            raise UsageError(
                "torchtitan.train imports triton, which comes with torch's CUDA builds only; without a GPU try "
                "examples/train_titan.py"
            )
    elif not Path(command[0]).is_file():
        raise UsageError(f"no script {command[0]}: {usage}")


class Launcher:
    """Start after start of one group, or of what one node has of it."""

    def __init__(self, options: LaunchOptions) -> None:
        self.settings, self.command = options.settings, options.command
        self.restarts = Restarts(options.restarts)
        self.warm = WarmRanks(len(self.settings.ranks_here), self.command, self._say) if options.warm else None
        self.log_folder = options.log_folder or (self.settings.run_folder and f"{self.settings.run_folder}/logs")
        self.starts = 0
        self._asked, self._asked_by = asyncio.Event(), ""  # by a signal, or (then it is empty) by a notice file
        self._is_notice = False  # the signal
        self._notice, self._noticed_s = Notice(), 0.0
        self._next_s = 0.0  # when the group's next start is due, also on its other nodes
        self._service: ManagerService | NodeAgent | None = None  # one that can be asked
        self._keeping: asyncio.Task[None] | None = None
        self._finishing: list[asyncio.Task[None]] = []  # what earlier starts still write down

    async def run(self) -> int:
        """Serves the group until it has ended for good; returns its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, NOTICE):
            loop.add_signal_handler(number, self._asked_to_leave, signal.Signals(number))
        if self.settings.notice_file:  # once, also for the pauses between starts
            watch_notice(Path(self.settings.notice_file), self._noticed, self._say)
        try:
            return await self._serve_all()
        finally:
            await asyncio.gather(*self._finishing)
            if self.warm is not None:
                self.warm.close()

    async def _serve_all(self) -> int:
        while True:
            folder = await self._new_folder()
            if folder is None:
                self._say(f"is not started: asked to leave ({self._asked_by or self.settings.notice_file})")
                return 0  # nothing runs, so it has left
            began_s = time.monotonic()
            service = self._new_service(folder / SOCKET)
            try:
                end = await (self._serve(service) if isinstance(service, ManagerService) else self._serve_node(service))
            finally:
                self._service = None
                self._finishing.append(asyncio.create_task(service.finish()))
                if self._keeping is not None:
                    self._keeping.cancel()
                shutil.rmtree(service.local.path.parent, ignore_errors=True)
            pause_s = self.restarts.after(end, time.monotonic() - began_s)
            if pause_s is None:
                await asyncio.gather(*self._finishing)  # why there is no other start is the last line
                if self.restarts.allowed and may_restart(end):
                    service.say(f"is not started again: its {self.restarts.allowed} restarts are used up")
                return end.code
            then = f" in {pause_s:.0f} s" if pause_s else ""
            left = f"{self.restarts.left} of {self.restarts.allowed} restarts left"
            service.say(f"is started again{then} ({service.why}); {left}")
            self._next_s = time.monotonic() + pause_s
            await self._pause(pause_s)
            self.starts += 1

    async def _new_folder(self) -> Path | None:
        """The folder of the next start; None if the launcher was asked to leave before there was one.

        Raises:
            FolderNotMade: at the first start at once, later if there was no room for as long as the outage budget.
        """
        until_s, pause_s = time.monotonic() + (self.settings.outage_budget_s if self.starts else 0.0), 1.0
        while self.settings.node_rank or not self._asked.is_set():  # an agent is waited for until somebody hears of it
            try:
                return make_folder()
            except FolderNotMade as error:
                if self._asked.is_set():
                    break
                if time.monotonic() + pause_s > until_s:
                    raise
                self._say(f"waits for room for its next start: {error}")
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        return None

    async def _pause(self, pause_s: float) -> None:
        """So long, or until somebody asks to leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._asked.wait()

    def _asked_to_leave(self, number: signal.Signals) -> None:
        """By this signal."""
        self._asked.set()
        self._is_notice = number == NOTICE
        supervised = STARTED_AS_VARIABLE in os.environ and self._is_notice
        self._asked_by = "SIGUSR1 from the supervisor" if supervised else number.name
        if self._service is not None:
            self._service.asked_to_leave(self._asked_by, notice=self._is_notice)

    def _noticed(self, notice: Notice) -> None:
        self._asked.set()
        self._notice, self._noticed_s = notice, time.monotonic()
        if self._service is not None:
            self._service.noticed(notice)

    def _can_be_asked(self, service: ManagerService | NodeAgent) -> None:
        """What was asked before is asked now."""
        self._service = service
        if self._asked_by:
            service.asked_to_leave(self._asked_by, notice=self._is_notice)
        if self._noticed_s:
            service.noticed(self._notice.after(time.monotonic() - self._noticed_s))

    def _new_service(self, path: Path) -> ManagerService | NodeAgent:
        if self.settings.node_rank == 0:
            return ManagerService(self.settings, new_incarnation(), path)

        async def started(incarnation: str, host: str, port: int) -> RankProcesses:
            return await self._started(self._ranks(path, incarnation, Rendezvous(host, port)), agent.is_complete)

        agent = NodeAgent(self.settings, path, started, END_S)
        agent.asked_s += max(0.0, self._next_s - time.monotonic())  # if it was asked in a pause
        return agent

    async def _serve(self, service: ManagerService) -> GroupEnd:
        """One start of the group, from its first process to its last."""
        s = self.settings
        rendezvous = open_rendezvous(s.ranks, own_host(s.host, s.lighthouse) if s.nnodes > 1 else "127.0.0.1")
        service.streams.rendezvous = (rendezvous.host, rendezvous.port)
        ranks = self._ranks(service.local.path, service.incarnation, rendezvous)
        service.collector.logs = ranks.logs
        serving = asyncio.create_task(service.run())
        try:
            while not service.local.path.exists():
                if serving.done():
                    return GroupEnd(serving.result())
                await asyncio.sleep(0.005)
            await self._started(ranks, service.is_complete)
            service.local.roots.update(ranks.pids.values())
            service.collector.started = ranks.pids
            service.local.kill_also = ranks.kill
            ranks.watch(service.local.ended)
            self._can_be_asked(service)
            code = await serving
            asked = self._asked.is_set() or bool(service.machine.leaving)
            return GroupEnd(code, service.first_exit, asked)
        finally:
            await ranks.close()

    async def _serve_node(self, agent: NodeAgent) -> GroupEnd:
        """One start of the group on a node without its manager, which decides how the group ends."""
        self._can_be_asked(agent)
        code = await agent.run()
        return GroupEnd(code, agent.first_exit, agent.group_was_asked or self._asked.is_set())

    async def _started(self, ranks: RankProcesses, is_up: Callable[[], bool]) -> RankProcesses:
        """Starts them, from processes that wait for it if there are any, and has others wait once these are up."""
        environment = ranks.environment_of(ranks.ranks.start)
        ranks.start(await self.warm.take(environment) if self.warm is not None else ())
        if self.warm is not None and self.restarts.left:
            self._keeping = asyncio.create_task(self.warm.keep(environment, is_up))
        return ranks

    def _say(self, line: str) -> None:
        node = f", node {self.settings.node_rank}" if self.settings.node_rank else ""
        say(f"manager {self.settings.group}{node}: {line}")

    def _ranks(self, path: Path, incarnation: str, rendezvous: Rendezvous) -> RankProcesses:
        s = self.settings
        environment = {**os.environ, **s.to_environment(), SOCKET_VARIABLE: str(path)}
        if self.starts:
            environment.pop(faults.VARIABLE, None)  # a fault on request strikes the first start
        environment.update(ncclenv.unset(environment, s.timeouts))
        return RankProcesses(
            self.command, s.ranks_here, s.ranks, environment, incarnation, rendezvous,
            node_rank=s.node_rank, nodes=s.nnodes, restart=self.starts, logs=self._logs(incarnation),
        )  # fmt: skip

    def _logs(self, incarnation: str) -> RankLogs | None:
        """Takes what the ranks of this start print.

        Raises:
            UsageError: at the first start, if the folder cannot be written; later the group goes on without.
        """
        if not self.log_folder:
            return None
        try:
            return RankLogs(Path(self.log_folder), self.settings.group, self.settings.ranks_here, incarnation)
        except OSError as error:
            told = f"cannot write the ranks' logs in {self.log_folder}: {error.strerror or error}"
            if not self.starts:
                raise UsageError(told) from error
            self._say(f"{told}; this start's output is not kept")
            return None
