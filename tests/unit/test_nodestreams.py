"""The manager's end of its agents' streams, over real gRPC on the loopback: who is taken, and what a bad one costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from lighthouse_served import scene

from lightkeeper.manager import local, nodestreams, nodewire
from lightkeeper.manager.actions import End
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.folding import Said, Views
from lightkeeper.manager.nodestreams import NodeService, NodeStreams
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import manager_pb2, manager_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, SERVER_OPTIONS, metadata

SETTINGS = Settings(group="g1", nnodes=2, ranks=4, token="secret")
NAME = "node 1 (host-b, pid 71)"


class Group:
    """What the streams tell their group."""

    incarnation, lease_s, ends = "i1", 2.0, False

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.news = asyncio.Event()

    def _tell(self, *what: Any) -> None:
        self.told.append(what)
        self.news.set()

    async def until(self, *what: Any) -> None:
        while what not in self.told:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 10)

    def rank_registered(self, hello: local.Register) -> None:
        self._tell("registered", hello.rank)

    def ranks_say(self, said: list[Said]) -> None:
        self._tell("said", *said)

    def rank_ended(self, rank: int, exit_code: int | None, view: RankView | None) -> None:
        self._tell("ended", rank, exit_code, view)

    def asked_to_leave(self, reason: str, by: str, deadline_s: float | None) -> None:
        self._tell("leave", reason, by, deadline_s)

    def node_gone(self, cause: str, node: int) -> None:
        self._tell("gone", node, cause)

    def gives_up(self, reason: str) -> None:
        self._tell("gives up", reason)

    def say(self, line: str) -> None:
        self._tell("say", line)


class Agent:
    """An agent by hand."""

    def __init__(self, channel: grpc.aio.Channel, token: str = "secret") -> None:
        stub: Any = manager_pb2_grpc.ManagerStub(channel)
        self.call = stub.Node(metadata=metadata(token, "job"))

    async def say(self, **message: Any) -> None:
        await self.call.write(manager_pb2.FromNode(**message))

    async def hello(self, **more: Any) -> Any:
        given = {"group": "g1", "node_rank": 1, "nodes": 2, "ranks": 4, "host": "host-b", "pid": 71, **more}
        await self.say(hello=manager_pb2.NodeHello(**given))
        return await self.call.read()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Group, NodeStreams, grpc.aio.Channel]]:
    group = Group()
    service = NodeService("secret", "job", lambda peer, what: group._tell("stranger", what), lambda: None)
    service.streams = NodeStreams(SETTINGS, group)
    service.streams.rendezvous = ("10.0.0.1", 4711)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield group, service.streams, channel
    await server.stop(grace=0)


def test_an_agent_is_taken_told_what_it_needs_and_answered() -> None:
    async def go() -> None:
        async with serving() as (group, streams, channel):
            agent = Agent(channel)
            taken = (await agent.hello()).taken
            assert (taken.incarnation, taken.lease_ms) == ("i1", 2000)
            assert (taken.rendezvous_host, taken.rendezvous_port) == ("10.0.0.1", 4711)
            register = local.Register(token="", rank=2, pid=9, transfer="h:1", progress="")
            vote = local.Vote(epoch=1, step=3, outcome="reduced")
            both = [Said((2,), register), Said((2, 3), vote)]
            await agent.say(said=nodewire.said_to_wire(both))
            await group.until("said", both[1])
            assert group.told == [("registered", 2), ("said", both[1])]
            view = RankView("reduce", 3, 0.5, 0.0)
            await agent.say(beat=manager_pb2.NodeBeat(views=nodewire.views_to_wire([Views((2, 3), view)])))
            assert (await agent.call.read()).alive.lease_ms == 2000
            assert streams.nodes.views() == {2: view, 3: view}
            streams.tell(1, [Said((2, 3), local.Answer(verdict="go", step=4))])
            assert nodewire.said_to_ranks((await agent.call.read()).said)[0].ranks == (2, 3)
            await agent.say(ended=nodewire.ended_to_wire(3, -9, view))
            await group.until("ended", 3, -9, view)
            await agent.say(leave=manager_pb2.AskedToLeave(reason="SIGTERM", signal=True))
            await group.until("leave", f"SIGTERM, {NAME}", NAME, None)
            await agent.say(leave=manager_pb2.AskedToLeave(reason="notice", deadline_ms=1500))
            await group.until("leave", f"notice, {NAME}", "", 1.5)

    scene(go)


def test_the_end_of_the_group_is_told_and_waited_for_until_the_node_is_fenced() -> None:
    async def go() -> None:
        async with serving() as (group, streams, channel):
            agent = Agent(channel)
            await agent.hello()
            group.ends = True
            streams.end(End(137, "rank 0 was killed"), -9, False)
            closing = asyncio.create_task(streams.close(within_s=10.0))
            ends = (await agent.call.read()).ends
            assert (ends.exit_code, ends.reason, ends.first_exit, ends.asked) == (137, "rank 0 was killed", -9, False)
            assert not closing.done()
            await agent.say(fenced=manager_pb2.NodeFenced())
            await closing
            assert await agent.call.read() is grpc.aio.EOF
            assert group.told == []

    scene(go)


def test_a_node_that_does_not_say_that_it_is_fenced_is_named_after_the_lease() -> None:
    async def go() -> None:
        async with serving() as (group, streams, channel):
            agent = Agent(channel)
            await agent.hello()
            group.ends = True
            streams.end(End(1, "x"), 1, False)
            await streams.close(within_s=0.05)
            (told,) = group.told
            assert told[0] == "say" and told[1].startswith(f"no word from {NAME} that nothing runs there any more")

    scene(go)


def test_a_stream_that_breaks_is_a_node_that_is_gone() -> None:
    async def go() -> None:
        async with serving() as (group, _, channel):
            agent = Agent(channel)
            await agent.hello()
            agent.call.cancel()
            await group.until("gone", 1, f"the agent of {NAME} is gone")

    scene(go)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"said": nodewire.said_to_wire([Said((0,), local.Built(epoch=1))])}, "a message of a rank of another node"),
        ({"ended": nodewire.ended_to_wire(1, 0, None)}, "the end of rank 1, which is of another node"),
        ({"hello": manager_pb2.NodeHello()}, "hello in the middle of a stream"),
        ({}, "nothing in the middle of a stream"),
        ({"said": manager_pb2.SaidMany(said=[manager_pb2.Said(ranks=[2], message=b"\x80\x04.")])}, ""),
    ],
)
def test_an_agent_that_talks_nonsense_ends_the_group_and_is_named(message: dict[str, Any], says: str) -> None:
    async def go() -> None:
        async with serving() as (group, _, channel):
            agent = Agent(channel)
            await agent.hello()
            await agent.say(**message)
            assert await agent.call.read() is grpc.aio.EOF
            ((kind, node, cause),) = group.told
            assert (kind, node) == ("gone", 1) and f"the agent of {NAME} sent a malformed message: {says}" in cause

    scene(go)


def test_a_stranger_is_refused_and_one_without_a_hello_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        monkeypatch.setattr(nodestreams, "HELLO_S_MAX", 0.05)
        async with serving() as (group, _, channel):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await Agent(channel, "wrong").hello()
            assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
            await group.until("stranger", "Node")
            assert await Agent(channel).call.read() is grpc.aio.EOF
            assert "did not begin with a hello" in group.told[-1][1]

    scene(go)


def test_who_was_started_otherwise_or_comes_twice_is_told_why() -> None:
    async def go() -> None:
        async with serving() as (group, _, channel):
            refused = (await Agent(channel).hello(nodes=3)).refused
            assert refused.reason == "this group's manager has --nnodes 2, and the agent --nnodes 3"
            assert not refused.retry
            first, second = Agent(channel), Agent(channel)
            await first.hello()
            refused = (await second.hello(pid=72)).refused
            assert refused.retry and refused.reason == f"{NAME} has come to this incarnation of the group already"
            assert await second.call.read() is grpc.aio.EOF
            assert group.told == [], "the first is not disturbed"

    scene(go)
