"""Rendezvous keys over gRPC: served to other managers, fetched from the manager of slot 0 for our ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from lightkeeper.lighthouse.fields import to_wire
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager import local
from lightkeeper.manager.keys import KeyRefused, Keys
from lightkeeper.manager.machine import GroupMachine
from lightkeeper.protos import manager_pb2, manager_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, JOB_KEY, authorised, metadata

CALL_SLACK_S = 5.0


class KeyService(manager_pb2_grpc.ManagerServicer):
    """Serves the keys held here to the other managers of the job, and this group's state to an operator.

    Args:
        token: the job's token.
        job: the job's id.
        unauthorised: told of a caller without the token: its address and what it wanted.
        state: gives a `GroupStateReply`.
    """

    def __init__(
        self, token: str, job: str, unauthorised: Callable[[str, str], None], state: Callable[[], Any]
    ) -> None:
        self.token, self.job, self.unauthorised, self.state = token, job, unauthorised, state
        self.keys = Keys()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        manager_pb2_grpc.add_ManagerServicer_to_server(self, server)

    async def SetKey(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Sets a key of an epoch."""
        await self._authorise(context, "SetKey")
        try:
            self.keys.set(request.epoch.number, request.key, request.value)
        except KeyRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return manager_pb2.SetKeyReply()

    async def GetKey(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Waits for a key of an epoch."""
        await self._authorise(context, "GetKey")
        try:
            value = await self.keys.get(request.epoch.number, request.key, request.timeout_ms / 1000)
        except KeyRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"key {request.key!r} was not set in time")
        return manager_pb2.GetKeyReply(value=value)

    async def GroupState(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """What an operator sees of this group while no lighthouse answers."""
        await self._authorise(context, "GroupState")
        return self.state()

    async def _authorise(self, context: grpc.aio.ServicerContext, what: str) -> None:
        carried = context.invocation_metadata()
        if not authorised(carried, self.token):
            self.unauthorised(context.peer(), what)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
        if dict(carried or ()).get(JOB_KEY) != self.job:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"this is a manager of job {self.job!r}")


class RemoteKeys:
    """Answers our ranks: a key lies with the manager of slot 0 of its epoch, which may be this one.

    What the ranks of this group publish for each other alone stays here.
    """

    def __init__(self, token: str, job: str, own: KeyService, machine: GroupMachine) -> None:
        self.metadata = metadata(token, job)
        self.own, self.machine = own.keys, machine
        self.within = Keys()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, message: local.SetKey | local.GetKey, answer: Callable[[local.Key], None]) -> None:
        """Starts to answer one request of a rank."""
        task = asyncio.create_task(self._serve(message, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends pending requests and channels."""
        for task in tuple(self._tasks):
            task.cancel()
        for channel in self._channels.values():
            await channel.close()

    async def _serve(self, message: local.SetKey | local.GetKey, answer: Callable[[local.Key], None]) -> None:
        try:
            value = await self._ask(message)
        except (KeyRefused, TimeoutError, grpc.aio.AioRpcError) as error:
            line = (
                (error.details() or "no details")
                if isinstance(error, grpc.aio.AioRpcError)
                else str(error) or "not set in time"
            )
            answer(local.Key(request=message.request, error=line))
        else:
            answer(local.Key(request=message.request, value=value))

    async def _ask(self, message: local.SetKey | local.GetKey) -> bytes:
        timeout_s = message.timeout_ms / 1000
        if message.epoch == local.OWN_KEYS:
            return await _held(self.within, message, timeout_s)
        membership = self._membership(message.epoch)
        holder = membership.members[0]
        if holder.incarnation == self.machine.incarnation:
            return await _held(self.own, message, timeout_s)
        stub: Any = manager_pb2_grpc.ManagerStub(self._channel(holder.manager))
        epoch = to_wire(membership.epoch)
        if isinstance(message, local.SetKey):
            setting = manager_pb2.SetKeyRequest(epoch=epoch, key=message.key, value=message.value)
            await stub.SetKey(setting, metadata=self.metadata, timeout=timeout_s)
            return b""
        asking = manager_pb2.GetKeyRequest(epoch=epoch, key=message.key, timeout_ms=message.timeout_ms)
        reply = await stub.GetKey(asking, metadata=self.metadata, timeout=timeout_s + CALL_SLACK_S)
        return bytes(reply.value)

    def _membership(self, epoch: int) -> Membership:
        for membership in (self.machine.known, *self.machine.prepared):
            if membership is not None and membership.epoch.number == epoch:
                return membership
        raise KeyRefused(f"epoch {epoch} is not in force here")

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]


async def _held(keys: Keys, message: local.SetKey | local.GetKey, timeout_s: float) -> bytes:
    if isinstance(message, local.SetKey):
        keys.set(message.epoch, message.key, message.value)
        return b""
    return await keys.get(message.epoch, message.key, timeout_s)
