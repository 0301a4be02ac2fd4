"""The job's lighthouse as a process that the supervisor keeps running: with its log, and where groups look for it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from lightkeeper.checkpoint.files import write_whole
from lightkeeper.errors import ToldError
from lightkeeper.supervisor.clusters.interface import CannotStart, Cluster
from lightkeeper.supervisor.jobfile import Lighthouse
from lightkeeper.supervisor.logs import last_line
from lightkeeper.supervisor.runfiles import ADDRESS
from lightkeeper.words import say

NAME = "lighthouse"
LISTENING = re.compile(rb"listening on (\S+?),")
LISTENS_S_MAX = 60.0
FIRST_TRIES_MAX = 3  # before it has ever listened
MISSING_LONG_S = 120.0  # after which a human is told
PAUSE_S, PAUSE_S_MAX = 0.5, 10.0
LOOK_S = 0.05
PROBE_S, MISSED_MAX = 3.0, 3  # so many calls in a row of 5 s each


class LighthouseProcess:
    """One for a run; or the address of one that others keep.

    Args:
        said: what the job file says of it.
        job: the job's id.
        token: the job's.
        folder: of the run.
        cluster: where it runs.
        environment: of its process.
        node: picks where it is to run.
        alone: whether no group runs that knows its address.
    """

    def __init__(
        self, said: Lighthouse, job: str, token: str, folder: Path, cluster: Cluster, environment: Mapping[str, str],
        node: Callable[[], str], alone: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._job, self._token = job, token
        self._said, self._folder, self._cluster = said, folder, cluster
        self._environment, self._pick, self._alone = environment, node, alone
        self.address = said.address  # "" while there is none
        self.node = ""  # where it runs
        self._starting = False

    @property
    def own(self) -> bool:
        """Whether it is ours to start."""
        return not self._said.address

    def taken_up(self, node: str) -> bool:
        """An earlier supervisor has started it there; whether it is known where it listens."""
        try:
            said = LISTENING.findall(self._log.read_bytes())
        except OSError:
            said = []
        if said:
            self.address, self.node = said[-1].decode(), node
            self._keep_address()
        return bool(said)

    def _keep_address(self) -> None:
        with contextlib.suppress(OSError):  # a full disk; then the log says it
            write_whole(self._file, self.address.encode())

    def ended(self) -> None:
        """It is not there any more."""
        self.address, self.node = self._said.address, ""

    async def mind(self) -> None:
        """Ends one that runs and does not answer, time after time: it is started again, with its log."""
        missed = 0
        while True:
            await asyncio.sleep(PROBE_S)
            address, node = self.address, self.node
            if not (address and node and self.own):
                missed = 0
                continue
            silent = await asyncio.to_thread(self._silent, address)
            missed = missed + 1 if silent and (address, node) == (self.address, self.node) else 0
            if missed >= MISSED_MAX:
                say(f"lightkeeper: the lighthouse does not answer ({silent}): it is ended, and started again")
                await self._cluster.kill(node, NAME)
                missed = 0

    def _silent(self, address: str) -> str:
        """Why nobody answers there; "" if somebody does. Takes up to 5 s."""
        from lightkeeper.cli.calls import call
        from lightkeeper.protos import lighthouse_pb2

        said = call("Lighthouse", "Status", address, lighthouse_pb2.StatusRequest(), self._job, self._token)
        return said.details or said.code if said.nobody else ""

    async def start(self, long: Callable[[str], Awaitable[None]]) -> None:
        """Returns once it listens, however long that takes: groups train on meanwhile.

        Args:
            long: told once, with the reason, that there has been none for `MISSING_LONG_S`.

        Raises:
            ToldError: it has never listened, and does not.
        """
        if self._starting or self.address:
            return
        self._starting, tries = True, 0
        long_s = time.monotonic() + MISSING_LONG_S
        try:
            while why := await self._start_once():
                tries += 1
                if tries >= FIRST_TRIES_MAX and not self._file.exists():
                    raise ToldError(f"the lighthouse does not come up: {why}")
                if time.monotonic() >= long_s:
                    long_s = float("inf")
                    await long(why)
                pause_s = min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(tries, 10))
                say(f"lightkeeper: the lighthouse did not come up ({why}); again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
            if tries:
                say(f"lightkeeper: the lighthouse is there again, at {self.address}")
        finally:
            self._starting = False

    async def _start_once(self) -> str:
        """Why it does not listen; "" if it does."""
        self.node = self._pick()
        said = self._log.stat().st_size if self._log.exists() else 0
        words = [
            sys.executable, "-m", "lightkeeper", "lighthouse", "--bind", self._bind(),
            "--run-folder", str(self._folder), "--log", str(self._folder / "lighthouse"),
            "--lease-s", str(self._said.lease_s),
        ]  # fmt: skip
        try:
            await self._cluster.start(self.node, NAME, words, self._environment, self._log)
        except CannotStart as error:
            self.node = ""
            return str(error)
        until = time.monotonic() + LISTENS_S_MAX
        while self.node and time.monotonic() < until:
            if found := LISTENING.search(self._log.read_bytes()[said:]):
                self.address = found.group(1).decode()
                self._keep_address()
                return ""
            await asyncio.sleep(LOOK_S)
        if self.node:
            await self._cluster.kill(self.node, NAME)
            return f"it did not listen within {LISTENS_S_MAX:g} s"
        return last_line(self._log, said)

    def _bind(self) -> str:
        """Where it was before, if groups run that look for it there."""
        before = self._file.read_text().strip() if self._file.exists() else ""
        return before if before and not self._alone() else self._said.bind

    @property
    def _log(self) -> Path:
        return self._folder / "logs" / "lighthouse.log"

    @property
    def _file(self) -> Path:
        return self._folder / ADDRESS
