"""The groups' processes, a launcher per node: a start of a group has one end, when all its launchers have ended."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightkeeper.supervisor.attribution import End
from lightkeeper.supervisor.clusters.interface import CannotStart, Cluster
from lightkeeper.supervisor.facts import end_of
from lightkeeper.supervisor.jobfile import JobFile
from lightkeeper.supervisor.launching import launch_argv
from lightkeeper.supervisor.logs import last_line, last_lines

SAYS_WHY = ": ends with exit code "  # a manager's line
SETTLE_S = 0.5  # for the last events of a group that has ended to be there


@dataclass
class Start:
    """The newest start of a group.

    Attributes:
        nodes: that it was to run on, in order.
        launched: whether its launchers were started, or are just being started.
        running: on which nodes a launcher of it runs.
        codes: exit codes of those that have ended; None where nobody knows.
        began: wall seconds.
        logs: of its launchers, in the order of its nodes.
        asked: whether it was asked to leave.
        killed: whether what is left of it was to be killed.
        unseen: whether a part of it ended while no supervisor was there.
        called_off: whether it was to end before any of its launchers was started.
        unstarted: why a part of it could not be started; "" if all were.
        incarnations: those that have said something since it began.
        former: all that had before.
    """

    nodes: tuple[str, ...] = ()
    launched: bool = False
    running: set[str] = field(default_factory=set)
    codes: list[int | None] = field(default_factory=list)
    began: float = 0.0
    logs: list[Path] = field(default_factory=list)
    asked: bool = False
    killed: bool = False
    unseen: bool = False
    called_off: bool = False
    unstarted: str = ""
    incarnations: set[str] = field(default_factory=set)
    former: set[str] = field(default_factory=set)

    @property
    def is_to_end(self) -> bool:
        """Whether it was asked to, or was to be killed."""
        return self.asked or self.killed

    @property
    def launchers(self) -> list[str]:
        """Nodes on which a launcher runs, if they were started."""
        return sorted(self.running) if self.launched else []


class Starts:
    """Of all groups of one run.

    Args:
        job: what the job file says.
        folder: of the run.
        cluster: where it runs.
        environment: of what is started.
    """

    def __init__(self, job: JobFile, folder: Path, cluster: Cluster, environment: Mapping[str, str]) -> None:
        self._job, self._folder, self._cluster, self._environment = job, folder, cluster, environment
        self._of = {group: Start() for group in job.group_names}

    def state(self) -> dict[str, Any]:
        """What the next supervisor must know of them, as JSON."""
        return {
            "began": {group: start.began for group, start in self._of.items()},
            "logs": {group: list(map(str, start.logs)) for group, start in self._of.items()},
        }

    def take_up(self, state: Mapping[str, Any], at_work: Mapping[str, Sequence[str]]) -> None:
        """What an earlier supervisor knew; and which groups it had at work, with their nodes."""
        for group, start in self._of.items():
            start.logs = [Path(log) for log in state["logs"].get(group, ())]
        for group, nodes in at_work.items():
            start = self._of[group]
            start.nodes, start.launched, start.running = tuple(nodes), True, set(nodes)
            start.began = state["began"].get(group, 0.0)

    # ------------------------------------------------------------ what runs

    @property
    def running(self) -> list[tuple[str, str]]:
        """Node and group of every launcher that runs."""
        return [(node, name) for name, one in self._of.items() for node in one.launchers]

    def begin(self, group: str, nodes: Sequence[str], number: int) -> None:
        """A further start of a group, its part 0 on the first of these nodes; `launch` is to follow."""
        before, logs = self._of[group], self._folder / "logs"
        self._of[group] = Start(
            nodes=tuple(nodes), running=set(nodes), began=time.time(), former=before.former | before.incarnations,
            logs=[logs / f"launch-{group}-{number}-{node}.log" for node in nodes],
        )  # fmt: skip

    def is_called_off(self, group: str) -> bool:
        """Whether a group that has begun is to end already."""
        return self._of[group].is_to_end

    async def launch(self, group: str, lighthouse: str) -> list[str]:
        """Starts its launchers, unless it is called off; on which nodes none was started."""
        start, missing = self._of[group], []
        start.launched = True
        for rank, (node, log) in enumerate(zip(start.nodes, start.logs, strict=True)):
            if start.is_to_end:
                missing.append(node)
                continue
            argv = launch_argv(self._job, self._folder, lighthouse, group, rank)
            try:
                await self._cluster.start(node, group, argv, self._environment, log)
            except CannotStart as error:
                start.unstarted = str(error)
                missing.append(node)
                continue
            if start.killed:  # just now
                await self._cluster.kill(node, group)
            elif start.asked:
                await self._cluster.signal(node, group, signal.SIGUSR1)
        start.called_off = missing == list(start.nodes) and not start.unstarted
        return missing

    async def ask(self, group: str) -> None:
        """To leave in good order."""
        start = self._of[group]
        start.asked = True
        for node in start.launchers:
            await self._cluster.signal(node, group, signal.SIGUSR1)

    async def kill(self, group: str) -> None:
        """What is left of it."""
        start = self._of[group]
        start.killed = True
        for node in start.launchers:
            await self._cluster.kill(node, group)

    def unseen(self, group: str) -> None:
        """A part of it ended while no supervisor was there."""
        self._of[group].unseen = True

    def exited(self, node: str, group: str, code: int | None) -> bool:
        """A launcher has ended, if there was one; whether it was the last of its group."""
        start = self._of.get(group)
        if start is None or node not in start.launchers:
            return False
        start.running.discard(node)
        start.codes.append(code)
        return not start.running

    # ------------------------------------------------------------ what it says

    def spoke(self, group: str, incarnation: str) -> bool:
        """An incarnation of a group has said something; whether it is the first word of it."""
        start = self._of[group]
        new = incarnation not in start.incarnations | start.former
        start.incarnations |= {incarnation} if new else set()
        return new

    def is_of_newest(self, group: str, incarnation: str) -> bool:
        """Whether an incarnation of a group has said something since its newest start, and not before."""
        return incarnation in self._of[group].incarnations

    def last_lines(self, group: str) -> tuple[str, ...]:
        """The end of its first launcher's log; nothing if it has none."""
        start = self._of.get(group)
        return last_lines(start.logs[0]) if start is not None and start.logs else ()

    # ------------------------------------------------------------ how it ended

    async def judge(self, group: str, lost_nodes: Mapping[str, str]) -> End:
        """How a start ended, when its last launcher has.

        Args:
            group: its name.
            lost_nodes: those of the cluster that are gone, and why; it may become more meanwhile.
        """
        ended_s, start = time.monotonic(), self._of[group]
        await asyncio.sleep(SETTLE_S)
        lost = "; ".join(f"{node}: {lost_nodes[node]}" for node in start.nodes if node in lost_nodes)
        code = max((one for one in start.codes if one is not None), key=lambda one: (one != 0, one), default=None)
        end = await asyncio.to_thread(end_of, str(self._folder), group, code, start.began, lost, start.asked)
        cause = end.cause or ("it was called off before it was started" if start.called_off else "")
        if not cause and code != 0:
            cause = await asyncio.to_thread(_said_last, start, code)
        evidence = end.evidence or (str(start.logs[0].relative_to(self._folder)) if start.logs else "")
        return dataclasses.replace(
            end, cause=cause, evidence=evidence, unstarted=start.unstarted, unseen=start.unseen,
            after_s=time.monotonic() - ended_s,
        )  # fmt: skip


def _said_last(start: Start, code: int | None) -> str:
    """How it ended, with the line of its launcher that says why, or the last one."""
    if not start.logs or code == -9:
        return ""
    ended = "nobody knows how it ended" if code is None else f"it exited {code}"
    return f"{ended}: {last_line(start.logs[0], saying=SAYS_WHY)}"
