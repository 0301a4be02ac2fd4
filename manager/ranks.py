"""The ranks of a group on one node: started, watched and killed by this process, and by nobody else.

They get the environment that torchrun gives, but no agent stands between: each is a child of this process, in a session
of its own, and the kernel kills it when this process ends. A rank's session holds all that it started, also what has
lost its parent since, so that is how the rest is found and killed (`sessions.py`, which also stays behind to do so if
this process is killed). A rank that has ended stays a zombie until `close`: its pid, which names the session, is given
to nobody else before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightkeeper.errors import ToldError
from lightkeeper.manager.evidence.handler import set_buffer_size
from lightkeeper.manager.processes import die_with_parent, has_ended
from lightkeeper.manager.ranklogs import RankLogs
from lightkeeper.manager.sessions import kill_sessions
from lightkeeper.manager.warm import WaitingProcess
from lightkeeper.words import say

END_S = 5.0  # for a rank whose group is well ended: its exit handlers, its last words
KILLED_S = 5.0  # for the kernel to end what was killed
BOOTSTRAP = "lightkeeper.manager.bootstrap"
SESSIONS = "lightkeeper.manager.sessions"


@dataclass
class Rendezvous:
    """Where the ranks of a group find each other for its own collectives.

    The socket listens before any rank runs, so its port is known to all, and cannot be somebody else's, from the start;
    rank 0 takes it over (`bootstrap.serve_store`).

    Attributes:
        host: address at which all ranks reach rank 0.
        port: 0 for a group of one rank: its script's own `init_process_group` then takes any free port.
        listener: on rank 0's node, until its ranks are started.
    """

    host: str = "127.0.0.1"
    port: int = 0
    listener: socket.socket | None = None


def open_rendezvous(world_size: int, host: str = "127.0.0.1") -> Rendezvous:
    """A rendezvous at an address of this node, to be started before the ranks.

    Raises:
        ToldError: if nothing can listen there.
    """
    if world_size == 1:
        return Rendezvous(host)
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise ToldError(f"cannot listen at {host} for the group's own ranks: {error.strerror or error}") from error
    return Rendezvous(host, listener.getsockname()[1], listener)


class RankProcesses:
    """The processes of the ranks that run on this node.

    Args:
        command: the script and its arguments, or ``-m``, a module and its arguments.
        ranks: their ranks in the group.
        world_size: ranks of the group on all nodes.
        environment: what they get besides the rank's own variables.
        incarnation: name of this start of the group.
        rendezvous: where the group's ranks find each other.
        node_rank: which of the group's nodes this is.
        nodes: how many there are.
        restart: how often this group was started before by the same launcher.
        logs: takes what they print; None lets them print where this process does.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        ranks: range,
        world_size: int,
        environment: Mapping[str, str],
        incarnation: str,
        rendezvous: Rendezvous,
        *,
        node_rank: int = 0,
        nodes: int = 1,
        restart: int = 0,
        logs: RankLogs | None = None,
    ) -> None:
        self.command, self.ranks, self.world_size, self.rendezvous = command, ranks, world_size, rendezvous
        self.logs = logs
        self._alike = {
            **environment,
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "WORLD_SIZE": str(world_size),
            "GROUP_RANK": str(node_rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": rendezvous.host,
            "MASTER_PORT": str(rendezvous.port),
            "TORCHELASTIC_RUN_ID": incarnation,
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": "0",  # in place; a group starts again under another name, with other processes
            "TORCHELASTIC_USE_AGENT_STORE": str(world_size > 1),
        }
        if len(ranks) > 1 and "OMP_NUM_THREADS" not in environment:
            self._alike["OMP_NUM_THREADS"] = "1"
            say(f"{len(ranks)} ranks on this node and OMP_NUM_THREADS is not set: each takes 1 thread")
        set_buffer_size(self._alike)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watched: dict[int, int] = {}  # rank to pidfd
        self._left_behind: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Pid by rank."""
        return {rank: process.pid for rank, process in self.processes.items()}

    def environment_of(self, rank: int) -> dict[str, str]:
        """All variables of a rank's process."""
        own = {"RANK": rank, "LOCAL_RANK": rank - self.ranks.start, "ROLE_RANK": rank}
        return {**self._alike, **{name: str(value) for name, value in own.items()}}

    def start(self, waiting: Sequence[WaitingProcess] = ()) -> None:
        """Starts all of them, from the thread that lives as long as they may: they end with it.

        Args:
            waiting: processes that can become ranks; the others are started anew.
        """
        listener = self.rendezvous.listener
        for index, rank in enumerate(self.ranks):
            store = listener.fileno() if listener is not None and rank == 0 else None
            output = None if self.logs is None else self.logs.outputs(rank)
            if index < len(waiting):
                self.processes[rank] = waiting[index].become(self.environment_of(rank), store, output)
                continue
            stdout, stderr = output or (None, None)
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-u", "-m", BOOTSTRAP, "-" if store is None else str(store), *self.command],
                env=self.environment_of(rank),
                stdout=stdout,
                stderr=stderr,
                pass_fds=() if store is None else (store,),
                preexec_fn=_as_rank,
                start_new_session=True,
            )
        if self.logs is not None:
            self.logs.start()
        if listener is not None:
            listener.close()  # rank 0 holds it now: with rank 0's end nobody listens there any more
            self.rendezvous.listener = None
        self._left_behind = subprocess.Popen(
            [sys.executable, "-m", SESSIONS, *(str(pid) for pid in self.pids.values())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def watch(self, ended: Callable[[int, int], None]) -> None:
        """Calls ``ended(rank, code)`` from the running event loop for every rank that ends; code is negative for a
        signal.
        """
        for rank, process in self.processes.items():
            self._watched[rank] = os.pidfd_open(process.pid)
            asyncio.get_running_loop().add_reader(self._watched[rank], self._has_ended, rank, ended)

    def _has_ended(self, rank: int, ended: Callable[[int, int], None]) -> None:
        self._forget(rank)
        code = self._code(rank)
        assert code is not None
        ended(rank, code)

    def _forget(self, rank: int) -> None:
        descriptor = self._watched.pop(rank)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _code(self, rank: int) -> int | None:
        """Without taking its zombie away."""
        process = self.processes[rank]
        if process.returncode is not None:
            return process.returncode
        how = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if how is None:
            return None
        return how.si_status if how.si_code == os.CLD_EXITED else -how.si_status

    def running(self) -> list[int]:
        """Ranks whose processes have not ended."""
        return [rank for rank in self.processes if self._code(rank) is None]

    def kill(self) -> None:
        """Kills the ranks and all that is left of what they started."""
        kill_sessions(process.pid for process in self.processes.values() if process.returncode is None)

    async def close(self, within_s: float = END_S) -> None:
        """Lets the ranks come to their end, kills what is left of them after a while, and takes their zombies away."""
        if self.rendezvous.listener is not None:
            self.rendezvous.listener.close()
        until = time.monotonic() + within_s
        while self.running() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for rank in tuple(self._watched):
            self._forget(rank)
        self.kill()
        await self._end_left_behind()
        for rank, process in self.processes.items():
            try:
                process.wait(timeout=KILLED_S)
            except subprocess.TimeoutExpired:
                say(f"rank {rank} (pid {process.pid}) was killed and does not end: it hangs in the kernel")
        if self.logs is not None:
            await self.logs.end()

    async def _end_left_behind(self) -> None:
        """Before any pid is given away."""
        if self._left_behind is None:
            return
        try:
            await asyncio.to_thread(self._left_behind.communicate, timeout=KILLED_S)
        except subprocess.TimeoutExpired:
            self._left_behind.kill()
            self._left_behind.wait()


class StartedElsewhere:
    """Ranks that torchrun or another launcher started; they are known once they have registered.

    Args:
        pids: pid by rank, as they register.
        kill: kills them, and what they started.
    """

    def __init__(self, pids: dict[int, int], kill: Callable[[], None]) -> None:
        self.pids, self._kill = pids, kill
        self.logs: RankLogs | None = None

    def watch(self, ended: Callable[[int, int], None]) -> None:
        """Whoever they register with sees them end."""

    def running(self) -> list[int]:
        """Ranks whose processes have not ended."""
        return [rank for rank, pid in self.pids.items() if not has_ended(pid)]

    def kill(self) -> None:
        """Whoever they register with kills them, before it asks here for more."""

    async def close(self, within_s: float) -> None:
        """Lets the ranks come to their end, and kills what is left of them after a while."""
        await self._ended(within_s)
        self._kill()
        await self._ended(KILLED_S)

    async def _ended(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        while self.running() and time.monotonic() < until:
            await asyncio.sleep(0.01)


def _as_rank() -> None:
    """Requests to leave are ignored until its `Manager` takes them: the launcher, asked with its ranks, ends them."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
