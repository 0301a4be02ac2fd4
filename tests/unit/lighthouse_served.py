"""A lighthouse over real gRPC on the loopback, and a manager's stream by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.codec import unwrap, wrap
from lightkeeper.lighthouse.log import LighthouseLog
from lightkeeper.lighthouse.machine import Bounds
from lightkeeper.lighthouse.service import LighthouseService, add_to
from lightkeeper.protos import lighthouse_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, SERVER_OPTIONS, metadata

BOUND_S = 60.0
TOKEN = "secret"
ENDED = (grpc.aio.EOF, None)


@dataclass
class Served:
    service: LighthouseService
    address: str
    said: list[str] = field(default_factory=list)
    ticks: asyncio.Task[None] | None = None


def scene(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(coroutine(), BOUND_S))


@contextlib.asynccontextmanager
async def serving(folder: Path | None = None, events: EventLog | None = None) -> AsyncIterator[Served]:
    log = LighthouseLog(folder)
    said: list[str] = []
    service = LighthouseService(log, Bounds(2.0, 0.1), TOKEN, events, said.append)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_to(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticks = asyncio.create_task(service.run_ticks())
    try:
        yield Served(service, f"127.0.0.1:{port}", said, ticks)
    finally:
        ticks.cancel()
        await server.stop(grace=0)
        log.close()


class Speaker:
    """One manager's stream by hand."""

    def __init__(self, address: str, token: str | None = TOKEN, options: Any = CHANNEL_OPTIONS) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=options)
        stub: Any = lighthouse_pb2_grpc.LighthouseStub(self.channel)
        carried = metadata(token, "job") if token is not None else ()
        self.call = stub.Session(metadata=carried)

    async def __aenter__(self) -> Speaker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def say(self, *messages: Any) -> None:
        for message in messages:
            await self.call.write(wrap(message))

    async def hears(self, kind: type) -> Any:
        """The next message of a kind; others are skipped."""
        while True:
            envelope = await self.call.read()
            assert envelope not in ENDED, f"the stream ended before a {kind.__name__}: {await self.call.details()}"
            if isinstance(message := unwrap(envelope), kind):
                return message

    async def ends(self) -> grpc.StatusCode:
        """Waits for the end of the stream."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() not in ENDED:
                pass
        return await self.call.code()


def hello(group: str = "g0", groups: int = 1, **more: Any) -> m.Hello:
    return m.Hello("job", group, f"{group}-i1", "127.0.0.1:1", groups, 1, **more)
