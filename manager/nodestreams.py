"""The manager's streams to the agents of its group's other nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from lightkeeper.manager import local, nodewire
from lightkeeper.manager.actions import End
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.folding import Said
from lightkeeper.manager.keystore import KeyService
from lightkeeper.manager.nodes import Nodes
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import manager_pb2
from lightkeeper.words import Seldom

HELLO_S_MAX = 10.0
REASON_CHARS_MAX = 1000
OUTBOX_MAX = 10_000  # an agent that reads nothing for so long is silent, too


class Group(Protocol):
    """What the agents' messages are for."""

    incarnation: str

    @property
    def lease_s(self) -> float:
        """How long an agent may be silent, and its manager to it."""

    @property
    def ends(self) -> bool:
        """Whether the group is about to end."""

    def rank_registered(self, hello: local.Register) -> object:
        """A rank's socket stands."""

    def ranks_say(self, said: list[Said]) -> None:
        """What ranks said."""

    def rank_ended(self, rank: int, exit_code: int | None, view: RankView | None) -> None:
        """A rank's process ended."""

    def asked_to_leave(self, reason: str, by: str, deadline_s: float | None) -> None:
        """An agent got a signal, or (`by` is empty) notice that its node goes."""

    def node_gone(self, cause: str, node: int) -> None:
        """A node is gone."""

    def gives_up(self, reason: str) -> None:
        """What was waited for did not come."""

    def say(self, line: str) -> None:
        """One line for the operator."""


class NodeStreams:
    """One stream for each node besides the manager's own.

    Args:
        settings: what the group was told.
        group: told what the agents say.

    Attributes:
        rendezvous: host and port where the group's ranks find each other for its own collectives.
    """

    def __init__(self, settings: Settings, group: Group) -> None:
        self.settings, self.group = settings, group
        self.rendezvous = ("", 0)
        self.nodes = Nodes(settings, time.monotonic())
        self._outboxes: dict[int, asyncio.Queue[Any]] = {}
        self._heard = asyncio.Event()  # somebody's word that nothing runs there any more, or the end of its stream
        self._seldom = Seldom()

    # ------------------------------------------------------------ to the agents

    def tell(self, node: int, said: list[Said]) -> None:
        """Tells ranks of a node something."""
        if said:
            self._put(node, manager_pb2.ToNode(said=nodewire.said_to_wire(said)))

    def end(self, end: End, first_exit: int | None, asked: bool) -> None:
        """The group ends: agents kill what still runs of it.

        Args:
            end: how.
            first_exit: what the first of its ranks that ended before it did ended with.
            asked: whether somebody asked it to leave.
        """
        ends = manager_pb2.GroupEnds(
            exit_code=end.exit_code, reason=end.reason[:REASON_CHARS_MAX], first_exit=first_exit, asked=asked
        )
        for node in self._outboxes:
            self._put(node, manager_pb2.ToNode(ends=ends))

    async def close(self, within_s: float) -> None:
        """After `end`: waits for the agents' word that nothing runs any more, says who did not give it, hangs up."""
        try:
            async with asyncio.timeout(within_s):
                while not self.nodes.fenced(*self._outboxes):
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            pass
        if names := self.nodes.unfenced():
            self.group.say(
                f"no word from {', '.join(names)} that nothing runs there any more; by itself it ends in a lease"
            )
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)

    def _put(self, node: int, message: Any) -> None:
        outbox = self._outboxes.get(node)
        if outbox is not None and outbox.qsize() < OUTBOX_MAX:
            outbox.put_nowait(message)

    # ------------------------------------------------------------ from the agents

    async def serve(self, requests: AsyncIterator[Any], peer: str) -> AsyncIterator[Any]:
        """One agent's stream."""
        try:
            async with asyncio.timeout(HELLO_S_MAX):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("message") != "hello":
            if (line := self._seldom.lets(f"{peer} did not begin with a hello; its stream is closed")) is not None:
                self.group.say(line)
            return
        hello = nodewire.hello_from_wire(first.hello)
        refusal = self.nodes.comes(hello, self.group.ends, time.monotonic())
        if refusal is not None:
            yield manager_pb2.ToNode(refused=manager_pb2.NodeRefused(reason=refusal.reason, retry=refusal.retry))
            return
        node = hello.node_rank
        outbox = self._outboxes[node] = asyncio.Queue()
        host, port = self.rendezvous
        outbox.put_nowait(
            manager_pb2.ToNode(
                taken=manager_pb2.NodeTaken(
                    incarnation=self.group.incarnation, lease_ms=self._lease_ms(), rendezvous_host=host,
                    rendezvous_port=port,
                )
            )
        )  # fmt: skip
        reader = asyncio.create_task(self._read(node, requests, outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._hung_up(node)

    async def _read(self, node: int, requests: AsyncIterator[Any], outbox: asyncio.Queue[Any]) -> None:
        try:
            async for envelope in requests:
                self._take(node, envelope)
        except grpc.aio.AioRpcError:
            pass  # the stream broke: `_hung_up` says so
        except ValueError as error:
            self._hung_up(node, f"the agent of {self.nodes.there[node].name} sent a malformed message: {error}")
        finally:
            self._hung_up(node)
            outbox.put_nowait(None)

    def _take(self, node: int, envelope: Any) -> None:
        now, per_node = time.monotonic(), self.settings.ranks_per_node
        ranks = range(node * per_node, (node + 1) * per_node)
        kind = envelope.WhichOneof("message")
        if kind == "beat":
            self.nodes.beats(node, nodewire.views_from_wire(envelope.beat.views, ranks), now)
            self._put(node, manager_pb2.ToNode(alive=manager_pb2.NodeAlive(lease_ms=self._lease_ms())))
            return
        self.nodes.heard(node, now)
        if kind == "said":
            self._said(nodewire.said_from_ranks(envelope.said, ranks))
        elif kind == "ended":
            self.group.rank_ended(*nodewire.ended_from_wire(envelope.ended, ranks))
        elif kind == "lost":
            self.group.node_gone(envelope.lost.cause[:REASON_CHARS_MAX], node)
        elif kind == "leave":
            self._asked(self.nodes.there[node].name, envelope.leave)
        elif kind == "fenced":
            self.nodes.is_fenced(node)
            self._heard.set()
            if envelope.fenced.left:
                left = ", ".join(map(str, envelope.fenced.left))
                self.group.say(f"{self.nodes.there[node].name}: killed, and hanging in the kernel: pids {left}")
        else:
            raise ValueError(f"{kind or 'nothing'} in the middle of a stream")

    def _asked(self, name: str, leave: Any) -> None:
        deadline_s = leave.deadline_ms / 1000 if leave.HasField("deadline_ms") else None
        self.group.asked_to_leave(f"{leave.reason}, {name}", name if leave.signal else "", deadline_s)

    def _said(self, said: list[Said]) -> None:
        registered = [one.message for one in said if isinstance(one.message, local.Register)]
        for message in registered:
            self.group.rank_registered(message)
        if len(registered) < len(said):
            self.group.ranks_say([one for one in said if not isinstance(one.message, local.Register)])

    def _hung_up(self, node: int, why: str = "") -> None:
        if self._outboxes.pop(node, None) is None:
            return
        self._heard.set()
        if not self.group.ends:
            self.group.node_gone(why or self.nodes.gone(node, self.group.lease_s, time.monotonic()), node)

    def _lease_ms(self) -> int:
        return round(1000 * self.group.lease_s)

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        """Who is silent, and who has not come."""
        now = time.monotonic()
        silent = self.nodes.silent(self.group.lease_s, now)
        if silent is not None and not self.group.ends:
            node, why = silent
            self.group.node_gone(why, node)
        if self.group.ends:
            return
        if (line := self.nodes.awaited(now)) is not None:
            self.group.say(line)
        if (reason := self.nodes.too_late(now)) is not None:
            self.group.gives_up(reason)


class NodeService(KeyService):
    """All calls that a manager answers: those of `KeyService`, and the streams of its nodes."""

    streams: NodeStreams

    async def Node(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """An agent's stream."""
        await self._authorise(context, "Node")
        async for message in self.streams.serve(request_iterator, context.peer()):
            yield message
