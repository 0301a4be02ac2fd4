"""The lighthouse over real gRPC on the loopback: who gets in, what a bad stream costs, and what is never said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from lighthouse_served import ENDED, TOKEN, Speaker, hello, scene, serving

from lightkeeper.errors import UsageError
from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated
from lightkeeper.lighthouse.codec import unwrap
from lightkeeper.lighthouse.log import LighthouseLog
from lightkeeper.lighthouse.main import Options, run
from lightkeeper.lighthouse.service import (
    MESSAGES_AT_ONCE_MAX,
    MESSAGES_PER_S_MAX,
    OUTBOX_MAX,
    Stream,
)
from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc
from lightkeeper.wire import MESSAGE_BYTES_MAX, TOKEN_KEY, metadata

JOIN = m.Join(("127.0.0.1:2",), {"w": "float32[2]"})


async def in_epoch(speaker: Speaker) -> m.Activate:
    """A job of one group starts."""
    await speaker.say(hello(), JOIN)
    prepare = await speaker.hears(m.Prepare)
    await speaker.say(m.Promise(prepare.epoch, None, (), None, (), 4))
    return await speaker.hears(m.Activate)


def test_a_job_starts_over_the_wire() -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as a, Speaker(served.address) as b:
            for name, speaker in (("g0", a), ("g1", b)):
                await speaker.say(hello(name, groups=2), JOIN)
                welcome = await speaker.hears(m.Welcome)
                assert (welcome.lease_ms, welcome.beat_ms) == (2000, 100) and welcome.term == served.service.log.term
            for speaker in (a, b):
                prepare = await speaker.hears(m.Prepare)
                await speaker.say(m.Promise(prepare.epoch, None, (), None, (), 4))
            activates = [await speaker.hears(m.Activate) for speaker in (a, b)]
            assert activates[0].membership == activates[1].membership
            assert activates[0].membership.groups == ("g0", "g1")
            said = [[(share.group, share.microbatches) for share in activate.shares] for activate in activates]
            assert said == [[("g0", (0, 1))], [("g1", (2, 3))]], "to each its own"

    scene(go)


@pytest.mark.parametrize("token", ["wrong", "", None])
def test_a_wrong_or_missing_token_is_refused_and_noted(tmp_path: Path, token: str | None) -> None:
    async def go() -> None:
        events = EventLog(tmp_path, "lighthouse")
        async with serving(events=events) as served, Speaker(served.address, token) as speaker:
            assert await speaker.ends() == grpc.StatusCode.UNAUTHENTICATED
            stub: Any = lighthouse_pb2_grpc.LighthouseStub(speaker.channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Status(
                    lighthouse_pb2.StatusRequest(), metadata=metadata(token, "job") if token is not None else ()
                )
            assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert not served.service.jobs and not served.service.streams
            assert [line.split(": ")[-1] for line in served.said] == ["wrong or missing token"] * 2
            events.close() if hasattr(events, "close") else None

    scene(go)
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    refused = [line for line in lines if line["kind"] == "unauthorised"]
    assert [line["what"] for line in refused] == ["Session", "Status"] and all(line["peer"] for line in refused)


async def misbehave(what: str, address: str) -> Speaker:
    """Opens a stream and does something that no manager does."""
    speaker = Speaker(address)
    if what == "an empty message":
        await speaker.call.write(lighthouse_pb2.FromManager())
    elif what == "not a hello first":
        await speaker.say(m.Leave("too early"))
    elif what == "a message without its epoch":
        await speaker.say(hello("bad", 9))
        envelope = lighthouse_pb2.FromManager()
        envelope.promise.SetInParent()
        await speaker.call.write(envelope)
    elif what == "garbage":
        call = speaker.channel.stream_stream("/lightkeeper.v1.Lighthouse/Session")(metadata=metadata(TOKEN, "job"))
        speaker.call.cancel()
        speaker.call = call
        await call.write(b"\xff\xff\xff\xff not a message")
    else:
        await speaker.channel.close()
        speaker = Speaker(address, options=(("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)))
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await speaker.say(hello("x" * (MESSAGE_BYTES_MAX + 1)))
    return speaker


BAD = ["an empty message", "not a hello first", "a message without its epoch", "garbage", "a message that is too large"]


@pytest.mark.parametrize("what", BAD)
def test_a_stream_that_misbehaves_is_closed_and_no_other(what: str) -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as good:
            activate = await in_epoch(good)
            bad = await misbehave(what, served.address)
            async with bad:
                await bad.ends()
            while len(served.service.streams) > 1:
                await asyncio.sleep(0.01)
            await good.say(m.Query(activate.membership.epoch))
            assert (await good.hears(m.Stands)).epoch == activate.membership.epoch
            assert served.ticks is not None and not served.ticks.done()
            assert served.service.jobs["job"].newest == activate.membership

    scene(go)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (BAD[0], "malformed message (empty message)"),
        (BAD[1], "did not begin with a hello"),
        (BAD[2], "Promise without epoch"),
    ],
)
def test_the_operator_is_told_of_it_in_one_line(what: str, line: str) -> None:
    async def go() -> None:
        async with serving() as served, await misbehave(what, served.address) as bad:
            await bad.ends()
            assert any(line in said and "its stream is closed" in said and "\n" not in said for said in served.said)

    scene(go)


def test_a_stream_that_breaks_is_told_to_the_machine() -> None:
    async def go() -> None:
        async with serving() as served:
            async with Speaker(served.address) as speaker:
                await in_epoch(speaker)
                group = served.service.jobs["job"].groups["g0"]
                assert group.in_touch
            while group.in_touch:
                await asyncio.sleep(0.01)
            assert group.gone is None

    scene(go)


def test_jobs_on_one_lighthouse_do_not_meet() -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as a, Speaker(served.address) as b:
            first = await in_epoch(a)
            await b.say(m.Hello("other", "g0", "x", "127.0.0.1:1", 1, 1), JOIN)
            prepare = await b.hears(m.Prepare)
            assert prepare.epoch.number == 1 == first.membership.epoch.number
            assert set(served.service.jobs) == {"job", "other"}
            await a.say(m.Query(first.membership.epoch))
            assert await a.hears(m.Stands)

    scene(go)


def test_status_shows_the_job_and_names_the_jobs_there_are() -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as speaker:
            await in_epoch(speaker)
            await speaker.say(m.Beat(1, 7, "compute"), m.Query(served.service.jobs["job"].newest.epoch))
            await speaker.hears(m.Stands)
            stub: Any = lighthouse_pb2_grpc.LighthouseStub(speaker.channel)
            reply = await stub.Status(lighthouse_pb2.StatusRequest(), metadata=metadata(TOKEN, "job"))
            (group,) = reply.groups
            assert (group.group, group.state, group.phase, group.step) == ("g0", "member", "compute", 7)
            assert reply.membership.epoch.number == 1 and not reply.waiting and not reply.stopped
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Status(lighthouse_pb2.StatusRequest(), metadata=metadata(TOKEN, "nope"))
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND
            assert raised.value.details() == "no job 'nope' here; jobs: job"

    scene(go)


def test_the_operator_may_ask_what_a_word_would_mean_and_be_refused() -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as g0, Speaker(served.address) as g1:
            for speaker, group in ((g0, "g0"), (g1, "g1")):
                await speaker.say(hello(group, 2), JOIN)
            for speaker in (g0, g1):
                prepare = await speaker.hears(m.Prepare)
                await speaker.say(m.Promise(prepare.epoch, None, (), None, (), 4))
            await g1.hears(m.Activate)
            machine = served.service.jobs["job"]
            stub: Any = lighthouse_pb2_grpc.LighthouseStub(g1.channel)

            async def fence(**fields: Any) -> Any:
                request = lighthouse_pb2.FenceGroupRequest(group="g0", by="ann", **fields)
                return await stub.FenceGroup(request, metadata=metadata(TOKEN, "job"))

            lives = await fence(check=True)
            assert lives.HasField("heard_ms") and "it lives" in lives.refused and lives.incarnation == "g0-i1"
            g0.call.cancel()
            while machine.groups["g0"].connection is not None:
                await asyncio.sleep(0.01)
            machine.groups["g0"].heard -= 10
            asked = await fence(check=True)
            assert not asked.refused and not asked.HasField("heard_ms") and not machine.dead, (
                "a question changes nothing"
            )
            with pytest.raises(grpc.aio.AioRpcError, match="has been started again: incarnation g0-i1"):
                await fence(incarnation="g0-i0")
            assert not machine.dead
            assert not (await fence(incarnation="g0-i1")).HasField("gone_ms") and "g0-i1" in machine.dead
            assert (await fence(incarnation="g0-i1")).HasField("gone_ms")
            status = await stub.Status(lighthouse_pb2.StatusRequest(), metadata=metadata(TOKEN, "job"))
            assert status.members_in_touch == 1

    scene(go)


def test_a_restart_on_the_same_log_knows_the_job(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path) as served, Speaker(served.address) as speaker:
            activate = await in_epoch(speaker)
        async with serving(tmp_path) as served, Speaker(served.address) as speaker:
            assert served.service.jobs["job"].newest == activate.membership
            await speaker.say(hello(known=activate.membership, acknowledged=activate.membership.epoch.term), JOIN)
            welcome = await speaker.hears(m.Welcome)
            assert welcome.term.number == 2 and welcome.term.lighthouse == activate.membership.epoch.term.lighthouse

    scene(go)


def test_what_is_not_on_disk_is_never_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as speaker:
            real = served.service.log.append

            def append(job: str, record: Any) -> None:
                if isinstance(record, Activated):
                    raise OSError(28, "No space left on device")
                real(job, record)

            monkeypatch.setattr(served.service.log, "append", append)
            await speaker.say(hello(), JOIN)
            prepare = await speaker.hears(m.Prepare)
            await speaker.say(m.Promise(prepare.epoch, None, (), None, (), 4))
            await speaker.ends()  # if it does not end, the bound of the scene ends it
            if served.ticks is not None and served.ticks.done():
                return  # the lighthouse has ended: it can say nothing
            async with Speaker(served.address) as again:
                await again.say(hello())
                heard: list[Any] = []
                for _ in range(50):
                    envelope = await asyncio.wait_for(again.call.read(), 3.0)
                    if envelope in ENDED:
                        break
                    heard.append(unwrap(envelope))
                    assert not isinstance(heard[-1], m.Activate), "it speaks of an epoch that is not on disk"

    try:
        scene(go)
    except (TimeoutError, grpc.aio.AioRpcError):
        return


def test_a_reader_so_slow_that_the_outbox_is_full_loses_its_stream() -> None:
    async def go() -> None:
        stream = Stream()
        for _ in range(OUTBOX_MAX + 1):
            stream.put(m.Waiting((), "", 0))
        assert stream.outbox.get_nowait() is None and stream.outbox.empty()

    scene(go)


def test_a_stream_that_floods_is_read_no_faster_than_a_manager_ever_speaks() -> None:
    stream = Stream()
    burst = [stream.too_soon_s(1000.0) for _ in range(int(MESSAGES_AT_ONCE_MAX))]
    assert not any(burst), "a burst is let through"
    assert stream.too_soon_s(1000.0) == pytest.approx(1 / MESSAGES_PER_S_MAX)
    now, read = 1000.0, 0
    while now < 1010.0:
        now += stream.too_soon_s(now)
        read += 1
    assert read == pytest.approx(10 * MESSAGES_PER_S_MAX, rel=0.01)
    assert not stream.too_soon_s(2000.0), "and after a rest again"


@pytest.mark.parametrize("names", [{"group": ""}, {"job": ""}, {"incarnation": "x" * 257}, {"manager": ""}])
def test_names_that_are_empty_or_too_long_are_not_let_in(names: dict[str, str]) -> None:
    async def go() -> None:
        async with serving() as served, Speaker(served.address) as speaker:
            await speaker.say(replace(hello(), **names))
            await speaker.ends()
            assert any("a name that is empty or too long" in line for line in served.said) and not served.service.jobs

    scene(go)


def test_a_job_of_which_nothing_was_ever_promised_is_forgotten_when_nobody_is_there() -> None:
    async def go() -> None:
        async with serving() as served:
            for groups, kept in ((2, False), (1, True)):
                async with Speaker(served.address) as speaker:
                    await speaker.say(hello(groups=groups), JOIN)
                    await speaker.hears(m.Prepare if kept else m.Welcome)
                while served.service.streams or (served.service.jobs and not kept):
                    await asyncio.sleep(0.01)
                assert bool(served.service.jobs) == kept

    scene(go)


# ---------------------------------------------------------------- the process around it


def test_a_port_in_use_gives_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError) as raised:
            run(Options(bind, TOKEN))
    assert (
        str(raised.value)
        == f"cannot listen on {bind}: the port is in use or the address is not ours; give another --bind"
    )


def test_two_lighthouses_do_not_share_a_port_silently() -> None:
    async def go() -> None:
        async with serving() as served:
            with pytest.raises(UsageError, match=f"cannot listen on {served.address}: the port is in use"):
                await asyncio.to_thread(run, Options(served.address, TOKEN))

    scene(go)


def test_an_address_that_is_not_ours_gives_one_line() -> None:
    with pytest.raises(
        UsageError, match="cannot listen on 203.0.113.7:1: the port is in use or the address is not ours"
    ):
        run(Options("203.0.113.7:1", TOKEN))


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 1e9, float("nan")])
def test_a_lease_that_makes_no_sense_gives_one_line(lease_s: float) -> None:
    with pytest.raises(UsageError, match=r"--lease-s .*: give 0.1 to 3600 seconds"):
        run(Options("127.0.0.1:0", TOKEN, lease_s=lease_s))


@pytest.mark.parametrize("interval_s", [-1.0, 1e9, float("nan")])
def test_an_interval_that_makes_no_sense_gives_one_line(interval_s: float) -> None:
    with pytest.raises(UsageError, match=r"--admit-interval-s .*: give 0 to 3600 seconds"):
        run(Options("127.0.0.1:0", TOKEN, admit_interval_s=interval_s))


def test_a_held_log_is_wrong_input_in_one_line(tmp_path: Path) -> None:
    log = LighthouseLog(tmp_path)
    with pytest.raises(UsageError, match="another lighthouse holds the log"):
        run(Options("127.0.0.1:0", TOKEN, log=tmp_path))
    log.close()


def test_proxy_variables_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 71: all point to a dead port. That they are in force is shown by a channel without our options."""
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{dead.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)

        async def go() -> None:
            async with serving() as served:
                async with Speaker(served.address) as speaker:
                    await speaker.say(hello())
                    assert await speaker.hears(m.Welcome)
                channel = grpc.aio.insecure_channel(served.address)
                stub: Any = lighthouse_pb2_grpc.LighthouseStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.Status(lighthouse_pb2.StatusRequest(), metadata=((TOKEN_KEY, TOKEN),), timeout=5)
                assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                await channel.close()

        scene(go)
