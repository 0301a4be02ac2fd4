"""An agent before a manager by hand, over real gRPC on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from lighthouse_served import scene

from lightkeeper.manager.agent import NodeAgent
from lightkeeper.manager.ranks import StartedElsewhere
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import manager_pb2, manager_pb2_grpc
from lightkeeper.wire import SERVER_OPTIONS


class Manager(manager_pb2_grpc.ManagerServicer):
    """Ends the group at once, reads to the end of what the agent says, and hangs up when it is told to."""

    def __init__(self) -> None:
        self.read: asyncio.Future[list[str | None]] = asyncio.get_running_loop().create_future()
        self.hangs_up = asyncio.Event()

    async def Node(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield manager_pb2.ToNode(taken=manager_pb2.NodeTaken(incarnation="i1", lease_ms=10_000))
        yield manager_pb2.ToNode(ends=manager_pb2.GroupEnds(exit_code=0, reason="closed"))
        self.read.set_result([message.WhichOneof("message") async for message in request_iterator])
        await self.hangs_up.wait()


def test_the_agent_leaves_the_manager_the_time_to_read_its_last_word(tmp_path: Path) -> None:
    """The end of the agent's stream is not the end of its words: what a busy manager has yet to read would be lost."""

    async def go() -> None:
        server, manager = grpc.aio.server(options=SERVER_OPTIONS), Manager()
        manager_pb2_grpc.add_ManagerServicer_to_server(manager, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        settings = Settings(group="g1", nnodes=2, node_rank=1, ranks=2, token="x", manager=f"127.0.0.1:{port}")

        async def started(incarnation: str, host: str, port: int) -> StartedElsewhere:
            return StartedElsewhere({}, lambda: None)

        running = asyncio.create_task(NodeAgent(settings, tmp_path / "socket", started, end_s=5.0).run())
        assert (await manager.read)[-1] == "fenced"
        await asyncio.wait({running}, timeout=0.3)
        assert not running.done(), "it has hung up first"
        manager.hangs_up.set()
        assert await running == 0
        await server.stop(grace=0)

    scene(go)
