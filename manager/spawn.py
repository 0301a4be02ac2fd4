"""The first rank of a node starts the group's manager, or its node's agent, where `lightkeeper launch` did not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightkeeper.errors import ToldError
from lightkeeper.manager import meeting
from lightkeeper.manager.exits import describe_exit
from lightkeeper.manager.folders import SOCKET, make_folder
from lightkeeper.manager.launchers import Launched, end_with_torchrun, read_launched, settings_of
from lightkeeper.manager.notice import check_folder
from lightkeeper.manager.settings import Settings, strange_variables
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.manager.meeting import Store

SOCKET_VARIABLE = "LIGHTKEEPER_SOCKET"
PARENT_VARIABLE = "LIGHTKEEPER_PARENT"
LAUNCHER_VARIABLE = "LIGHTKEEPER_LAUNCHER"
STARTED_AS_VARIABLE = "LIGHTKEEPER_STARTED_AS"  # by a supervisor: folder of its node and name of the process
START_S_MAX = 30.0

_kept: list[Any] = []  # a store that this process serves lives as long as it does


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


def rank_and_settings(settings: Settings) -> tuple[int, Settings]:
    """Which rank of its group this is, and the settings with what its launcher says of ranks and nodes.

    Raises:
        UsageError: the group was told otherwise.
    """
    if os.environ.get(SOCKET_VARIABLE):
        return int(os.environ.get("RANK", "0")), settings
    launched = _launched()
    return launched.rank, settings_of(settings, launched, os.environ)


def find_or_start_manager(settings: Settings) -> StartedManager:
    """The manager (on a further node: the agent) that a launcher started, or one that the node's first rank starts.

    Args:
        settings: as `rank_and_settings` gives them.

    Raises:
        ManagerNotStarted: if there is none and it cannot be started within 30 s, or an agent finds no manager.
        NotMet: if the node's ranks do not find each other.
    """
    given = os.environ.get(SOCKET_VARIABLE)
    if given:
        return StartedManager(Path(given))
    launched = _launched()
    launcher = end_with_torchrun(os.environ)
    if launched.rank != launched.node_leader:
        budget_s = settings.timeouts.start_budget_s
        return StartedManager(meeting.ask(_group_store(), launched.rank, launched.node_leader, budget_s))
    started = _start(settings, launcher)
    if launched.node_followers:
        meeting.tell(_group_store(), started.socket, launched.node_followers, settings.timeouts.start_budget_s)
    return started


def _start(settings: Settings, launcher: int | None) -> StartedManager:
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
    if launcher is not None:
        environment[LAUNCHER_VARIABLE] = str(launcher)
    process = subprocess.Popen(
        [sys.executable, "-m", "lightkeeper.manager.main"],
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    what = "manager" if settings.node_rank == 0 else "agent on this node"
    looks_s = settings.timeouts.start_budget_s  # an agent looks for its manager
    within_s = START_S_MAX if settings.node_rank == 0 else looks_s
    until = time.monotonic() + within_s
    while not path.exists():
        if process.poll() is not None:
            raise ManagerNotStarted(f"the group's {what} {describe_exit(process.returncode)} at its start")
        if time.monotonic() > until:
            process.kill()
            raise ManagerNotStarted(f"the group's {what} did not start within {within_s:.0f} s")
        time.sleep(0.005)
    return StartedManager(path, process)


def _launched() -> Launched:
    import torch.distributed as dist

    there = dist.is_available() and dist.is_initialized()
    return read_launched(os.environ, (dist.get_rank(), dist.get_world_size()) if there else None)


def _group_store() -> Store:
    """That of the default process group, or one at the address that the launcher gave for it.

    Raises:
        ManagerNotStarted: there is neither.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        raise ManagerNotStarted(f"the ranks of this group cannot meet: {error}") from error
    _kept.append(store)
    return store
