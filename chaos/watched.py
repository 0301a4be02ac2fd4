"""A job that faults are tried on, as it is seen from outside: by its event log, and by waiting for what must come."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from lightkeeper.chaos.faults import Shape
from lightkeeper.chaos.hosts import Host
from lightkeeper.chaos.targets import NotHere, Processes
from lightkeeper.errors import ToldError
from lightkeeper.events import EventLog, follow
from lightkeeper.events.schema import Committed, Event, FaultInjected

T = TypeVar("T", bound=Event)

JOB = "chaos"
TOY = Path(__file__).with_name("toy.py")  # not imported: it imports torch
OUTAGE_BUDGET_S = 24.0  # deadlines of progress are not below a quarter of it
START_S_MAX = 180.0  # importing torch, on a machine that is busy
STEP_S_MAX = 60.0
END_S_MAX = 90.0
GONE_S_MAX = 5.0
POLL_S = 0.05


class Trouble(ToldError):
    """The job did not do what it must; the message says what was waited for."""


class Watched(abc.ABC):
    """One job.

    Args:
        folder: the run's.
        shape: of the job.
        seed: of its weights and its order of samples.
    """

    host: Host | None = None  # of the group that runs apart

    def __init__(self, folder: Path, shape: Shape, seed: int) -> None:
        self.folder, self.shape, self.seed = folder, shape, seed
        self.events: list[Event] = []
        self._log = EventLog(folder, "chaos", job=JOB)
        self._stream: Iterator[Event | None] = follow(folder, stop=lambda: False, poll_s=POLL_S)
        self._newest: dict[str, Committed] = {}

    # ------------------------------------------------------------ what each kind of job does in its own way

    @abc.abstractmethod
    def start_again(self, name: str) -> str:
        """Sees to it that a launcher that was killed is started again; says what was done."""

    @abc.abstractmethod
    def restart_lighthouse(self) -> str:
        """The same of the lighthouse."""

    @abc.abstractmethod
    def ends_so(self, name: str) -> None:
        """The end of this launcher is no trouble: it was broken, or is to end."""

    @abc.abstractmethod
    def finish(self) -> dict[str, int | None]:
        """Ends the run in all groups after the same step; exit codes.

        Raises:
            Trouble: they did not end.
        """

    @abc.abstractmethod
    def exit_codes(self) -> dict[str, int | None]:
        """Of all that was started; None: still running."""

    @abc.abstractmethod
    def leftovers(self) -> list[str]:
        """Processes that are still there a moment after they were to be gone."""

    @abc.abstractmethod
    def _failed(self) -> str:
        """Who ended that was not to; empty if nobody did."""

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    # ------------------------------------------------------------ looking

    def look(self) -> None:
        """Takes in what was written since; waits a moment if nothing was."""
        for event in self._stream:
            if event is None:
                return
            self.events.append(event)
            if isinstance(event, Committed) and event.live:
                self._newest[event.group] = event

    @property
    def processes(self) -> Processes:
        """The job's, as they are now."""
        self.look()
        return Processes(self.events)

    def until(self, holds: Callable[[], bool], what: str, within_s: float = STEP_S_MAX) -> None:
        """Returns once `holds()`.

        Raises:
            Trouble: not within `within_s` seconds, or a launcher ended meanwhile that was not to.
        """
        until = time.monotonic() + within_s
        self.look()
        while not holds():
            if failed := self._failed():
                raise Trouble(f"{failed} (waited for: {what})")
            if time.monotonic() > until:
                steps = ", ".join(f"{group} {commit.step}" for group, commit in sorted(self._newest.items()))
                raise Trouble(f"not within {within_s:g} s: {what} (committed: {steps or 'nothing'})")
            self.look()

    def await_event(self, kind: type[T], since: int, what: str, within_s: float, **fields: object) -> T:
        """The first event of this kind with these fields, from place `since` of the events on."""
        found: list[T] = []

        def there() -> bool:
            found.extend(e for e in self.events[since:] if isinstance(e, kind) and _has(e, fields))
            return bool(found)

        self.until(there, what, within_s)
        return found[0]

    def step_of(self, group: str) -> int:
        """The last step that it committed, live; -1 if none."""
        return self._newest[group].step if group in self._newest else -1

    def newest(self, group: str) -> Committed | None:
        """Its last live commit."""
        return self._newest.get(group)

    def await_steps(self, groups: set[str], more: int, what: str) -> None:
        """Returns once each of these has committed `more` further steps."""
        wanted = {group: self.step_of(group) + more for group in groups}
        self.until(lambda: all(self.step_of(group) >= step for group, step in wanted.items()), what)

    def descriptors(self, groups: set[str]) -> dict[str, int]:
        """Open descriptors by process: of the lighthouse, and of these groups' managers and ranks."""
        found, processes = {}, self.processes
        names = {e.process for e in self.events if e.group in groups and e.process.startswith(("rank ", "manager "))}
        for name in sorted({*names, "lighthouse"}):
            try:
                found[name] = psutil.Process(processes.pid(name)).num_fds()
            except (NotHere, psutil.NoSuchProcess):
                continue
        return found

    def injected(self, fault: str, target: str, group: str, incarnation: str) -> None:
        """Writes down that something is about to be broken from outside."""
        step = max((commit.step for commit in self._newest.values()), default=-1) + 1
        event = FaultInjected(fault=fault, phase="", step=step, target=target, group=group, incarnation=incarnation)
        self._log.write(event)


def _has(event: Event, fields: Mapping[str, object]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())
