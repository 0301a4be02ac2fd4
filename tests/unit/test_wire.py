"""What every gRPC call has in common."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc.aio
import pytest

from lightkeeper.cli.calls import call
from lightkeeper.protos import lighthouse_pb2
from lightkeeper.wire import CHANNEL_OPTIONS, SERVER_OPTIONS, plain_details

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


def test_a_server_that_is_slow_to_answer_is_reached() -> None:
    """One attempt lasts longer than the pause between two: on a busy machine no answer comes within the pause."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def go() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pass_on(reader, forth, 0.0), pass_on(back, writer, 0.5))

        slow = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"127.0.0.1:{slow.sockets[0].getsockname()[1]}"
        async with slow, grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            await asyncio.wait_for(channel.channel_ready(), 15)
        await server.stop(grace=0)

    asyncio.run(go())
