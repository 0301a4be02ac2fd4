"""One call to a lighthouse or a manager, for the commands of an operator."""

from __future__ import annotations

import getpass
import socket
from dataclasses import dataclass
from typing import Any

ANSWER_S_MAX = 5.0


@dataclass(frozen=True)
class Said:
    """What came of a call.

    Attributes:
        address: who was asked.
        reply: the answer, None if there is none.
        code: name of the gRPC status, "" with an answer.
        details: why there is no answer.
    """

    address: str
    reply: Any = None
    code: str = ""
    details: str = ""

    @property
    def nobody(self) -> bool:
        """Whether nobody is there (any other error is somebody's answer)."""
        return self.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")

    def why_not(self, refused: str = "") -> str:
        """For the operator: that nobody is there, or what the lighthouse says instead of doing it.

        Args:
            refused: the reason in its answer, if it answered.
        """
        if self.nobody:
            return f"no lighthouse answers at {self.address}: {self.details}"
        return f"the lighthouse at {self.address} says: {self.details if self.reply is None else refused}"


def operator() -> str:
    """Who calls, as the lighthouse is told: ``ann@login3``."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def call(service: str, method: str, address: str, request: Any, job: str, token: str) -> Said:
    """Calls `method` of the `service` ("Lighthouse" or "Manager") at an address, for at most 5 seconds."""
    import grpc

    from lightkeeper.protos import lighthouse_pb2_grpc, manager_pb2_grpc
    from lightkeeper.wire import CHANNEL_OPTIONS, metadata, plain_details

    stubs = {"Lighthouse": lighthouse_pb2_grpc.LighthouseStub, "Manager": manager_pb2_grpc.ManagerStub}
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            ask = getattr(stubs[service](channel), method)
            return Said(address, ask(request, timeout=ANSWER_S_MAX, metadata=metadata(token, job)))
        except grpc.RpcError as error:
            return Said(address, None, error.code().name, plain_details(error.details()))
