"""Rank 0 starts its group's manager where no launcher did."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.errors import ToldError
from lightkeeper.manager.exits import describe_exit
from lightkeeper.manager.folders import SOCKET, make_folder
from lightkeeper.manager.notice import check_folder
from lightkeeper.manager.settings import Settings, strange_variables
from lightkeeper.words import say

SOCKET_VARIABLE = "LIGHTKEEPER_SOCKET"
PARENT_VARIABLE = "LIGHTKEEPER_PARENT"
START_S_MAX = 30.0


class ManagerNotStarted(ToldError):
    """The group's manager could not be started; the message holds its last words."""


@dataclass
class StartedManager:
    """Where the group's manager listens, and its process if this rank started it."""

    socket: Path
    process: subprocess.Popen[bytes] | None = None

    def how_it_ended(self) -> str:
        """One line on its end, for a rank that is left without it."""
        if self.process is None:
            return f"the group's manager closed its socket {self.socket}"
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return f"the group's manager (pid {self.process.pid}) closed its socket"
        return f"the group's manager (pid {self.process.pid}) {describe_exit(code)}"


def find_or_start_manager(settings: Settings, rank: int) -> StartedManager:
    """The manager that a launcher started, or a new one if this is rank 0 of a group without a launcher.

    Raises:
        ManagerNotStarted: if there is none and it cannot be started within 30 s.
    """
    given = os.environ.get(SOCKET_VARIABLE)
    if given:
        return StartedManager(Path(given))
    if rank != 0 or settings.ranks != 1:
        raise ManagerNotStarted(
            "a group of several ranks is started by `lightkeeper launch --ranks N`, which starts its manager"
        )
    if strange := strange_variables(os.environ):
        say(f"lightkeeper: {strange}")
    check_folder(settings.notice_file)
    path = make_folder() / SOCKET
    environment = {
        **os.environ,
        **settings.to_environment(),
        SOCKET_VARIABLE: str(path),
        PARENT_VARIABLE: str(os.getpid()),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "lightkeeper.manager.main"],
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    until = time.monotonic() + START_S_MAX
    while not path.exists():
        if process.poll() is not None:
            raise ManagerNotStarted(f"the group's manager {describe_exit(process.returncode)} at its start")
        if time.monotonic() > until:
            process.kill()
            raise ManagerNotStarted(f"the group's manager did not start within {START_S_MAX:.0f} s")
        time.sleep(0.005)
    return StartedManager(path, process)
