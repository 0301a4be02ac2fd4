"""One lighthouse for many jobs, and for whoever else connects to it: nobody disturbs anybody (scenarios 7, 12, 13)."""

from __future__ import annotations

import os
import signal
import socket
import time

import grpc
import psutil
import pytest
from harness import TOKEN, Job, names
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.events.reader import read_run
from lightkeeper.events.summary import one_lineage
from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc
from lightkeeper.wire import metadata

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RSS_MB_MORE = 15  # what an allocator may keep; a leak of a connection's state in the flood below is ten times that


@pytest.mark.long
@pytest.mark.timeout(600)
def test_12_a_job_whose_half_dies_again_and_again_does_not_touch_the_other(job: Job) -> None:
    """Two jobs with the same group names; the lighthouse dies once as well."""
    job.settings.update(groups=2, job="a", deal="even")
    job.start_lighthouse(*PATIENT)
    steps = 240
    job.heal_options = {
        "loop": "healing", "warm_up": 12, "delay": 0.1, "steps": steps, "hurry": str(job.folder / "hurry"),
    }  # fmt: skip
    for group in names(2):
        job.start(group, fault="kill:g1:reduce:5" if group == "g1" else "", **job.heal_options)
    other = {"job": "b", "run_folder": str(job.folder / "b")}
    for group in names(2):
        trace = str(job.folder / f"trace-b-{group}")
        job.trainers[f"b-{group}"] = job.start(group, settings=other, steps=steps, delay=0.08, trace=trace)
        del job.trainers[f"{group}-again"]
    for turn in range(3):
        job.return_of("g1")
        pid = [process.pid for name, process in job.trainers.items() if name.startswith("g1")][-1]
        job.wait_for(schema.Rejoined, group="g1", pid=pid)
        if turn == 1:
            port = job.kill_lighthouse()
            job.start_lighthouse(*PATIENT, port=port)
            job.until(lambda: "is back" in job.said("g0"), "g0 has found it again")
        if turn < 2:
            os.kill(pid or 0, signal.SIGKILL)
    job.hurry()
    facts = job.finish(300)
    assert facts.codes["g0"] == facts.codes["b-g0"] == facts.codes["b-g1"] == 0
    assert len(facts.all(schema.GroupLost, job="a")) == 3 and not facts.all(schema.GroupLost, job="b")
    undisturbed = read_run(job.folder / "b").events
    commits = [e for e in undisturbed if isinstance(e, schema.Committed)]
    assert {e.epoch for e in commits} == {1} and len(commits) == 2 * steps
    assert not [e for e in undisturbed if isinstance(e, schema.ReduceFailed)]


def test_13_whoever_else_connects_disturbs_nobody_and_leaves_nothing(job: Job) -> None:
    """Garbage, cut-off and oversized messages, wrong tokens and half-open connections, while a job trains."""
    steps = 120
    job.settings["deal"] = "even"  # other shares would be another epoch
    job.start_lighthouse(*PATIENT)  # what floods it may hold it up for a while
    job.start_all(2, steps=steps, delay=0.03)
    job.wait_for(schema.Committed, group="g0", step=3)
    host, _, port = job.lighthouse.rpartition(":")
    process = psutil.Process(job.lighthouses[0].pid)
    sizes = []
    for _ in range(3):
        assert flood((host, int(port)), job.lighthouse) == {"RESOURCE_EXHAUSTED": 5, "UNAUTHENTICATED": 20}
        job.until(lambda: process.net_connections("tcp") and open_ones(process) <= 4, "strangers are gone")
        sizes.append(process.memory_info().rss / 2**20)
    assert process.is_running() and sizes[-1] - sizes[0] < RSS_MB_MORE, f"MB after each flood: {sizes}"
    facts = job.finish()
    facts.check(steps, {"g0", "g1"})
    assert not facts.lost and {e.epoch for e in facts.all(schema.Committed)} == {1}
    assert not facts.all(schema.ReduceFailed) and facts.all(schema.Unauthorised)
    assert len({e.step for e in facts.all(schema.Committed)}) == steps


def open_ones(process: psutil.Process) -> int:
    """Its established connections: one of each manager, and the call that asks."""
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections("tcp"))


def flood(where: tuple[str, int], address: str) -> dict[str, int]:
    """One round of everything; the gRPC codes that came back."""
    half_open = [socket.create_connection(where, 60) for _ in range(100)]
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        PREFACE,
        PREFACE + b"\x00\x10\x00\x00\x00",
        b"PRI *",
    ):
        for _ in range(20):
            with socket.create_connection(where, 60) as stranger:
                try:
                    stranger.sendall(data)
                except OSError:
                    continue  # it has hung up already
    codes: dict[str, int] = {}
    with grpc.insecure_channel(address, options=(("grpc.max_send_message_length", -1),)) as channel:
        stub = lighthouse_pb2_grpc.LighthouseStub(channel)
        big = lighthouse_pb2.FromManager(hello=lighthouse_pb2.Hello(job="x" * (5 << 20), group="g0"))
        for token, message in [(TOKEN, big)] * 5 + [("wrong", lighthouse_pb2.FromManager())] * 20:
            try:
                for _ in stub.Session(iter([message]), metadata=metadata(token, "job"), timeout=60):
                    pass
            except grpc.RpcError as error:
                codes[error.code().name] = codes.get(error.code().name, 0) + 1
        for _ in stub.Session(iter([lighthouse_pb2.FromManager()]), metadata=metadata(TOKEN, "job"), timeout=60):
            raise AssertionError("an empty message was answered")
    for connection in half_open:
        connection.close()
    return codes


@pytest.mark.long
@pytest.mark.timeout(900)
def test_7_groups_that_come_and_go_for_a_minute_write_one_history(job: Job) -> None:
    """Four groups, minimum 2, heals slowed to seconds, kills at random places: one membership commits each step."""
    job.settings.update(minimum=2)
    steps_all = 1600
    job.start_lighthouse(*PATIENT)
    job.start_healing(4, delay=0.1, steps=steps_all, behave="slow-sending:300")
    job.wait_for(schema.Committed, group="g0", step=5)
    since, kills = time.monotonic(), 0
    while time.monotonic() < since + 60 or kills < 4:
        group = names(4)[1 + kills % 3]
        name, process = [(n, p) for n, p in job.trainers.items() if n.split("-")[0] == group][-1]
        assert process.exitcode is None, f"{name} has ended by itself: {job.said(name)[-500:]}"
        os.kill(process.pid or 0, signal.SIGKILL)
        kills += 1
        if kills % 4 == 2:
            job.start_lighthouse(*PATIENT, port=job.kill_lighthouse())
        job.return_of(group, behave="slow-sending:300")
        pid = [p.pid for n, p in job.trainers.items() if n.split("-")[0] == group][-1]
        job.wait_for(schema.Rejoined, group=group, pid=pid)
    job.hurry()
    facts = job.finish(300)
    assert one_lineage(facts.events).holds
    assert set(facts.members[-1]) == set(names(4)), facts.members[-1]
    ended = [name for name, code in facts.codes.items() if code == 0]
    assert {name.split("-")[0] for name in ended} == set(names(4)) and len(ended) == 4
    steps: dict[int, set[int]] = {}
    for commit in facts.all(schema.Committed):
        steps.setdefault(commit.step, set()).add(commit.epoch)
    assert sorted(steps) == list(range(steps_all)) and all(len(epochs) == 1 for epochs in steps.values())
