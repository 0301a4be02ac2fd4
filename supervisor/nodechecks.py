"""What is run on a node before it gets work: preflight, and the burn-in of one that is in quarantine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.attribution import USAGE
from lightkeeper.supervisor.burn_in import Result
from lightkeeper.supervisor.clusters.interface import CannotStart, Cluster, Exited
from lightkeeper.supervisor.jobfile import JobFile
from lightkeeper.supervisor.logs import last_line

REASONS_CHARS_MAX = 500


class NodeChecks:
    """Runs them, each as a process on its node.

    Args:
        job: what the job file says.
        folder: of the run.
        cluster: where it runs.
        environment: of what is started.
    """

    def __init__(self, job: JobFile, folder: Path, cluster: Cluster, environment: Mapping[str, str]) -> None:
        self._job, self._folder, self._cluster, self._environment = job, folder, cluster, environment
        self._ends: dict[tuple[str, str], asyncio.Future[int | None]] = {}

    def exited(self, exited: Exited) -> None:
        """Something on a node has ended; perhaps a check."""
        self._end(exited.node, exited.name, exited.code)

    def lost(self, node: str) -> None:
        """A node is gone."""
        for of, name in list(self._ends):
            if of == node:
                self._end(of, name, None)

    async def preflight(self, node: str, group: str, start: int) -> tuple[str, str]:
        """What speaks against a node, "" if nothing does; and where it is written.

        Raises:
            CannotStart: nothing can be started there, which may be a full disk's fault.
            UsageError: the job file asks for what does not exist.
        """
        log = self._folder / "logs" / f"preflight-{node}-{group}-{start}.log"
        said = log.stat().st_size if log.exists() else 0
        limit_s = self._job.preflight.limit_s
        try:
            code = await self._run(node, f"check-{group}", self._preflight_argv(), log, limit_s)
        except TimeoutError:
            return f"preflight hung for {limit_s:g} s: do not join", str(log)
        if code == USAGE:
            raise UsageError(f"[preflight] options: {last_line(log)}")
        if code == 0:
            return "", ""
        reasons = reasons_in(log.read_bytes()[said:])
        if not reasons:
            raise CannotStart(f"preflight on {node} ended with {code} and said nothing (is the disk full?); see {log}")
        return reasons, str(log)

    async def burn_in(self, node: str) -> Result | None:
        """Tries a node in quarantine until a round fails or it has passed; None if nobody can say how it went."""
        wanted, begun_s, number = self._job.burn_in, time.monotonic(), 0
        argv = list(wanted.command) or self._preflight_argv()
        log = self._folder / "logs" / f"burn-in-{node}.log"
        while number < wanted.rounds or time.monotonic() - begun_s < wanted.for_s:
            number += 1
            said = log.stat().st_size if log.exists() else 0
            try:
                code = await self._run(node, "burn-in", argv, log, wanted.round_s)
                if code is None:
                    return None
                why = "" if code == 0 else reasons_in(log.read_bytes()[said:])
                if code != 0 and not why and not wanted.command:
                    return None  # it could not even say why
                why = why or ("" if code == 0 else f"ended with {code}; see {log}")
            except CannotStart:
                return None
            except TimeoutError:
                why = f"did not end within {wanted.round_s:g} s"
            if why:
                return Result(number, time.monotonic() - begun_s, f"round {number}: {why}")
        return Result(number, time.monotonic() - begun_s, "")

    def _preflight_argv(self) -> list[str]:
        checkpoints = str(self._folder / self._job.checkpoints)
        words = ["preflight", "--json", "--checkpoint", checkpoints, *self._job.preflight.options]
        return [sys.executable, "-m", "lightkeeper", *words]

    async def _run(self, node: str, name: str, argv: Sequence[str], log: Path, limit_s: float) -> int | None:
        """The exit code of a command on a node; None if the node is gone.

        Raises:
            CannotStart: it cannot be started.
            TimeoutError: it did not end in time, and was killed.
        """
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._ends[node, name] = ended
        try:
            await self._cluster.start(node, name, argv, self._environment, log)
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(ended)
        except TimeoutError:
            await self._cluster.kill(node, name)
            await ended  # its name is free again
            raise
        finally:
            self._ends.pop((node, name), None)

    def _end(self, node: str, name: str, code: int | None) -> None:
        ended = self._ends.get((node, name))
        if ended is not None and not ended.done():
            ended.set_result(code)


def reasons_in(data: bytes) -> str:
    """What a preflight's JSON says against a node; "" if there is none in what it printed."""
    for line in reversed(data.splitlines()):
        try:
            found = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(found, dict) and isinstance(found.get("reasons"), list):
            return "; ".join(map(str, found["reasons"]))[:REASONS_CHARS_MAX]
    return ""
