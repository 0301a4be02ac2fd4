"""One call to a lighthouse or a manager, for the commands of an operator."""

from __future__ import annotations

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
