"""Whether a group's job trains already: asked of a lighthouse over real gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from lightkeeper.checkpoint.running import who_trains
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc
from lightkeeper.wire import authorised


class Told(lighthouse_pb2_grpc.LighthouseServicer):
    """Answers with what a test gives it."""

    def __init__(self) -> None:
        self.groups: list[tuple[str, str]] = []
        self.stopped = ""

    def Status(self, request: Any, context: grpc.ServicerContext) -> Any:
        carried = dict(context.invocation_metadata())
        assert authorised(carried.items(), "secret") and "j" in carried.values()
        reply = lighthouse_pb2.StatusReply(job="j", stopped=self.stopped)
        for group, state in self.groups:
            reply.groups.add(group=group, state=state)
        return reply


@pytest.fixture
def served() -> Iterator[tuple[Told, Settings]]:
    """A lighthouse, and what g0 is told."""
    told, server = Told(), grpc.server(ThreadPoolExecutor(1))
    lighthouse_pb2_grpc.add_LighthouseServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield told, Settings(lighthouse=f"127.0.0.1:1,127.0.0.1:{port}", job="j", group="g0", groups=2, token="secret")
    server.stop(0).wait()


@pytest.mark.parametrize("state", ["member", "spare", "member, leaving"])
def test_another_member_trains(served: tuple[Told, Settings], state: str) -> None:
    told, settings = served
    told.groups = [("g0", "joining"), ("g1", state)]
    assert who_trains(settings) == "g1"


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [("g0", "member")],  # only this one's former self
        [("g0", "joining"), ("g1", "joining")],  # the job begins
        [("g1", "member, not in touch")],
        [("g1", "gone: its machine was lost")],
        [("g1", "parked")],
    ],
)
def test_nobody_trains(served: tuple[Told, Settings], groups: list[tuple[str, str]]) -> None:
    told, settings = served
    told.groups = groups
    assert who_trains(settings) == ""


def test_a_job_that_has_ended_does_not_train(served: tuple[Told, Settings]) -> None:
    told, settings = served
    told.groups, told.stopped = [("g1", "member")], "finished at step 9"
    assert who_trains(settings) == ""


@pytest.mark.parametrize("lighthouse", ["127.0.0.1:1", "file:/nowhere/at/all"])
def test_nobody_answers(lighthouse: str) -> None:
    assert who_trains(Settings(lighthouse=lighthouse, groups=2)) is None
