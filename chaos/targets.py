"""Which processes of this machine are a job's: found by what they wrote into the run's event log.

A pid may have been given away since: a process counts only if it was there before it wrote its first event.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightkeeper.errors import ToldError
from lightkeeper.events.schema import Event

CREATED_S_MAX = 2.0  # how much later than its first event a process may seem to have begun: wall clocks are set
LOCAL_VARIABLES = ("LIGHTKEEPER_LIGHTHOUSE", "LIGHTKEEPER_RUN_FOLDER")


class NotHere(ToldError):
    """A process that a fault is to hit is not one of this machine, or is gone."""


@dataclass(frozen=True)
class Processes:
    """The processes that wrote into an event log.

    Args:
        events: of the run, in order.
    """

    events: Sequence[Event]

    def pid(self, name: str) -> int:
        """The newest process of this name ("rank g1/0", "manager g1", "agent g0/1", "lighthouse").

        Raises:
            NotHere: there is none, or none on this machine.
        """
        host = socket.gethostname()
        own = [event for event in self.events if event.process == name]
        if not own:
            raise NotHere(f"no {name} has written into this run's event log: is it the run's folder?")
        if own[-1].host != host:
            raise NotHere(f"{name} runs on {own[-1].host}, and this is {host}: inject the fault there")
        pid = own[-1].pid
        first = next(event for event in own if event.pid == pid)
        if not _is_there(pid, first.wall):
            raise NotHere(f"{name} (pid {pid}) is not running any more")
        return pid

    def ranks(self, group: str) -> list[int]:
        """Pids of all ranks of a group that live on this machine, lowest rank first."""
        found = {}
        for name in {e.process for e in self.events if e.process.startswith(f"rank {group}/")}:
            try:
                found[int(name.rpartition("/")[2])] = self.pid(name)
            except NotHere:
                continue
        return [found[rank] for rank in sorted(found)]

    def incarnation(self, group: str) -> str:
        """The newest start of a group; empty if nobody has said."""
        told = [e.incarnation for e in self.events if e.group == group and e.incarnation and e.process != "chaos"]
        return told[-1] if told else ""

    def tree(self, group: str) -> list[int]:
        """The manager of a group, its ranks, and what stands below them.

        Raises:
            NotHere: as `pid`, for the manager.
        """
        found: dict[int, None] = {}
        for root in (self.pid(f"manager {group}"), *self.ranks(group)):
            found[root] = None
            try:
                found.update(dict.fromkeys(child.pid for child in psutil.Process(root).children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
        return list(found)


def _is_there(pid: int, wall: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= wall + CREATED_S_MAX
    except psutil.NoSuchProcess:
        return False


def run_folder_at(lighthouse: str) -> Path:
    """The run folder of the job whose ranks on this machine were told this lighthouse.

    Raises:
        NotHere: there is none, they write no events, or they are of several runs.
    """
    found = set()
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):  # another user's, or gone
            continue
        address, folder = (environment.get(name, "") for name in LOCAL_VARIABLES)
        if folder and lighthouse in address.split(","):
            found.add(folder)
    if not found:
        raise NotHere(f"no process of a job at {lighthouse} that has a run folder is on this machine: give --run RUN")
    if len(found) > 1:
        raise NotHere(f"several runs at {lighthouse} are on this machine ({', '.join(sorted(found))}): give --run RUN")
    return Path(found.pop())
