"""Simulated managers: each speaks the real codec on a stream of its own over a connection of its own, by script.

They follow the manager's own rules for when to beat (`manager/beats.py`), promise what they are asked for, and stand in
a reduce when the bench says so. One process holds them all, so that what is measured is the lighthouse.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightkeeper.wire import CHANNEL_OPTIONS, metadata  # isort: skip - before grpc: it turns its fork handlers off

import grpc
import grpc.aio

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.codec import unwrap, wrap
from lightkeeper.lighthouse.names import Entry, Membership
from lightkeeper.lighthouse.rosters import Rosters
from lightkeeper.manager.beats import Beats
from lightkeeper.protos import lighthouse_pb2

METHOD = "/lightkeeper.v1.Lighthouse/Session"
LOOK_S = 0.1
SLICES = 20  # of a look, so that not all of them beat at once
WAIT_S_MAX = 60.0
MICROBATCHES_PER_GROUP = 2


class Silence(RuntimeError):
    """What a bench waited for did not come in time."""


@dataclass
class Fleet:
    """All managers of a job, and what they do together.

    Attributes:
        step: the step in progress, the same for all.
        stands_since: since when all but the mute stand in its reduce, None if they do not (monotonic seconds).
        up_bytes: payload of all messages to the lighthouse.
        down_bytes: payload of all messages from it.
    """

    address: str
    token: str
    size: int
    job: str = "bench"
    step: int = 0
    stands_since: float | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    messages: int = 0
    managers: list[Simulated] = field(default_factory=list)

    async def connect(self) -> None:
        """A connection for each of them."""
        self.managers = [Simulated(self, i) for i in range(self.size)]
        for some in batches(self.managers):
            await asyncio.gather(*(manager.connect() for manager in some))

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Connected, and looking at their ranks, until the end."""
        await self.connect()
        looks = asyncio.create_task(self.looks())
        try:
            yield
        finally:
            looks.cancel()
            await self.close()

    async def join(self) -> None:
        """All come at once, until they are members."""
        for manager in self.managers:
            manager.join()
        await self.until(lambda: all(manager.number for manager in self.managers), "the first epoch")

    async def close(self) -> None:
        """Ends all streams and connections."""
        for some in batches(self.managers):
            await asyncio.gather(*(manager.close() for manager in some))

    async def looks(self) -> None:
        """Each looks at its ranks ten times a second, for ever."""
        for i in itertools.count():
            for manager in self.managers[i % SLICES :: SLICES]:
                manager.look(time.monotonic())
            await asyncio.sleep(LOOK_S / SLICES)

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Waits until something is so; returns when that was seen (monotonic seconds).

        Raises:
            Silence: if it does not come.
        """
        until = time.monotonic() + WAIT_S_MAX
        while not condition():
            if time.monotonic() > until:
                raise Silence(f"{self.size} groups: {what} did not come within {WAIT_S_MAX:.0f} s")
            await asyncio.sleep(0.002)
        return time.monotonic()


class Simulated:
    """One manager.

    Attributes:
        mute: it neither says nor reads anything, and its connection stands: a host that is cut off.
        slow: it computes for long, and does not stand when the others do.
        heard: when it was last told what, by kind (monotonic seconds).
        told: how often it was told what, by kind.
    """

    def __init__(self, fleet: Fleet, index: int, start: int = 1) -> None:
        self.fleet, self.index, self.group = fleet, index, f"g{index}"
        self.incarnation = f"{index:08x}-{start:08x}"
        self.known: Membership | None = None
        self.planned: Membership | None = None
        self.phase = "compute"
        self.mute = self.slow = False
        self.heard: dict[str, float] = {}
        self.told: Counter[str] = Counter()
        self.beat_s = WAIT_S_MAX
        self._beats = Beats()
        self._rosters = Rosters(brief=True)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """A connection of its own."""
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.insecure_channel(self.fleet.address, options=options)
        await asyncio.wait_for(self._channel.channel_ready(), WAIT_S_MAX)

    def join(self) -> None:
        """Opens its stream, and comes as a group whose ranks are ready."""
        session: Any = self._channel.stream_stream(METHOD)
        call = session(self._requests(), metadata=metadata(self.fleet.token, self.fleet.job))
        self._task = asyncio.create_task(self._read(call))
        self.say(self._hello())
        self.say(m.Join((self._address(29512),), {"w": "float32[2]"}, "same"))

    async def connect_again(self) -> None:
        """To a lighthouse that was started anew: as the same incarnation, which knows its epoch."""
        await self.close()
        self.beat_s = WAIT_S_MAX  # until it is welcomed
        self._rosters, self._outbox = Rosters(brief=True), asyncio.Queue()
        self._beats.again()
        self.heard.clear()
        await self.connect()

    def _hello(self) -> m.Hello:
        fleet, known = self.fleet, self.known
        hello = m.Hello(fleet.job, self.group, self.incarnation, self._address(29511), fleet.size, 1)
        if known is None:
            return hello
        return replace(hello, acknowledged=known.epoch.term, known=known, promised=known.epoch.number)

    async def close(self) -> None:
        """Its stream and its connection end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._channel.close()

    def say(self, message: m.ToLighthouse) -> None:
        """Sends a message."""
        data: bytes = wrap(message, self._rosters).SerializeToString()
        self.fleet.up_bytes += len(data)
        self.fleet.messages += 1
        self._outbox.put_nowait(data)

    def look(self, now: float) -> None:
        """Beats if it is time for it."""
        beat = self._beat(now)
        if not self.mute and self.beat_s < WAIT_S_MAX and self._beats.due(beat, self.beat_s, now):
            self._say_beat(beat, now)

    @property
    def number(self) -> int:
        """Number of its epoch, 0 before the first."""
        return 0 if self.known is None else self.known.epoch.number

    def _beat(self, now: float) -> m.Beat:
        since = self.fleet.stands_since
        waiting_s = 0.0 if since is None or self.slow or self.phase == "follow" else now - since
        return m.Beat(self.number, self.fleet.step, "reduce" if waiting_s else self.phase, round(waiting_s * 1000))

    def _say_beat(self, beat: m.Beat, now: float) -> None:
        self._beats.said(beat, now)
        self.say(beat)

    def _address(self, port: int) -> str:
        return f"10.1.{self.index >> 8}.{self.index & 255}:{port}"

    async def _requests(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._outbox.get()

    async def _read(self, call: Any) -> None:
        try:
            async for data in call:
                if not self.mute:
                    self._take(data, time.monotonic())
        except grpc.aio.AioRpcError:
            return  # the lighthouse is gone
        finally:
            call.cancel()

    def _take(self, data: bytes, now: float) -> None:
        self.fleet.down_bytes += len(data)
        self.fleet.messages += 1
        message = unwrap(lighthouse_pb2.ToManager.FromString(data), self._rosters)
        self.heard[type(message).__name__] = now
        self.told[type(message).__name__] += 1
        if isinstance(message, m.Welcome):
            self.beat_s = message.beat_ms / 1000
        elif isinstance(message, m.Ask):
            self._say_beat(self._beat(now), now)
        elif isinstance(message, m.Activate):
            assert message.shares and message.shares[0].group == self.group, "it is told its own share"
            self.known = message.membership
            self._beats.recovered()
        elif isinstance(message, m.Prepare) and message.planned is not None:
            self.planned = message.planned
        elif isinstance(message, m.Prepare):
            self.say(self._promise(message))
        elif isinstance(message, m.Heal):
            self.phase = "follow"  # as if it had the state already

    def _promise(self, prepare: m.Prepare) -> m.Promise:
        total = MICROBATCHES_PER_GROUP * self.fleet.size
        if self.known is None or self.fleet.step == 0:
            return m.Promise(prepare.epoch, self.known, (), None, (), total)
        first = MICROBATCHES_PER_GROUP * self.index
        held = tuple(range(first, first + MICROBATCHES_PER_GROUP))
        return m.Promise(prepare.epoch, self.known, (), Entry(self.known.epoch, self.fleet.step - 1), held, total)

    def switch(self) -> None:
        """The entry in which all carry its flag puts the planned epoch in force."""
        self.known, self.planned, self.phase = self.planned or self.known, None, "compute"


def batches(managers: list[Simulated], size: int = 64) -> list[list[Simulated]]:
    """Some at a time, for what opens or ends connections."""
    return [managers[i : i + size] for i in range(0, len(managers), size)]
