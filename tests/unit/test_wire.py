"""What every gRPC call has in common."""

from __future__ import annotations

import socket

import pytest

from lightkeeper.cli.calls import call
from lightkeeper.protos import lighthouse_pb2
from lightkeeper.wire import plain_details

CONNECT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: Failed to connect to remote host: "


@pytest.mark.parametrize(
    ("details", "plain"),
    [
        (CONNECT + "Connection refused", "connection refused"),
        (CONNECT + "connect: No route to host (113)", "no route to host"),
        (CONNECT + "Timeout occurred: FD Shutdown", "timeout occurred"),
        ("DNS resolution failed for a:1: C-ares status is not ARES_SUCCESS", "its name cannot be resolved"),
        ("errors resolving a:1: [field:hostname lookup error:Domain name not found]", "its name cannot be resolved"),
        ("Socket closed", "Socket closed"),
        (None, "no details"),
    ],
)
def test_details_are_said_as_a_person_says_them(details: str | None, plain: str) -> None:
    assert plain_details(details) == plain


def test_the_library_words_a_refused_connection_as_is_expected_here() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        said = call("Lighthouse", "Status", address, lighthouse_pb2.StatusRequest(), "j", "t")
    assert (said.nobody, said.details) == (True, "connection refused")
