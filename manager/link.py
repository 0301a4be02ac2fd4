"""The manager's stream to the lighthouse: connects, goes on to the next address, backs off, says so once.

Every connection has a channel of its own, so that a name is resolved anew.
"""

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
from lightkeeper.manager.addresses import Addresses
from lightkeeper.protos import lighthouse_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, metadata, plain_details

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 0.25
ANSWER_S_MAX = 3.0  # a lighthouse that accepts and says nothing is not there
OUTBOX_MAX = 1_000


class LighthouseLink:
    """Keeps one stream to the lighthouse.

    Args:
        lighthouse: ``HOST:PORT``, several with commas between, or ``file:PATH``.
        token: the job's token.
        job: the job's id.
        connected: called when a stream is about to stand, with the lighthouse's place in the list (0 if there is no
            other); it puts the `Hello`.
        disconnected: called when it broke.
        received: called with each message.
        say: prints a line for the operator.
        addresses: those of an earlier link, which it goes on with: the file may not be readable any more.

    Raises:
        UsageError: if the file cannot be used.
    """

    def __init__(
        self,
        lighthouse: str,
        token: str,
        job: str,
        connected: Callable[[int], None],
        disconnected: Callable[[], None],
        received: Callable[[ToManager], None],
        say: Callable[[str], None],
        addresses: Addresses | None = None,
    ) -> None:
        self.addresses, self.metadata = addresses or Addresses(lighthouse, say), metadata(token, job)
        self.connected, self.disconnected, self.received, self.say = connected, disconnected, received, say
        self.denied: str | None = None
        self.welcomed_at = ""  # the address that welcomed us last
        self._outbox: asyncio.Queue[ToLighthouse | None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended = self._drained = self._in_order = self._heard = self._refused = False
        self._answered = asyncio.Event()
        self._told = ""
        self._in_full = False
        self._refused_by: set[str] = set()

    def put(self, message: ToLighthouse) -> None:
        """Queues a message; dropped while there is no stream, since `Hello` says everything anew."""
        if self._outbox is not None and not self._outbox.full():
            self._outbox.put_nowait(message)

    async def flush(self, timeout_s: float) -> bool:
        """Ends the stream after what is queued, waiting no longer than this for it to be taken.

        Returns:
            Whether it was taken: the lighthouse has read it all, and ended the stream.
        """
        self._ended = True
        if self._outbox is not None and self._task is not None:
            while self._outbox.full():
                self._outbox.get_nowait()  # to a lighthouse that reads nothing
            self._outbox.put_nowait(None)
            await asyncio.wait({self._task}, timeout=timeout_s)
        return self._in_order

    async def run(self) -> None:
        """Connects again and again, until a stream was ended by `flush`."""
        self._task = asyncio.current_task()
        backoff_s = BACKOFF_S_MIN
        while not self._ended:
            await asyncio.to_thread(self.addresses.read)  # a file on a mount that hangs must not stop the manager
            heard = await self._stream(self.addresses.at)
            if self._ended or self.denied:
                return
            if not heard and not self._in_full:
                self.addresses.next()
            backoff_s = BACKOFF_S_MIN if heard else min(2 * backoff_s, BACKOFF_S_MAX)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _stream(self, address: str) -> bool:
        """One stream for as long as it stands; returns whether the lighthouse welcomed us on it."""
        self._outbox = asyncio.Queue(OUTBOX_MAX)
        rosters, self._in_full = Rosters(brief=not self._in_full), False
        self._heard = self._refused = False
        self._answered.clear()
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        channel = grpc.aio.insecure_channel(address, options=options)
        self.connected(self.addresses.place)
        call: Any = lighthouse_pb2_grpc.LighthouseStub(channel).Session(metadata=self.metadata)
        writer = asyncio.create_task(self._write(call, self._outbox, rosters))
        try:
            await self._read(call, address, rosters)
            self._in_order = self._drained and not self._in_full
        except TimeoutError:
            self._say_once(f"the lighthouse at {address} does not answer")
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED and not self.welcomed_at:
                self.denied = f"the lighthouse at {address} refused our token: {error.details()}"
            elif not self._refused:  # a write after the last word of who refused fails too
                why = "its stream broke" if error.code() == grpc.StatusCode.INTERNAL else plain_details(error.details())
                self._say_once(f"the lighthouse at {address} is not reachable ({why})")
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            call.cancel()
            self._outbox = None
            self.disconnected()
            await channel.close()
        return self._heard

    async def _read(self, call: Any, address: str, rosters: Rosters) -> None:
        async with asyncio.timeout(ANSWER_S_MAX) as bound:
            async for envelope in call:
                bound.reschedule(None)
                self._answered.set()
                message = unwrap(envelope, rosters)
                if isinstance(message, Unknown):
                    self._in_full = True  # it has no log of the job: it learns from us who the members were
                    return
                if isinstance(message, Refused):
                    self._refused = True
                    self._say_refused(address, message)
                elif not self._heard:
                    self._heard = True
                    self._say_found(address)
                self.received(message)

    async def _write(self, call: Any, outbox: asyncio.Queue[ToLighthouse | None], rosters: Rosters) -> None:
        """The `Hello`; and the rest once it is answered, since a write to who has hung up drowns the last word."""
        try:
            while (message := await outbox.get()) is not None:
                await call.write(wrap(message, rosters))
                await self._answered.wait()
            self._drained = True
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream broke: whoever reads from it says so

    # ------------------------------------------------------------ words

    def _say_once(self, line: str) -> None:
        """Once, until a lighthouse is found again."""
        if not self._told:
            others = [address for address in self.addresses.all if address != self.addresses.at]
            self.say(f"{line}; trying {', '.join(others) + ' and ' if others else ''}again")
        self._told = line

    def _say_refused(self, address: str, refused: Refused) -> None:
        if refused.retry and address not in self._refused_by:
            self._refused_by.add(address)
            self.say(f"the lighthouse at {address} does not take this group now: {refused.reason}")

    def _say_found(self, address: str) -> None:
        if self._told or self._refused_by or self.welcomed_at not in ("", address):
            back = self.welcomed_at == address or not (self.welcomed_at or self._refused_by)
            self.say(f"the lighthouse at {address} {'is back' if back else 'has taken this group in'}")
        self._told, self.welcomed_at = "", address
        self._refused_by.clear()
