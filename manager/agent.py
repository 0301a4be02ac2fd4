"""The agent of a node without the manager: it serves the ranks of its node, and speaks for them to the manager.

It belongs to one incarnation of its group. When the stream to the manager breaks, or nothing was heard on it for a
lease, it kills its ranks: by then the manager has ended the group, or is gone itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec

from lightkeeper.events.schema import Event, ProcessEnded, ProcessStarted
from lightkeeper.events.writer import EventLog
from lightkeeper.manager import exits, local, nodewire
from lightkeeper.manager.actions import Collect
from lightkeeper.manager.answers import SAY_AFTER_S, RankView
from lightkeeper.manager.beats import STANDS_S
from lightkeeper.manager.evidence.collector import Collector
from lightkeeper.manager.findmanager import ANSWER_S_MAX, Denied, ManagerFinder
from lightkeeper.manager.folders import remove_left_over
from lightkeeper.manager.folding import Said, fold_views
from lightkeeper.manager.localranks import LocalRanks
from lightkeeper.manager.notice import Notice
from lightkeeper.manager.processes import Watched
from lightkeeper.manager.ranklogs import RankLogs
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import manager_pb2, manager_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, metadata, plain_details
from lightkeeper.words import Seldom, say

BACKOFF_S = (0.05, 1.0)
BEAT_S = 0.2
BEATS_PER_S_MAX = 320  # of all agents of a group together
BEATS_PER_LEASE_MIN = 5
LOOK_S = 0.1
ASKED_S = 5.0  # for which an agent that is asked to leave looks for a manager that it can tell
OUTBOX_MAX = 10_000


class RunningRanks(Protocol):
    """The processes of this node's ranks, and what they print where that is captured."""

    logs: RankLogs | None

    @property
    def pids(self) -> dict[int, int]:
        """Pid by rank."""

    def watch(self, ended: Callable[[int, int], None]) -> None:
        """Tells rank and exit code of each that ends."""

    def running(self) -> list[int]:
        """Ranks whose processes have not ended."""

    def kill(self) -> None:
        """Kills them, and what they started."""

    async def close(self, within_s: float) -> None:
        """Waits for their end, and kills what is left after so many seconds."""


class NodeAgent:
    """The agent of one node, for one incarnation of its group.

    Args:
        settings: what the group was told.
        socket_path: where the ranks' local socket is made.
        ranks: starts the ranks, given the incarnation, and the host and port of the group's rendezvous.
        end_s: how long ranks of a group that ends well may take to end.

    Attributes:
        why: why the group ended.
        first_exit: what the first of its ranks that ended before it did ended with, negative for a signal.
        group_was_asked: whether somebody asked it to leave.
        asked_s: for how long it looks for a manager that it can tell, if it is asked to leave before one has taken it.
        launcher: what started the ranks, if not we did, and they end with it.
    """

    def __init__(
        self,
        settings: Settings,
        socket_path: Path,
        ranks: Callable[[str, str, int], Awaitable[RunningRanks]],
        end_s: float,
    ) -> None:
        self.settings, self.start_ranks, self.end_s = settings, ranks, end_s
        self.local = LocalRanks(socket_path, settings.token, settings.ranks_here, self)
        self._exits: dict[int, int | None] = {}
        self.collector = Collector(
            settings, socket_path.parent, self.local.pids, self.local.views, lambda: self._exits, self._note, self.say
        )
        self.finder = ManagerFinder(settings)
        self.events: EventLog | None = None
        self.incarnation = self.why = ""
        self.first_exit: int | None = None
        self.group_was_asked = self._told = False
        self.launcher: Watched | None = None
        self.lease_s = 2.0  # until the manager says
        self._address = ""
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._heard = self._beat_s = 0.0
        self._beat_key: tuple[bool, bool] = (False, False)
        self._seldom = Seldom()
        self.asked_s = ASKED_S
        self._asked = asyncio.Event()  # since the last look for a manager
        self._asked_at = math.inf
        self._signals = 0
        self._ended: asyncio.Future[tuple[int, str]]

    async def run(self) -> int:
        """Finds the group's manager and serves the ranks of this node until the group ends; returns its exit code."""
        s = self.settings
        remove_left_over()
        self._ended = asyncio.get_running_loop().create_future()
        name = f"agent {s.group}/{s.node_rank}"
        if s.run_folder:
            self.events = EventLog(s.run_folder, name, job=s.job, group=s.group)
            self.events.write(ProcessStarted(command=" ".join(sys.argv)[:1000]))
        code = await self._find_and_serve()
        if self.events is not None:
            self.events.write(ProcessEnded(exit_code=code))
        return code

    async def finish(self) -> None:
        """After `run`: what was kept of the group's end is written; no next start need wait for it."""
        await self.collector.end()

    def is_complete(self) -> bool:
        """Whether all ranks of this node have come."""
        return len(self.local.pids) == len(self.local.ranks)

    # ------------------------------------------------------------ finding the manager

    async def _find_and_serve(self) -> int:
        s = self.settings
        began = answered = time.monotonic()
        say_after_s, backoff_s = SAY_AFTER_S, BACKOFF_S[0]
        while self._signals < 2 and time.monotonic() < self._asked_at + self.asked_s:
            self._asked.clear()
            try:
                self._address = await self.finder.find() or ""
                code = await self._serve() if self._address else None
            except Denied as error:
                self.say(str(error))
                return exits.REFUSED
            if code is not None:
                return code
            now = time.monotonic()
            answered = answered if self.finder.nobody else now
            if now - began > s.timeouts.start_budget_s or now - answered > s.outage_budget_s:
                self.say(f"gives up after {now - began:.0f} s: {self.finder.why}; start this node again")
                return exits.GAVE_UP
            if now - began > say_after_s and self._asked_at == math.inf:
                say_after_s = 2 * (now - began)
                self.say(f"waits for the manager of {s.group} since {now - began:.0f} s: {self.finder.why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s * random.uniform(0.5, 1.0)):
                    await self._asked.wait()
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])
        return exits.ASKED if self._signals > 1 else 0

    async def _serve(self) -> int | None:
        """Serves the manager at the address that was found; None if it does not take us, and another may."""
        s = self.settings
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub: Any = manager_pb2_grpc.ManagerStub(channel)
            call = stub.Node(metadata=metadata(s.token, s.job))
            first = await self._first_word(call)
            if first is None:
                return None
            if first.WhichOneof("message") == "refused":
                self.finder.why = f"the manager at {self._address}: {first.refused.reason}"
                if first.refused.retry:
                    return None
                self.say(f"refused by {self.finder.why}")
                return exits.REFUSED
            return await self._serve_taken(call, first.taken)

    async def _first_word(self, call: Any) -> Any:
        s = self.settings
        hello = manager_pb2.NodeHello(
            group=s.group, node_rank=s.node_rank, nodes=s.nnodes, ranks=s.ranks, host=socket.gethostname(),
            pid=os.getpid(),
        )  # fmt: skip
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await call.write(manager_pb2.FromNode(hello=hello))
                first = await call.read()
        except TimeoutError:
            self.finder.why = f"the manager at {self._address} does not answer"
            return None
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise Denied(f"refused by the manager at {self._address}: {error.details()}") from error
            self.finder.why = f"the manager at {self._address} is not reachable ({plain_details(error.details())})"
            return None
        if first is grpc.aio.EOF:
            self.finder.why = f"the manager at {self._address} has hung up"
            return None
        return first

    # ------------------------------------------------------------ one incarnation

    async def _serve_taken(self, call: Any, taken: Any) -> int:
        self.incarnation, self.lease_s = taken.incarnation, taken.lease_ms / 1000
        self._heard = time.monotonic()
        self.say(
            f"serves ranks {self.local.ranks.start} to {self.local.ranks.stop - 1} for the manager at {self._address}"
        )
        await self.local.open()
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call))
        tasks = [reader, asyncio.create_task(self._run_ticks())]
        try:
            ranks = await self.start_ranks(taken.incarnation, taken.rendezvous_host, taken.rendezvous_port)
            self.local.roots.update(ranks.pids.values())
            self.collector.started, self.collector.logs = ranks.pids, ranks.logs
            self.local.kill_also = ranks.kill
            ranks.watch(self.local.ended)
            awaited: list[asyncio.Future[Any]] = [self._ended, *tasks]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a task that ends before the group does so by a bug, which is raised here
            code, reason = await self._ended
            if code != 0:
                self.say(f"ends with exit code {code}: {reason}")
                await self._kill_after_evidence(code, reason)
            await ranks.close(self.end_s if code == 0 else 0.0)
            self._put(manager_pb2.FromNode(fenced=manager_pb2.NodeFenced(left=self._left(ranks))))
            self._outbox.put_nowait(None)
            # The manager hangs up when it has read this. Who hangs up first drowns what is not read yet.
            await asyncio.wait({reader, writer}, timeout=self.lease_s)
            return code
        finally:
            self.local.kill()
            for task in (*tasks, writer):
                task.cancel()
            self.local.close()
            self.local.remove_files()

    async def _kill_after_evidence(self, code: int, reason: str) -> None:
        """Kills the ranks of this node; if the manager has said so, after what can be seen of them is kept."""
        if self._told and code not in (exits.REFUSED, exits.STOPPED, exits.ASKED):
            step = max((view.step for view in self.local.views().values()), default=0)
            self.collector.collect(Collect("ended", reason, step))
        await self.collector.seen()
        self.local.kill()

    def _left(self, ranks: RunningRanks) -> list[int]:
        return [ranks.pids[rank] for rank in ranks.running()]

    def _end(self, code: int, reason: str) -> None:
        self.why = self.why or reason
        if not self._ended.done():
            self._ended.set_result((code, reason))

    def asked_to_leave(self, reason: str, notice: bool = False) -> None:
        """The launcher got a signal (`notice`: one that only gives notice): the manager decides, once one took us."""
        self._signals += not notice
        self._ask(manager_pb2.AskedToLeave(reason=reason, signal=not notice))

    def noticed(self, notice: Notice) -> None:
        """The notice file of this node is there."""
        path = self.settings.notice_file
        if notice.problem:
            self.say(f"the notice in {path}: {notice.problem}")
        deadline_ms = None if notice.deadline_s is None else round(1000 * notice.deadline_s)
        self._ask(manager_pb2.AskedToLeave(reason=f"notice in {path}", deadline_ms=deadline_ms))

    def _ask(self, leave: Any) -> None:
        """The other nodes wait for this one until they hear of it, so it looks for who can tell them."""
        if not self.incarnation and self._asked_at == math.inf:
            self.say(
                f"asked to leave ({leave.reason}): looks for the manager of {self.settings.group} for up to "
                f"{self.asked_s:.0f} s, to say so"
            )
        self._asked_at = min(self._asked_at, time.monotonic())
        self._asked.set()
        self._put(manager_pb2.FromNode(leave=leave))

    # ------------------------------------------------------------ from the manager

    async def _read(self, call: Any) -> None:
        gone = f"the group's manager at {self._address} is gone"
        try:
            while (envelope := await call.read()) is not grpc.aio.EOF:
                self._heard = time.monotonic()
                self._take(envelope)
        except grpc.aio.AioRpcError:
            pass  # the stream broke
        except ValueError as error:
            gone = f"the manager at {self._address} sent a malformed message: {error}"
        self._end(exits.ORPHANED, gone)
        await self._ended

    def _take(self, envelope: Any) -> None:
        kind = envelope.WhichOneof("message")
        if kind == "said":
            for said in nodewire.said_to_ranks(envelope.said):
                if isinstance(said.message, local.Abort) and said.message.recovery:
                    self.collector.keep_dumps(said.message.recovery)
                self.local.send(said.message, said.ranks)  # type: ignore[arg-type]  # decoded as such
        elif kind == "alive":
            self.lease_s = envelope.alive.lease_ms / 1000
        elif kind == "ends":
            self.first_exit = envelope.ends.first_exit if envelope.ends.HasField("first_exit") else None
            self.group_was_asked, self._told = envelope.ends.asked, True
            self._end(envelope.ends.exit_code, envelope.ends.reason)
        else:
            raise ValueError(f"{kind or 'nothing'} in the middle of a stream")

    # ------------------------------------------------------------ to the manager

    async def _write(self, call: Any) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream broke: whoever reads from it says so

    def _put(self, message: Any) -> None:
        if self._outbox.qsize() < OUTBOX_MAX:
            self._outbox.put_nowait(message)

    async def _run_ticks(self) -> None:
        while True:
            self.local.look()
            self._mind_launcher()
            now = time.monotonic()
            self._beat_if_due(now)
            if now - self._heard > self.lease_s:
                self._end(
                    exits.ORPHANED, f"nothing was heard of the manager at {self._address} for {now - self._heard:.1f} s"
                )
                await self._ended
            await asyncio.sleep(min(LOOK_S, self.lease_s / BEATS_PER_LEASE_MIN))

    def _beat_if_due(self, now: float) -> None:
        """At its interval, and at once when a rank is stopped or stands in a reduce: a lighthouse waits for that."""
        views = self.local.views()
        key = (
            any(view.stopped_s > 0 for view in views.values()),
            any(view.waiting_s >= STANDS_S for view in views.values()),
        )
        interval_s = min(max(BEAT_S, self.settings.nnodes / BEATS_PER_S_MAX), self.lease_s / BEATS_PER_LEASE_MIN)
        if now - self._beat_s >= interval_s or key != self._beat_key:
            self._beat_s, self._beat_key = now, key
            beat = manager_pb2.NodeBeat(views=nodewire.views_to_wire(fold_views(views)))
            self._put(manager_pb2.FromNode(beat=beat))

    # ------------------------------------------------------------ from the ranks

    def rank_registered(self, hello: local.Register) -> local.Registered:
        """A rank's socket stands; its token and its page stay here."""
        register = msgspec.structs.replace(hello, token="", progress="")
        self.ranks_say([Said((hello.rank,), register)])
        s = self.settings
        return local.Registered(job=s.job, group=s.group, incarnation=self.incarnation, pid=os.getpid())

    def ranks_say(self, said: list[Said]) -> None:
        """What ranks said goes on to the manager."""
        self._put(manager_pb2.FromNode(said=nodewire.said_to_wire(said)))

    def rank_ended(self, rank: int, exit_code: int | None, view: RankView | None) -> None:
        """A rank's process ended."""
        self._exits.setdefault(rank, exit_code)
        self._mind_launcher()
        self._put(manager_pb2.FromNode(ended=nodewire.ended_to_wire(rank, exit_code, view)))

    def _mind_launcher(self) -> None:
        """Ranks that the kernel kills since their launcher is gone are not to blame."""
        if self.launcher is not None and not self._ended.done() and (how := self.launcher.how_it_ended()):
            cause = f"the launcher of the ranks of node {self.settings.node_rank} ({socket.gethostname()}), {how}"
            self._put(manager_pb2.FromNode(lost=manager_pb2.NodeLost(cause=cause)))
            self._end(exits.ORPHANED, cause)

    def stranger(self, peer: str, what: str) -> None:
        """Somebody without the token was refused."""
        if (line := self._seldom.lets(f"refused {peer}: wrong or missing token")) is not None:
            self.say(line)

    def _note(self, event: Event) -> None:
        if self.events is not None:
            self.events.write(event)

    def say(self, line: str) -> None:
        """One line for the operator."""
        say(f"agent {self.settings.group}/{self.settings.node_rank}: {line}")
