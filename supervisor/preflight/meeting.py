"""Where the nodes meet: a small gRPC service in node 0's process, and a node's end of it.

Everything is JSON, under the job's token; nothing is unpickled. It holds `Gathering`, and the keys over which a
process group forms, so that no torch store has to listen anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.preflight.gathering import Gathering, Refused
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.wire import CHANNEL_OPTIONS, SERVER_OPTIONS, authorised, metadata, plain_details, split_address

SERVICE = "lightkeeper.Preflight"
WAIT_S_MAX = 120.0
GRACE_S = 5.0  # beyond what a call was to take at most
RETRY_S = 0.2
KEY_BYTES_MAX = 64 * 1024
START_S = 10.0
STOP_S = 2.0  # for the last answers to leave


class MeetingLost(RuntimeError):
    """Nobody answers where the nodes meet."""


class LeftOut(RuntimeError):
    """The others have gone on without this node, or do not let it in."""


@dataclass(frozen=True)
class Heard:
    """What the nodes said on a topic.

    Attributes:
        values: by node rank.
        missing: who was expected and said nothing in time.
    """

    values: dict[int, Any]
    missing: tuple[int, ...]


class _Service:
    def __init__(self, nnodes: int, token: str) -> None:
        self._gathering, self._token = Gathering(nnodes), token
        self._keys: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def handle(self, method: str, request: bytes, context: Any) -> bytes:
        import grpc

        if not authorised(context.invocation_metadata(), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's token is missing or another one")
        try:
            asked = json.loads(request)
            answer = await getattr(self, f"_{method}")(asked)
        except Refused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (KeyError, TypeError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")
        return json.dumps(answer | {"wall": time.time()}).encode()

    async def _exchange(self, asked: dict[str, Any]) -> dict[str, Any]:
        topic, node = str(asked["topic"]), int(asked["node"])
        until = time.monotonic() + min(float(asked["wait_s"]), WAIT_S_MAX)
        async with self._changed:
            self._gathering.say(node, str(asked["start"]), topic, asked["value"], asked["nodes"], until)
            self._changed.notify_all()
            while (heard := self._gathering.look(topic, time.monotonic())) is None:
                left = self._gathering.until(topic) - time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, left)):
                        await self._changed.wait()
            return {"values": heard, "missing": self._gathering.missing(topic), "absent": self._gathering.absent}

    async def _set(self, asked: dict[str, Any]) -> dict[str, Any]:
        value = base64.b64decode(asked["value"])
        if len(value) > KEY_BYTES_MAX or len(self._keys) > KEY_BYTES_MAX:
            raise ValueError("a key is too large, or there are too many")
        async with self._changed:
            self._keys[str(asked["key"])] = value
            self._changed.notify_all()
        return {}

    async def _get(self, asked: dict[str, Any]) -> dict[str, Any]:
        key, until = str(asked["key"]), time.monotonic() + min(float(asked["wait_s"]), WAIT_S_MAX)
        async with self._changed:
            while key not in self._keys:
                left = until - time.monotonic()
                if left <= 0:
                    return {"value": None}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
            return {"value": base64.b64encode(self._keys[key]).decode()}

    async def _clock(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {}


class Meeting:
    """Node 0's service, in a thread of its own.

    Args:
        request: what is asked; its `rendezvous` is where this listens.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meeting", daemon=True)
        self._server: Any = None

    def start(self) -> None:
        """Listens.

        Raises:
            UsageError: it cannot.
        """
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_S)

    async def _start(self) -> None:
        import grpc

        service = _Service(self._request.nnodes, self._request.token)
        handlers: dict[str, Any] = {}
        for method in ("exchange", "set", "get", "clock"):

            async def handle(request: bytes, context: Any, method: str = method) -> bytes:
                return await service.handle(method, request, context)

            handlers[method] = grpc.unary_unary_rpc_method_handler(handle)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self._server.add_insecure_port(self._request.rendezvous)
        except RuntimeError as error:
            raise UsageError(f"--rendezvous {self._request.rendezvous}: node 0 cannot listen there") from error
        await self._server.start()

    def stop(self) -> None:
        """Ends, once the answers that are being given have left."""
        asyncio.run_coroutine_threadsafe(self._server.stop(STOP_S), self._loop).result(2 * STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


class Place:
    """A node's end of the meeting; also the keys over which its process groups form (`groups.KeyValue`).

    Args:
        request: what is asked.
        prefix: before the keys.
    """

    def __init__(self, request: Request, prefix: str = "") -> None:
        import grpc

        host, port = split_address(request.rendezvous)
        self._request, self._prefix = request, prefix
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)

    def exchange(self, topic: str, value: Any, wait_s: float, nodes: Iterable[int] | None = None) -> Heard:
        """Says something, and hears what the others say; the answer is the same for all.

        Args:
            topic: what it is about.
            value: JSON.
            wait_s: for how long after the first of them somebody may come.
            nodes: who is expected; None: all who have not been missing yet.

        Raises:
            MeetingLost: nobody answers.
            LeftOut: this node came too late, or is not let in.
        """
        heard = self._call("exchange", wait_s, topic=topic, value=value, wait_s=wait_s, nodes=_listed(nodes))
        node = self._request.node_rank
        values = {int(one): said for one, said in heard["values"].items()}
        if node not in values:
            absent = heard["absent"].get(str(node))
            since = f"they waited for it in vain at {absent!r}" if absent else f"it came too late to {topic!r}"
            raise LeftOut(f"the others have gone on without this node: {since}")
        return Heard(values, tuple(heard["missing"]))

    def ahead_s(self, tries: int = 5) -> float:
        """By how many seconds this node's clock is ahead of node 0's, by the quickest of some tries.

        Raises:
            MeetingLost: nobody answers.
        """
        best = (float("inf"), 0.0)
        for _ in range(tries):
            sent, began = time.time(), time.monotonic()
            wall = self._call("clock", 0.0)["wall"]
            took = time.monotonic() - began
            best = min(best, (took, sent + took / 2 - wall))
        return best[1]

    def set(self, key: str, value: bytes) -> None:
        """Publishes a key of a process group that forms."""
        self._call("set", 0.0, key=self._prefix + key, value=base64.b64encode(value).decode())

    def get(self, key: str, timeout_s: float) -> bytes:
        """A key of such a group.

        Raises:
            TimeoutError: nobody set it in time.
        """
        value = self._call("get", timeout_s, key=self._prefix + key, wait_s=timeout_s)["value"]
        if value is None:
            raise TimeoutError(f"nobody has set {self._prefix + key!r} for {timeout_s:g} s")
        return base64.b64decode(value)

    def abort(self, reason: str) -> None:
        """Nothing: whoever waits here has a bound of seconds, and is killed with its check."""

    def _call(self, method: str, within_s: float, **asked: Any) -> dict[str, Any]:
        import grpc

        told = {"node": self._request.node_rank, "start": self._request.start, **asked}
        ask: Any = self._channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            answer = ask(
                json.dumps(told).encode(),
                timeout=within_s + GRACE_S,
                metadata=metadata(self._request.token, "preflight"),
            )
        except grpc.RpcError as error:
            text = plain_details(error.details())
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise MeetingLost(f"nobody answers at {self._request.rendezvous}: {text}") from error
            raise LeftOut(f"{self._request.rendezvous} says: {text}") from error
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def _listed(nodes: Iterable[int] | None) -> list[int] | None:
    return None if nodes is None else sorted(nodes)
