"""What an operator asks and says: `status` and `fence`, against lighthouses and managers by hand."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from cli_said import one_line, only_the_token

from lightkeeper.cli import drain, outage
from lightkeeper.cli.app import run
from lightkeeper.cli.calls import Said
from lightkeeper.cli.status import choose
from lightkeeper.events import EventLog
from lightkeeper.events.schema import ProcessEnded, ProcessStarted
from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc, manager_pb2, manager_pb2_grpc
from lightkeeper.wire import JOB_KEY, authorised


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    only_the_token(monkeypatch)


# --- status


class FakeLighthouse(lighthouse_pb2_grpc.LighthouseServicer):
    """Knows one job, `j`, and the token `secret`."""

    stopped = ""

    fenced: ClassVar[list[tuple[str, str]]] = []

    def FenceGroup(self, request: Any, context: grpc.ServicerContext) -> Any:
        carried = dict(context.invocation_metadata())
        if not authorised(carried.items(), "secret"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
        if carried[JOB_KEY] != "j":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no job {carried[JOB_KEY]!r} here; jobs: j")
        if request.group == "g0":
            return lighthouse_pb2.FenceGroupReply(heard_ms=100, refused="g0 was heard 0.1 s ago: it lives")
        if request.group == "g3":
            return lighthouse_pb2.FenceGroupReply(incarnation="g3i4", gone_ms=9000)
        if not request.check:
            assert request.incarnation == f"{request.group}i4"
            self.fenced.append((request.group, request.by))
        return lighthouse_pb2.FenceGroupReply(incarnation=f"{request.group}i4")

    def Status(self, request: Any, context: grpc.ServicerContext) -> Any:
        carried = dict(context.invocation_metadata())
        if not authorised(carried.items(), "secret"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
        if carried[JOB_KEY] != "j":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no job {carried[JOB_KEY]!r} here; jobs: j")
        reply = lighthouse_pb2.StatusReply(
            job="j", waiting="g2 (to join) for 3.0 s", stopped=self.stopped, members_in_touch=1
        )
        reply.term.number = 4
        reply.membership.epoch.number = 9
        if self.stopped == "forgotten":
            return lighthouse_pb2.StatusReply(job="j")
        if self.stopped == "begun again":
            waiting = "1 more group (to begin) for 3.0 s"
            return lighthouse_pb2.StatusReply(job="j", waiting=waiting, ended="no group is left")
        reply.groups.add(group="g0", state="member", phase="reduce", step=12, silent_ms=150)
        return reply


class UnusedLighthouse(FakeLighthouse):
    """Knows the job by its log; nobody of it calls."""

    fenced: ClassVar[list[tuple[str, str]]] = []
    told: ClassVar[list[str]] = []

    def FenceGroup(self, request: Any, context: grpc.ServicerContext) -> Any:
        if not request.check:
            self.told.append(request.group)
        if request.group == "g0":
            return lighthouse_pb2.FenceGroupReply(incarnation="g0i1")
        return lighthouse_pb2.FenceGroupReply(incarnation="g2i1", refused="nobody of this job is in touch")

    def Status(self, request: Any, context: grpc.ServicerContext) -> Any:
        reply = lighthouse_pb2.StatusReply(job="j", reigns=True)
        reply.term.number = 2
        reply.membership.epoch.number = 1
        reply.groups.add(group="g0", state="member, not in touch")
        return reply


def serve(servicer: Any) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    lighthouse_pb2_grpc.add_LighthouseServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def unused() -> Iterator[str]:
    UnusedLighthouse.told.clear()
    yield from serve(UnusedLighthouse())


@pytest.fixture
def lighthouse() -> Iterator[str]:
    yield from serve(FakeLighthouse())


def test_status_shows_the_job(lighthouse: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--lighthouse", lighthouse, "--job", "j"]) == 0
    said = capsys.readouterr().out
    assert "job j, term 4" in said
    assert "epoch 9" in said
    assert "waiting for g2 (to join) for 3.0 s" in said
    for text in ("g0", "member", "reduce", "12", "0.1 s"):
        assert text in said
    assert run(["status", "--lighthouse", lighthouse, "--job", "j", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["phase"] == "reduce"


@pytest.mark.parametrize(
    ("reason", "says"),
    [("finished: step 40 is final", "finished: step 40 is final"), ("nobody is left", "stopped: nobody is left")],
)
def test_status_after_the_end(
    reason: str, says: str, lighthouse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLighthouse, "stopped", reason)
    assert run(["status", "--lighthouse", lighthouse, "--job", "j"]) == 0
    said = capsys.readouterr().out
    assert says in said.splitlines()
    assert "waiting" not in said
    assert "0.1 s" not in said, "nobody is expected to speak any more"


def test_status_of_a_job_that_nobody_is_in(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLighthouse, "stopped", "forgotten")
    assert run(["status", "--lighthouse", lighthouse, "--job", "j"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["no group is here: the job has not begun, or it has ended"]


def test_status_tells_what_is_wrong(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--lighthouse", lighthouse]) == 2
    assert "no job 'job' here; jobs: j" in one_line(capsys)
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "other")
    assert run(["status", "--lighthouse", lighthouse, "--job", "j"]) == 2
    assert "wrong or missing token" in one_line(capsys)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert run(["status", "--lighthouse", address]) == 1
    assert one_line(capsys).startswith(f"no lighthouse answers at {address}")


def unused_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


def test_status_asks_every_lighthouse(lighthouse: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    away = unused_address()
    (tmp_path / "at").write_text(f"{away},{lighthouse}")
    for where in (f"{away},{lighthouse}", f"file:{tmp_path / 'at'}"):
        assert run(["status", "--lighthouse", where, "--job", "j"]) == 0
        said = capsys.readouterr().out
        assert f"also asked {away}: no lighthouse answers" in said and "epoch 9" in said
        assert "this lighthouse does not reign" in said


def test_status_shows_the_lighthouse_that_the_job_is_in_touch_with(
    lighthouse: str, unused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`unused` has been started again with an old log: it believes that it reigns."""
    for where in (f"{unused},{lighthouse}", f"{lighthouse},{unused}"):
        assert run(["status", "--lighthouse", where, "--job", "j"]) == 0
        said = capsys.readouterr().out
        assert f"also asked {unused}: knows an older epoch (1); nobody is in touch with it" in said
        assert f"at {lighthouse}, epoch 9" in said
        assert run(["status", "--lighthouse", where, "--job", "j", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["membership"]["epoch"]["number"], told["address"]) == ("9", lighthouse)
        assert told["also_asked"] == {unused: "knows an older epoch (1); nobody is in touch with it"}


def status_of(here: int, number: int, reigns: bool = False) -> Said:
    reply = lighthouse_pb2.StatusReply(members_in_touch=here, reigns=reigns)
    reply.membership.epoch.number = number
    return Said("", reply)


@pytest.mark.parametrize(
    ("best", "other"),
    [
        (status_of(1, 4, reigns=True), status_of(2, 5)),
        (status_of(2, 4), status_of(1, 5)),
        (status_of(0, 5), status_of(0, 4, reigns=True)),
        (status_of(1, 4), status_of(0, 5, reigns=True)),
        (status_of(0, 4), Said("", lighthouse_pb2.StatusReply())),
    ],
)
def test_who_decides_for_a_job_is_shown(best: Said, other: Said) -> None:
    assert choose([best, other, Said("", None, "UNAVAILABLE")]) is best and choose([other, best]) is best


def test_status_while_groups_wait_for_the_next_run_says_how_the_last_one_ended(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLighthouse, "stopped", "begun again")
    assert run(["status", "--lighthouse", lighthouse, "--job", "j"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["waiting for 1 more group (to begin) for 3.0 s", "before that: no group is left"]


class FakeManager(manager_pb2_grpc.ManagerServicer):
    """The manager of g0, whose epoch has a member that does not answer."""

    reply = manager_pb2.GroupStateReply(group="g0", step=41, phase="reduce", away_ms=34_000)

    def GroupState(self, request: Any, context: grpc.ServicerContext) -> Any:
        if not authorised(context.invocation_metadata(), "secret"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
        return self.reply


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    reply = manager_pb2.GroupStateReply()
    reply.CopyFrom(FakeManager.reply)
    reply.membership.epoch.number = 7
    reply.membership.members.add(group="g0", manager=address)
    reply.membership.members.add(group="g1", manager=unused_address())
    monkeypatch.setattr(FakeManager, "reply", reply)
    manager_pb2_grpc.add_ManagerServicer_to_server(FakeManager(), server)  # type: ignore[no-untyped-call]
    server.start()
    yield address
    server.stop(None)


def test_status_without_a_lighthouse_asks_the_groups(manager: str, capsys: pytest.CaptureFixture[str]) -> None:
    away = unused_address()
    words = ["status", "--lighthouse", away, "--job", "j", "--manager", manager]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert f"no lighthouse: {away}" in said
    assert "no lighthouse for 34 s, running on epoch 7 at step 41" in said and "no answer from g1, a member" in said
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["groups"][0]["membership"]["epoch"]["number"], told["no_answer"]) == ("7", ["g1"])


def test_status_without_a_lighthouse_says_for_whom_the_job_stands(
    manager: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeManager.reply.waiting_ms = 12_000
    FakeManager.reply.suspects.append("g1")
    FakeManager.reply.standby = "standby: takes over once it has heard g1"
    assert run(["status", "--lighthouse", unused_address(), "--job", "j", "--manager", manager]) == 0
    said = capsys.readouterr().out
    assert "job j stands at step 41 of epoch 7 since 12 s: the connection to g1 broke" in said
    assert "standby: takes over once it has heard g1" in said


def test_status_finds_the_managers_in_the_runs_events(
    manager: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path, "manager g0", group="g0")
    log.write(ProcessStarted(listens="127.0.0.1:1"))
    log.write(ProcessStarted(listens=manager))
    assert run(["status", "--lighthouse", unused_address(), "--job", "j", "--run-folder", str(tmp_path)]) == 0
    assert "running on epoch 7" in capsys.readouterr().out


def test_status_where_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = unused_address(), unused_address()
    assert run(["status", "--lighthouse", f"{a},{b}", "--manager", unused_address()]) == 1
    said = one_line(capsys)
    assert said.startswith(f"no lighthouse answers at {a}: ") and f"; {b}: " in said
    assert said.endswith("no manager answers either")


def test_status_says_that_the_job_stands_when_the_dead_group_has_been_started_again(
    manager: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new manager of g1 answers; the members wait for its earlier processes, and so for a lighthouse."""
    reply = FakeManager.reply
    reply.membership.members[1].incarnation = "g1i1"
    reply.membership.members[1].manager = manager
    reply.waiting_ms = 11_000
    words = ["status", "--lighthouse", unused_address(), "--job", "j", "--manager", manager]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "job j stands at step 41 of epoch 7 since 11 s: no answer for g0" in said and "nothing is lost" not in said
    later = manager_pb2.GroupStateReply(group="g1", incarnation="g1i2", waiting_ms=90_000)
    reply.suspects.append("g1")
    told = outage.lines([], [reply, later], {}, "j")
    assert told[1].startswith(
        "job j stands at step 41 of epoch 7 since 11 s: "
        "the connection to the earlier processes of g1 (incarnation g1i1) broke"
    )
    assert "g1 is no member of it, and waits to come in" in told
    reply.waiting_ms, reply.suspects[:] = 0, []
    assert "running on epoch 7" in outage.lines([], [reply, later], {}, "j")[1], "who waits to join holds nobody up"


def test_status_says_with_which_lighthouse_the_groups_are_in_touch(
    manager: str, lighthouse: str, unused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeManager.reply.in_touch, FakeManager.reply.at, FakeManager.reply.away_ms = True, "lh-b:29400", 0
    at = "the groups are in touch with the lighthouse at lh-b:29400: ask that one (--lighthouse lh-b:29400)"
    assert run(["status", "--lighthouse", lighthouse, "--job", "k", "--manager", manager]) == 0
    said = capsys.readouterr().out
    assert at in said.splitlines() and "running on epoch 7 at step 41" in said and "without a lighthouse" not in said
    assert run(["status", "--lighthouse", unused, "--job", "j", "--manager", manager]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == at, "one that knows the job and that nobody calls"
    assert run(["status", "--lighthouse", unused_address(), "--job", "k", "--manager", manager, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["in_touch_with"] == ["lh-b:29400"]


def test_status_asks_the_groups_though_the_lighthouses_file_is_empty(
    manager: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "at"
    empty.write_text("")
    words = ["status", "--lighthouse", f"file:{empty}", "--job", "j"]
    assert run([*words, "--manager", manager]) == 0
    said = capsys.readouterr().out
    assert f"{empty} is empty" in said and "running on epoch 7" in said
    assert run(words) == 2
    assert one_line(capsys) == f"--lighthouse: {empty} is empty"


def test_status_tells_a_wrong_token_of_the_managers(
    manager: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "other")
    assert run(["status", "--lighthouse", unused_address(), "--job", "j", "--manager", manager]) == 2
    assert one_line(capsys) == f"the manager at {manager} says: wrong or missing token"


def test_status_says_what_is_wrong_with_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", "--lighthouse", unused_address(), "--job", "j", "--run-folder"]
    assert run([*words, str(tmp_path / "none")]) == 2
    assert f"no event log in {tmp_path / 'none'}" in one_line(capsys)
    EventLog(tmp_path, "lighthouse").write(ProcessStarted())
    assert run([*words, str(tmp_path)]) == 2
    assert one_line(capsys).endswith(f"no manager of job j has written to {tmp_path}")


def test_status_says_that_and_how_all_groups_have_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", "--lighthouse", unused_address(), "--job", "j", "--run-folder", str(tmp_path)]
    logs = [EventLog(tmp_path, f"manager g{i}", job="j", group=f"g{i}") for i in range(2)]
    for log in logs:
        log.write(ProcessStarted(listens=unused_address()))
    logs[0].write(ProcessEnded(exit_code=105))
    assert run(words) == 1
    said = one_line(capsys)
    assert "no manager answers either; groups have ended: g0 at 20" in said and "g1" not in said
    logs[1].write(ProcessEnded(exit_code=0, child=7))
    logs[1].write(ProcessEnded(exit_code=143))
    assert run(words) == 1
    said = one_line(capsys)
    assert "; all groups have ended: g0 at 20" in said and "(exit code 105, gave up), g1 at 20" in said
    assert said.endswith("(exit code 143); start the groups again")


# --- fence


def test_fence_tells_every_lighthouse_that_can_use_the_word(
    lighthouse: str, unused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    away = unused_address()
    assert run(["fence", "--group", "g2", "--job", "j", "--lighthouse", f"{away},{unused},{lighthouse}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"g2 (incarnation g2i4) of job j counts as gone at {lighthouse}",
        f"no lighthouse answers at {away}: connection refused",
        f"the lighthouse at {unused} says: nobody of this job is in touch",
    ]
    assert FakeLighthouse.fenced[-1][0] == "g2" and "@" in FakeLighthouse.fenced[-1][1]
    assert not UnusedLighthouse.told


def test_fence_tells_nobody_if_one_lighthouse_hears_the_group(
    lighthouse: str, unused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`unused` would take the word, and throw a healthy group out when it takes over."""
    assert run(["fence", "--group", "g0", "--job", "j", "--lighthouse", f"{unused},{lighthouse}"]) == 2
    said = one_line(capsys)
    assert (
        said
        == f"the lighthouse at {lighthouse} says: g0 was heard 0.1 s ago: it lives; no lighthouse was told anything"
    )
    assert not UnusedLighthouse.told


def test_fence_says_if_it_has_been_said_before(lighthouse: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fence", "--group", "g3", "--job", "j", "--lighthouse", lighthouse]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"g3 (incarnation g3i4) of job j already counts as gone at {lighthouse}, since ")
    assert said.endswith(" (9 s ago)\n")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--group", "g0"], "g0 was heard 0.1 s ago: it lives", 2),
        (["--group", "g2", "--job", "other"], "no job 'other' here", 2),
        ([], "--group", 2),
    ],
)
def test_fence_is_refused_in_one_line(
    words: list[str], says: str, code: int, lighthouse: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fence", "--lighthouse", lighthouse, "--job", "j", *words]) == code
    assert says in one_line(capsys)


def test_fence_where_nobody_answers(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = unused_address()
    assert run(["fence", "--group", "g2", "--lighthouse", address]) == 1
    assert one_line(capsys).startswith(f"no lighthouse answers at {address}")
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "other")
    assert run(["fence", "--group", "g2", "--lighthouse", lighthouse]) == 2
    assert "wrong or missing token" in one_line(capsys)


# --- drain


@pytest.mark.parametrize(("given", "sent"), [(None, 0), (0.0004, 1), (0.5, 500)])
def test_a_short_deadline_is_not_taken_for_none(
    given: float | None, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(drain, "call", lambda _s, _m, address, request, *_: asked.append(request) or Said(address))
    with pytest.raises(drain.NotDrained):
        drain._Drain("g1", given, "j", "secret").run(("127.0.0.1:1",))
    assert [request.deadline_ms for request in asked] == [sent]
