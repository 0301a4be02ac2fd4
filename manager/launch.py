"""`lightkeeper launch`: one command that starts one replica group, its manager and its ranks.

This process is the manager; the ranks are its children.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from lightkeeper.errors import UsageError
from lightkeeper.manager.folders import SOCKET, make_folder
from lightkeeper.manager.ranks import RankProcesses, open_rendezvous
from lightkeeper.manager.service import ManagerService, new_incarnation
from lightkeeper.manager.spawn import SOCKET_VARIABLE

if TYPE_CHECKING:
    from lightkeeper.cli.options import LaunchOptions


def run(options: LaunchOptions) -> int:
    """Starts the group and serves it until it ends; returns its exit code."""
    _check_command(options.command)
    folder = make_folder()
    try:
        return asyncio.run(
            _serve(ManagerService(options.settings, new_incarnation(), folder / SOCKET), options.command)
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_command(command: tuple[str, ...]) -> None:
    usage = "lightkeeper launch ... -- SCRIPT ARGS, or -- -m MODULE ARGS"
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError(f"no module after -m: {usage}")
    elif not Path(command[0]).is_file():
        raise UsageError(f"no script {command[0]}: {usage}")


async def _serve(service: ManagerService, command: tuple[str, ...]) -> int:
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(service.run())
    while not service.socket_path.exists():
        if serving.done():
            return serving.result()
        await asyncio.sleep(0.005)
    size = service.settings.ranks
    environment = {**os.environ, **service.settings.to_environment(), SOCKET_VARIABLE: str(service.socket_path)}
    ranks = RankProcesses(command, range(size), size, environment, service.incarnation, open_rendezvous(size))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.asked_to_leave, signal.Signals(number).name)
    ranks.start()
    service.roots.update(ranks.pids.values())
    service.kill_also = ranks.kill
    ranks.watch(service.rank_ended)
    try:
        return await serving
    finally:
        await ranks.close()
