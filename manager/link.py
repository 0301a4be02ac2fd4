"""The manager's stream to the lighthouse: connects, reconnects with back-off, says so once when it cannot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from lightkeeper.lighthouse.codec import unwrap, wrap
from lightkeeper.lighthouse.messages import Refused, ToLighthouse, ToManager, Unknown
from lightkeeper.lighthouse.rosters import Rosters
from lightkeeper.protos import lighthouse_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, metadata

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 0.25
OUTBOX_MAX = 1_000


class LighthouseLink:
    """Keeps one stream to the lighthouse.

    Args:
        address: the lighthouse, ``host:port``.
        token: the job's token.
        job: the job's id.
        connected: called when a stream is about to stand; it puts the `Hello`.
        disconnected: called when it broke.
        received: called with each message.
        say: prints a line for the operator.
    """

    def __init__(
        self,
        address: str,
        token: str,
        job: str,
        connected: Callable[[], None],
        disconnected: Callable[[], None],
        received: Callable[[ToManager], None],
        say: Callable[[str], None],
    ) -> None:
        self.address, self.metadata = address, metadata(token, job)
        self.connected, self.disconnected, self.received, self.say = connected, disconnected, received, say
        self.denied: str | None = None
        self.welcomed = False
        self._outbox: asyncio.Queue[ToLighthouse | None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended = False
        self._told = ""
        self._in_full = False

    def put(self, message: ToLighthouse) -> None:
        """Queues a message; dropped while there is no stream, since `Hello` says everything anew."""
        if self._outbox is not None and not self._outbox.full():
            self._outbox.put_nowait(message)

    async def flush(self, timeout_s: float) -> None:
        """Ends the stream after what is queued, waiting no longer than this for it to be taken."""
        if self._outbox is not None and self._task is not None:
            while self._outbox.full():
                self._outbox.get_nowait()  # to a lighthouse that reads nothing
            self._outbox.put_nowait(None)
            await asyncio.wait({self._task}, timeout=timeout_s)

    async def run(self) -> None:
        """Connects again and again, until a stream was ended by `flush`."""
        self._task = asyncio.current_task()
        backoff_s = BACKOFF_S_MIN
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = lighthouse_pb2_grpc.LighthouseStub(channel)
            while not self._ended:
                heard = await self._stream(stub)
                if self._ended or self.denied:
                    return
                backoff_s = BACKOFF_S_MIN if heard else min(2 * backoff_s, BACKOFF_S_MAX)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _stream(self, stub: Any) -> bool:
        """One stream for as long as it stands; returns whether the lighthouse welcomed us on it."""
        self._outbox = asyncio.Queue(OUTBOX_MAX)
        heard = False
        rosters, self._in_full = Rosters(brief=not self._in_full), False
        self.connected()
        call = stub.Session(self._requests(self._outbox, rosters), metadata=self.metadata)
        try:
            async for envelope in call:
                message = unwrap(envelope, rosters)
                if isinstance(message, Unknown):
                    self._in_full = True  # a lighthouse that lost its log: it learns from us who the members were
                    return True
                if not heard and not isinstance(message, Refused):
                    heard = self.welcomed = True
                    if self._told:
                        self.say(f"the lighthouse at {self.address} is back")
                    self._told = ""
                self.received(message)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED and not self.welcomed:
                self.denied = f"the lighthouse at {self.address} refused our token: {error.details()}"
            else:
                self._say_once(f"the lighthouse at {self.address} is not reachable ({error.details()}); trying again")
        finally:
            call.cancel()
            self._outbox = None
            self.disconnected()
        return heard

    async def _requests(self, outbox: asyncio.Queue[ToLighthouse | None], rosters: Rosters) -> Any:
        while (message := await outbox.get()) is not None:
            yield wrap(message, rosters)
        self._ended = True

    def _say_once(self, line: str) -> None:
        if not self._told:
            self.say(line)
        self._told = line
