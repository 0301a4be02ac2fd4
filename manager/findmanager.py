"""Where the manager of a group listens: as it was told, or as a lighthouse knows it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from lightkeeper.manager.addresses import Reader
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS, metadata, plain_details

ANSWER_S_MAX = 3.0  # who accepts and says nothing is not there


class Denied(Exception):
    """Our token was refused."""


class ManagerFinder:
    """Looks for the manager of the group's newest incarnation.

    Args:
        settings: what the group was told.

    Attributes:
        why: why none was found, in words.
        nobody: whether that is since no lighthouse answers.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.why, self.nobody = "", False
        self._reader = Reader(settings.lighthouse)

    async def find(self) -> str | None:
        """Its address, ``host:port``; None if nobody knows one now.

        Raises:
            Denied: if a lighthouse refuses our token.
        """
        if self.settings.manager:
            return self.settings.manager
        try:
            addresses = await asyncio.to_thread(self._reader.read)
        except ValueError as error:
            self.why, self.nobody = f"lighthouse: {error}", True
            return None
        self.nobody, reasons = True, []
        for address in addresses:
            found = await self._ask(address)
            if found:
                return found
            reasons.append(self.why)
        self.why = "; ".join(reasons)
        return None

    async def _ask(self, address: str) -> str:
        s = self.settings
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = lighthouse_pb2_grpc.LighthouseStub(channel)
            request = lighthouse_pb2.FindManagerRequest(group=s.group)
            try:
                reply = await stub.FindManager(request, metadata=metadata(s.token, s.job), timeout=ANSWER_S_MAX)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    raise Denied(f"the lighthouse at {address} refused our token: {error.details()}") from error
                self.why = f"the lighthouse at {address} is not reachable ({plain_details(error.details())})"
                return ""
        self.nobody = False
        self.why = f"the lighthouse at {address} knows no manager of {s.group} that lives"
        return str(reply.manager)
