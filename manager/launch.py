"""`lightkeeper launch`: one command that starts one replica group, its manager and its ranks.

This process is the manager; the ranks run below a `torch.distributed.run` that never restarts them, under a rendezvous
id that no other start of the group has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightkeeper.errors import UsageError
from lightkeeper.manager.folders import SOCKET, make_folder
from lightkeeper.manager.processes import die_with_parent, kill_tree
from lightkeeper.manager.service import ManagerService, new_incarnation
from lightkeeper.manager.spawn import SOCKET_VARIABLE

if TYPE_CHECKING:
    from lightkeeper.cli.options import LaunchOptions

LAUNCHED_VARIABLE = "LIGHTKEEPER_LAUNCHED"
LAST_WORDS_S = 5.0
NAME = "torch.distributed.run"


def run(options: LaunchOptions) -> int:
    """Starts the group and serves it until it ends; returns its exit code."""
    script = options.command[0]
    if not script.startswith("-") and not Path(script).is_file():
        raise UsageError(f"no script {script}: lightkeeper launch ... -- SCRIPT ARGS, or -- -m MODULE ARGS")
    service = ManagerService(options.settings, new_incarnation(), make_folder() / SOCKET)
    return asyncio.run(_serve(service, options.command))


async def _serve(service: ManagerService, command: tuple[str, ...]) -> int:
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(service.run())
    while not service.socket_path.exists():
        if serving.done():
            return serving.result()
        await asyncio.sleep(0.005)
    logs = service.socket_path.parent / "logs"  # of the folder of this group, so that it goes with it
    logs.mkdir()
    runner = subprocess.Popen(
        _command_line(service, command, logs),
        env={
            **os.environ,
            **service.settings.to_environment(),
            SOCKET_VARIABLE: str(service.socket_path),
            LAUNCHED_VARIABLE: "1",
        },
        preexec_fn=die_with_parent,
        start_new_session=True,
    )
    service.roots.add(runner.pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.asked_to_leave, signal.Signals(number).name)
    watcher = asyncio.create_task(asyncio.to_thread(runner.wait))
    watcher.add_done_callback(lambda task: service.helper_ended(f"{NAME} (pid {runner.pid})", task.result()))
    code = await serving
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(watcher), LAST_WORDS_S)
    kill_tree(runner.pid)
    await watcher
    shutil.rmtree(service.socket_path.parent, ignore_errors=True)
    return code


def _command_line(service: ManagerService, command: tuple[str, ...], logs: Path) -> list[str]:
    return [
        sys.executable, "-m", NAME, "--nproc-per-node", str(service.settings.ranks), "--max-restarts", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", service.incarnation,
        "--log-dir", str(logs), *command,
    ]  # fmt: skip
