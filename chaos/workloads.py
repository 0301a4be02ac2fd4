"""The jobs that faults are tried on: a lighthouse, and groups of real processes on this machine that train `toy.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

from lightkeeper.chaos.faults import Shape
from lightkeeper.chaos.hosts import Host
from lightkeeper.chaos.targets import NotHere, Processes
from lightkeeper.demo.job import LocalJob
from lightkeeper.errors import ToldError
from lightkeeper.events import EventLog, follow
from lightkeeper.events.schema import Committed, Event, FaultInjected
from lightkeeper.manager.faults import VARIABLE

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


class Workload:
    """One job. A context manager: leaving it ends all its processes.

    Args:
        folder: the run's.
        shape: of the job.
        seed: of its weights and its order of samples.
        restarts: how often a launcher starts its group again.
        warm: whether each keeps a process for that: of use only where a group is lost more than once.
    """

    def __init__(self, folder: Path, shape: Shape, seed: int, restarts: int = 3, warm: bool = False) -> None:
        self.folder, self.shape, self.seed, self.restarts = folder, shape, seed, restarts
        self._warm = "--warm" if warm else "--no-warm"
        self.events: list[Event] = []
        self.host = Host() if shape.apart else None
        self._job = LocalJob(folder, shape.names, JOB, {
            "fingerprint-every": "1", "outage-budget-s": f"{OUTAGE_BUDGET_S:g}", "spares": str(shape.spares),
        })  # fmt: skip
        self._log = EventLog(folder, "chaos", job=JOB)
        self._stream: Iterator[Event | None] = follow(folder, stop=lambda: False, poll_s=POLL_S)
        self._newest: dict[str, Committed] = {}
        self._ended_well: set[str] = set()  # launchers whose end is no trouble

    def __enter__(self) -> Workload:
        self._job.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.end()
        if self.host is not None:
            self.host.remove()
        self._log.close()

    # ------------------------------------------------------------ starting

    def start(self, inside: Mapping[str, str], cold: str = "") -> None:
        """Starts lighthouse and groups, and returns once all of them train.

        Args:
            inside: by group, what it is told as ``LIGHTKEEPER_FAULT``.
            cold: a group that its launcher does not start again.
        """
        if self.host is not None:
            self.host.make()
        self._job.start_lighthouse(f"{self.host.here}:0" if self.host is not None else "127.0.0.1:0")
        for group in self.shape.names:
            self.start_group(group, inside.get(group, ""), 0 if group == cold else self.restarts)
        for node in range(1, self.shape.nodes):
            self.start_node(node)
        self.until(lambda: set(self._newest) >= set(self.shape.names), "all groups train", START_S_MAX)

    def start_group(self, group: str, inside: str = "", restarts: int | None = None) -> None:
        """Starts a group by `lightkeeper launch`, on its first node."""
        apart = self.host is not None and group == self.shape.names[-1]
        more = ["--ranks", str(self.shape.ranks), self._warm]
        more += ["--restarts", str(self.restarts if restarts is None else restarts)]
        if group == self.shape.names[0] and self.shape.nodes > 1:
            more += ["--nnodes", str(self.shape.nodes), "--node-rank", "0"]
        elif self.shape.nodes > 1:
            more += ["--ranks", str(self.shape.nodes * self.shape.ranks)]  # as many as g0 has on all its nodes
        if self.shape.spares and group in self.shape.names[-self.shape.spares :]:
            more += ["--role", "spare"]
        prefix = self.host.prefix if self.host is not None and apart else ()
        self._ended_well.discard(group)
        self._job.start_group(group, self._command(), {VARIABLE: inside} if inside else {}, more, prefix=prefix)

    def start_node(self, node: int) -> None:
        """Starts a further node of g0."""
        group = self.shape.names[0]
        more = ["--ranks", str(self.shape.ranks), self._warm, "--restarts", str(self.restarts)]
        more += ["--nnodes", str(self.shape.nodes), "--node-rank", str(node)]
        self._ended_well.discard(f"{group}.{node}")
        self._job.start_group(group, self._command(), {}, more, name=f"{group}.{node}")

    def restart_lighthouse(self) -> None:
        """Starts it again where it was, with its log."""
        self._job.children["lighthouse"].wait(GONE_S_MAX)
        self._job.start_lighthouse(self._job.lighthouse)

    def _command(self) -> list[str]:
        return [str(TOY), "--stop", str(self._stop_file), "--seed", str(self.seed)]

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

    @property
    def lighthouse(self) -> str:
        """Its address."""
        return self._job.lighthouse

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

    # ------------------------------------------------------------ what chaos itself does

    def injected(self, fault: str, target: str, group: str, incarnation: str) -> None:
        """Writes down that something is about to be broken from outside."""
        step = max((commit.step for commit in self._newest.values()), default=-1) + 1
        event = FaultInjected(fault=fault, phase="", step=step, target=target, group=group, incarnation=incarnation)
        self._log.write(event)

    def ends_so(self, name: str) -> None:
        """The end of this launcher is no trouble: it was broken, or is to end."""
        self._ended_well.add(name)

    def ended(self, name: str) -> bool:
        """Whether a launcher has ended."""
        return self._job.children[name].poll() is not None

    def finish(self) -> dict[str, int | None]:
        """Ends the run in all groups after the same step; exit codes of launchers and lighthouse.

        Raises:
            Trouble: they did not end.
        """
        self._stop_file.touch()
        names = [name for name in self._job.children if name != "lighthouse"]
        self.until(lambda: all(self.ended(name) for name in names), "all groups have ended", END_S_MAX)
        self._job.stop_lighthouse()
        self.look()
        return self._job.exit_codes()

    def exit_codes(self) -> dict[str, int | None]:
        """Of launchers and lighthouse; None: still running."""
        return self._job.exit_codes()

    def leftovers(self) -> list[str]:
        """Processes of ended groups that are still there after a moment."""
        until = time.monotonic() + GONE_S_MAX
        while (left := self._job.leftovers()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return left

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    def _failed(self) -> str:
        for name, code in self._job.exit_codes().items():
            if code not in (0, None) and name not in self._ended_well and name != "lighthouse":
                return f"{name} ended with {code}: {self._job.last_line(name)}"
        return ""


def _has(event: Event, fields: Mapping[str, object]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())
