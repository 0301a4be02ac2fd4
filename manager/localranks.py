"""The ranks of one node, seen from the process that serves them: their sockets, what they do, and how they end.

The manager serves the ranks of its own node so, and an agent those of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from lightkeeper.manager import local
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.evidence.handler import PREFIX
from lightkeeper.manager.folding import Folder, Said
from lightkeeper.manager.processes import Trees, is_stopped, state_of, watch_exit
from lightkeeper.manager.progress import read_progress
from lightkeeper.manager.ranksocket import RankSocket

SILENT_S_MIN = 0.5
IDLE_S_MIN = 2.0  # before that nobody asks what the process does
TREES_S = 2.0  # between two looks at what the ranks have started
REGISTER_S_MAX = 10.0


class Listener(Protocol):
    """Who is told of the ranks."""

    def rank_registered(self, hello: local.Register) -> local.Registered:
        """A rank's socket stands; what it is answered."""

    def ranks_say(self, said: list[Said]) -> None:
        """What ranks said."""

    def rank_ended(self, rank: int, exit_code: int | None, view: RankView | None) -> None:
        """A rank's process ended; `exit_code` is negative for a signal, None if nobody could tell."""

    def stranger(self, peer: str, what: str) -> None:
        """Somebody without the token was refused."""

    def say(self, line: str) -> None:
        """One line for the operator."""


class LocalRanks:
    """Serves the local socket.

    Args:
        path: where the socket is made.
        token: the job's token.
        ranks: indices, within the group, of the ranks of this node.
        listener: who is told.
    """

    def __init__(self, path: Path, token: str, ranks: range, listener: Listener) -> None:
        self.path, self.token, self.ranks, self.listener = path, token, ranks, listener
        self.sockets: dict[int, RankSocket] = {}
        self.pids: dict[int, int] = {}
        self.roots: set[int] = set()  # what started the ranks
        self.kill_also: Callable[[], None] = lambda: None  # what whoever started the ranks knows to be theirs
        self._folder = Folder(ranks)
        self._pages: dict[int, Path] = {}
        self._trees = Trees()
        self._looked_s = time.monotonic()
        self._stopped_since: dict[int, float] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Makes the socket; who sees it can connect to it."""
        early = self.path.with_suffix(".early")
        self._server = await asyncio.start_unix_server(self._accept, path=early)
        os.chmod(early, 0o600)
        early.rename(self.path)

    def close(self) -> None:
        """Takes no more ranks."""
        if self._server is not None:
            self._server.close()

    def remove_files(self) -> None:
        """The socket, the ranks' progress pages, what they hold ready as evidence, and their folder."""
        for path in (self.path, *self.path.parent.glob("progress-*"), *self.path.parent.glob(f"{PREFIX}*")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def send(self, message: local.ToRank, ranks: Iterable[int] | None = None) -> None:
        """Sends to these ranks, to all of this node if None is given; those that are not here are left out."""
        ranks = tuple(self.sockets if ranks is None else ranks)
        if isinstance(message, local.Answer) and message.verdict != "copy":  # after that one the answer proper follows
            self._folder.answered(ranks)
        frame = local.frame(message)
        for rank in ranks:
            if (socket := self.sockets.get(rank)) is not None:
                socket.send_frame(frame)

    def kill(self) -> None:
        """Kills the ranks of this node, and whatever they started."""
        self._trees.kill(*self.roots, *self.pids.values())
        self.kill_also()

    def look(self) -> None:
        """What is to be done now and then: votes are held no longer, and what the ranks have started is noted, so that
        it can be killed without them.
        """
        self._hand_on(self._folder.due(time.monotonic()))
        if time.monotonic() - self._looked_s > TREES_S:
            self._looked_s = time.monotonic()
            self._trees.look(*self.roots, *self.pids.values())

    def views(self) -> dict[int, RankView]:
        """What the ranks do, as seen from outside."""
        return {rank: view for rank in self._pages if (view := self.view(rank)) is not None}

    def view(self, rank: int) -> RankView | None:
        """What one rank does, None if it has no page yet."""
        path = self._pages.get(rank)
        page = None if path is None else read_progress(path)
        if page is None:
            return None
        now = time.monotonic()
        if page.silent_s > SILENT_S_MIN and is_stopped(self.pids[rank]):
            since = self._stopped_since.setdefault(rank, now - page.silent_s)
        else:
            self._stopped_since.pop(rank, None)
            since = now
        return RankView(
            page.phase, page.step, page.waiting_s, now - since, page.microbatch_us, page.idle_s, page.expected_s,
            page.wait_us, page.asks_s, state_of(self.pids[rank]) if page.idle_s > IDLE_S_MIN else "",
        )  # fmt: skip

    # ------------------------------------------------------------ inside

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        socket = RankSocket(reader, writer)
        try:
            async with asyncio.timeout(REGISTER_S_MAX):  # `wait_for` loses a cancellation that comes with the hello
                hello = await socket.receive()
            if not isinstance(hello, local.Register) or not socket.carries(hello, self.token):
                self.listener.stranger("a local process", "rank socket")
                return
            if hello.rank in self.sockets or hello.rank not in self.ranks:
                what = "a second" if hello.rank in self.ranks else "one that is not of this node,"
                self.listener.say(f"refused {what} rank {hello.rank} (pid {hello.pid})")
                return
            self.sockets[hello.rank] = socket
            self.pids[hello.rank], self._pages[hello.rank] = hello.pid, Path(hello.progress)
            self._watch(hello.rank, hello.pid)
            socket.send(self.listener.rank_registered(hello))
            while (message := await socket.receive()) is not None:
                self._hand_on(self._folder.takes(hello.rank, message, time.monotonic()))
        except asyncio.CancelledError:
            return  # this process ends
        except (TimeoutError, ValueError, ConnectionError) as error:
            self.listener.say(f"a rank's socket failed: {error or 'no hello in time'}")
        finally:
            socket.close()

    def _watch(self, rank: int, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            watch_exit(pid, lambda code: self.ended(rank, code))
            return
        asyncio.get_running_loop().call_soon(self.ended, rank, None)

    def ended(self, rank: int, exit_code: int | None) -> None:
        """A rank's process ended, whether it registered or not; `exit_code` as in `watch_exit`."""
        self._hand_on(self._folder.ended(rank))
        self.listener.rank_ended(rank, exit_code, self.view(rank))

    def _hand_on(self, said: list[Said]) -> None:
        if said:
            self.listener.ranks_say(said)
