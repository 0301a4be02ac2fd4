"""The manager's stream to the lighthouse: found, lost, found again, refused, and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from lightkeeper.errors import UsageError
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.log import LighthouseLog
from lightkeeper.lighthouse.machine import Bounds
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term
from lightkeeper.lighthouse.service import LighthouseService, add_to
from lightkeeper.manager.link import OUTBOX_MAX, LighthouseLink
from lightkeeper.manager.machine import GroupMachine
from lightkeeper.manager.settings import Settings
from lightkeeper.wire import SERVER_OPTIONS

BOUND_S = 60.0
TOKEN = "secret"
HELLO = m.Hello("job", "g0", "g0-i1", "127.0.0.1:1", 1, 1)


class End:
    """A link with everything it called noted down."""

    def __init__(self, address: str, token: str = TOKEN, hello: m.Hello = HELLO) -> None:
        self.hello = hello
        self.calls: list[str] = []
        self.places: list[int] = []
        self.heard: list[Any] = []
        self.said: list[str] = []
        self.link = LighthouseLink(
            address, token, "job", self.connected, self.disconnected, self.heard.append, self.said.append
        )

    def connected(self, place: int) -> None:
        self.calls.append("connected")
        self.places.append(place)
        self.link.put(self.hello)

    def disconnected(self) -> None:
        self.calls.append("disconnected")


async def start(port: int = 0, say: Callable[[str], None] = lambda line: None) -> tuple[Any, LighthouseService, int]:
    service = LighthouseService(LighthouseLog(None), Bounds(2.0, 0.1), TOKEN, None, say)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    _servers.append(server)
    add_to(server, service)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, service, port


_servers: list[Any] = []


def scene(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it; a server that is not stopped, because the test has failed, would keep the interpreter from ending."""

    async def go() -> None:
        try:
            await asyncio.wait_for(coroutine(), BOUND_S)
        finally:
            await asyncio.gather(*(server.stop(grace=0) for server in _servers))
            _servers.clear()

    asyncio.run(go())


async def until(condition: Callable[[], Any], what: str) -> None:
    try:
        async with asyncio.timeout(BOUND_S / 2):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None


@contextlib.asynccontextmanager
async def running(end: End) -> Any:
    task = asyncio.create_task(end.link.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def free_port() -> int:
    """Below those that outgoing connections take: one that is tried again and again may meet itself there."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def test_it_connects_says_hello_and_hands_on_what_it_hears() -> None:
    async def go() -> None:
        server, service, port = await start()
        end = End(f"127.0.0.1:{port}")
        async with running(end):
            await until(lambda: end.heard, "no welcome")
            assert isinstance(end.heard[0], m.Welcome) and end.calls == ["connected"] and not end.said
            assert service.jobs["job"].groups["g0"].in_touch
        await server.stop(grace=0)

    scene(go)


def test_it_says_once_that_nobody_is_there_names_the_address_and_says_when_it_is_back() -> None:
    async def go() -> None:
        port = free_port()
        end = End(f"127.0.0.1:{port}")
        async with running(end):
            await until(lambda: end.calls.count("disconnected") >= 3, "it does not try again")
            where = f"the lighthouse at 127.0.0.1:{port} is not reachable (connection refused)"
            assert end.said == [f"{where}; trying again"] and not end.heard
            server, _, _ = await start(port)
            await until(lambda: end.heard, "it does not find the lighthouse that came")
            assert end.said[1:] == [f"the lighthouse at 127.0.0.1:{port} is back"]
            await server.stop(grace=0)
            await until(lambda: len(end.said) == 3, "it does not say that the lighthouse is gone again")

    scene(go)


def test_a_lighthouse_that_lost_its_log_learns_from_it_who_the_members_were() -> None:
    """Its hello names the epoch alone; to one that does not know it, it is said again in full."""

    async def go() -> None:
        members = tuple(Member(f"g{i}", f"g{i}-i1", f"127.0.0.1:{i}") for i in range(3))
        known = Membership(Epoch(7, Term(2, "lost")), members)
        server, service, port = await start()
        hello = m.Hello("job", "g0", "g0-i1", "127.0.0.1:0", 3, 1, acknowledged=Term(2, "lost"), known=known)
        end = End(f"127.0.0.1:{port}", hello=hello)
        async with running(end):
            await until(lambda: end.heard, "no welcome")
            assert service.jobs["job"].newest == known and end.calls == ["connected", "disconnected", "connected"]
            other = End(f"127.0.0.1:{port}", hello=replace(hello, group="g1", incarnation="g1-i1"))
            async with running(other):
                await until(lambda: other.heard, "no welcome")
                assert other.calls == ["connected"], "what one has told it, it knows"
        await server.stop(grace=0)

    scene(go)


def test_after_a_broken_stream_it_begins_anew_with_hello() -> None:
    async def go() -> None:
        server, _, port = await start()
        end = End(f"127.0.0.1:{port}")
        async with running(end):
            await until(lambda: end.heard, "no welcome")
            await server.stop(grace=0)
            await until(lambda: "disconnected" in end.calls, "it does not see the end of the stream")
            end.link.put(m.Leave("nobody hears this"))  # there is no stream: dropped
            server, service, _ = await start(port)
            await until(lambda: len(end.heard) >= 2, "no second welcome")
            assert end.calls[:2] == ["connected", "disconnected"] and end.calls[-1] == "connected"
            assert service.jobs["job"].groups["g0"].leaving == ""
        await server.stop(grace=0)

    scene(go)


def test_a_refused_token_ends_it_with_the_reason() -> None:
    async def go() -> None:
        server, _, port = await start()
        end = End(f"127.0.0.1:{port}", token="wrong")
        async with running(end) as task:
            await asyncio.wait_for(task, BOUND_S / 2)
        assert end.link.denied == f"the lighthouse at 127.0.0.1:{port} refused our token: wrong or missing token"
        await server.stop(grace=0)

    scene(go)


def test_flush_ends_the_stream_after_what_was_queued() -> None:
    async def go() -> None:
        lines: list[str] = []
        server, service, port = await start(say=lines.append)
        end = End(f"127.0.0.1:{port}")
        async with running(end) as task:
            await until(lambda: end.heard, "no welcome")
            end.link.put(m.Died("rank 0 was killed by SIGKILL", 0, "reduce", 3))
            await end.link.flush(BOUND_S / 2)
            assert task.done(), "it must not connect again"
            await until(lambda: any("killed by SIGKILL" in line for line in lines), "the last words did not arrive")
            await until(lambda: not service.streams, "the stream did not end")
        await server.stop(grace=0)

    scene(go)


def test_flush_without_a_stream_returns_at_once() -> None:
    async def go() -> None:
        await End("127.0.0.1:1").link.flush(BOUND_S)

    scene(go)


def test_flush_to_a_lighthouse_that_reads_nothing_is_bounded() -> None:
    """The address takes the connection and never answers: the outbox fills up with beats."""

    async def go() -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            end = End(f"127.0.0.1:{deaf.getsockname()[1]}")
            async with running(end):
                await until(lambda: end.calls == ["connected"], "it does not try")
                for step in range(2 * OUTBOX_MAX):
                    end.link.put(m.Beat(1, step, "compute"))
                await end.link.flush(0.1)

    scene(go)


def test_a_machine_behind_a_link_that_reaches_nobody_gives_up_after_its_budget() -> None:
    """Link and machine together, with the machine's clock ten times as fast."""

    async def go() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()

        def now() -> float:
            return (loop.time() - begun) * 10

        settings = Settings(lighthouse=f"127.0.0.1:{free_port()}", token=TOKEN, outage_budget_s=10)
        machine = GroupMachine(settings, "g0-i1", "127.0.0.1:1", now())
        end = End(settings.lighthouse)
        end.link.connected = lambda place: machine.connected(now(), place) and None
        end.link.disconnected = lambda: machine.disconnected(now()) and None
        async with running(end):
            while machine.ending is None:
                machine.tick({}, now())
                assert now() < 300, "it tries for ever"
                await asyncio.sleep(0.01)
        assert (
            machine.ending
            == f"the lighthouse at {settings.lighthouse} could not be reached for 10 s; start this group again"
        )

    scene(go)


def test_it_goes_on_to_the_next_address_and_says_so_once() -> None:
    async def go() -> None:
        server, _, port = await start()
        away = f"127.0.0.1:{free_port()}"
        end = End(f"{away},127.0.0.1:{port}")
        async with running(end):
            await until(lambda: end.heard, "it does not try the second")
            assert end.places == [1, 2]
            assert [line.rpartition(")")[2] for line in end.said[:1]] == [f"; trying 127.0.0.1:{port} and again"]
            assert end.said[1:] == [f"the lighthouse at 127.0.0.1:{port} is back"]
        await server.stop(grace=0)

    scene(go)


def test_who_is_sent_on_comes_back_after_the_others() -> None:
    async def go() -> None:
        here, service, port = await start()
        there, other, port2 = await start()
        end = End(f"127.0.0.1:{port},127.0.0.1:{port2}")
        end.connected = lambda place: (
            end.places.append(place)
            or end.link.put(  # type: ignore[method-assign,func-returns-value]
                m.Hello("job", "g0", "g0-i1", "127.0.0.1:1", 2, 1, place=place)
            )
        )
        end.link.connected = end.connected
        async with running(end):
            await until(lambda: len(end.places) >= 4, "it is not sent on")
            assert end.places[:4] == [1, 2, 1, 2]
            assert {message.reason for message in end.heard if isinstance(message, m.Refused)} == {
                "standby: it knows no such job, and begins one once it has heard 1 more group"
            }
            assert len(end.said) == 2 and all("does not take this group now: standby" in line for line in end.said)
            assert all("g0" in one.jobs["job"].visits and not one.jobs["job"].groups for one in (service, other))
        await here.stop(grace=0)
        await there.stop(grace=0)

    scene(go)


def test_who_accepts_and_says_nothing_is_left_for_the_next(monkeypatch: Any) -> None:
    monkeypatch.setattr("lightkeeper.manager.link.ANSWER_S_MAX", 0.2)

    async def go() -> None:
        server, _, port = await start()
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            end = End(f"127.0.0.1:{deaf.getsockname()[1]},127.0.0.1:{port}")
            async with running(end):
                await until(lambda: end.heard, "it waits for ever at one that says nothing")
        await server.stop(grace=0)

    scene(go)


def test_a_name_is_resolved_anew_for_every_connection(monkeypatch: Any) -> None:
    """Each connection has a channel of its own, none of which remembers what a name stood for."""
    made: list[str] = []
    real = grpc.aio.insecure_channel

    def channel(address: str, **more: Any) -> Any:
        made.append(address)
        assert ("grpc.use_local_subchannel_pool", 1) in more["options"]
        return real(address, **more)

    monkeypatch.setattr(grpc.aio, "insecure_channel", channel)

    async def go() -> None:
        port = free_port()
        end = End(f"localhost:{port}")
        async with running(end):
            await until(lambda: len(made) >= 3, "it does not connect again")
        assert set(made) == {f"localhost:{port}"}

    scene(go)


def test_a_file_that_names_another_lighthouse_is_followed(tmp_path: Any) -> None:
    async def go() -> None:
        file = tmp_path / "at"
        first, _, port = await start()
        second, _, port2 = await start()
        file.write_text(f"127.0.0.1:{port}")
        end = End(f"file:{file}")
        async with running(end):
            await until(lambda: end.heard, "no welcome")
            file.write_text(f"127.0.0.1:{port2}\n")
            await first.stop(grace=0)
            await until(lambda: len(end.heard) >= 2, "it does not read the file again")
            assert end.said[-1] == f"the lighthouse at 127.0.0.1:{port2} has taken this group in"
        await second.stop(grace=0)

    scene(go)


def test_flush_tells_whether_the_lighthouse_has_read_it_all() -> None:
    async def go() -> None:
        server, _, port = await start()
        end = End(f"127.0.0.1:{port}")
        async with running(end):
            await until(lambda: end.heard, "no welcome")
            assert await end.link.flush(BOUND_S / 2)
        await server.stop(grace=0)
        nobody = End(f"127.0.0.1:{port}")
        async with running(nobody):
            await until(lambda: "disconnected" in nobody.calls, "it does not try")
            assert not await nobody.link.flush(0.1)

    scene(go)


def test_a_link_that_follows_another_goes_on_with_its_addresses_though_the_file_is_gone(tmp_path: Any) -> None:
    """A group that has ended and stays to say so makes a new one."""
    file = tmp_path / "at"
    file.write_text("127.0.0.1:29401\n")
    first = End(f"file:{file}")
    file.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        End(f"file:{file}")
    calls = (first.connected, first.disconnected, first.heard.append, first.said.append)
    again = LighthouseLink(f"file:{file}", TOKEN, "job", *calls, first.link.addresses)
    again.addresses.read()
    assert again.addresses.at == "127.0.0.1:29401" and "going on with 127.0.0.1:29401" in first.said[-1]
