"""`lightkeeper manager`: the manager process of a group whose rank 0 started it; on a further node, its agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.manager.agent import NodeAgent
from lightkeeper.manager.notice import watch_notice
from lightkeeper.manager.processes import Watched, watch_exit
from lightkeeper.manager.ranks import END_S, StartedElsewhere
from lightkeeper.manager.service import ManagerService, new_incarnation
from lightkeeper.manager.settings import Settings, read_settings
from lightkeeper.manager.spawn import LAUNCHER_VARIABLE, PARENT_VARIABLE, SOCKET_VARIABLE
from lightkeeper.streams import open_closed_streams


def run(settings: Settings) -> int:
    """Serves the group, or the node, of the rank that started this process; returns the exit code."""
    path, parent = os.environ.get(SOCKET_VARIABLE), os.environ.get(PARENT_VARIABLE)
    if not path or not parent:
        raise UsageError("a manager is started by rank 0 of its group or by `lightkeeper launch`, not by hand")
    return asyncio.run(_serve(_service(settings, Path(path)), int(parent)))


def _service(settings: Settings, path: Path) -> ManagerService | NodeAgent:
    if settings.node_rank == 0:
        return ManagerService(settings, new_incarnation(), path)

    async def started(incarnation: str, host: str, port: int) -> StartedElsewhere:
        return StartedElsewhere(agent.local.pids, agent.local.kill)

    agent = NodeAgent(settings, path, started, END_S)
    return agent


async def _serve(service: ManagerService | NodeAgent, parent: int) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, lambda: None)  # it ends with its ranks, and they decide what a signal means
    if (notice_file := service.settings.notice_file) and isinstance(service, ManagerService):
        service.notice_file = notice_file  # there is no launcher that watches it
    elif notice_file:
        watch_notice(Path(notice_file), service.noticed, service.say)
    if launcher := os.environ.get(LAUNCHER_VARIABLE):
        service.launcher = Watched(int(launcher), "torchrun")
    serving = asyncio.create_task(service.run())

    def parent_ended(code: int | None) -> None:
        loop.call_later(1.0, _end_unregistered, service, serving)

    with contextlib.suppress(ProcessLookupError):
        watch_exit(parent, parent_ended)
        try:
            return await serving
        finally:
            await service.finish()
    serving.cancel()
    return 1


def _end_unregistered(service: ManagerService | NodeAgent, serving: asyncio.Task[int]) -> None:
    """The rank that started this process ended before it registered: there is no group."""
    if service.local.ranks.start not in service.local.pids:
        serving.cancel()


def main() -> int:
    """Reads the settings from the environment."""
    open_closed_streams()
    try:
        return run(read_settings())
    except ToldError as error:
        print(f"lightkeeper manager: {error}", file=sys.stderr)
        return error.exit_code
    except asyncio.CancelledError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
