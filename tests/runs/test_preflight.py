"""Preflight of several nodes: commands on the loopback, and in a network namespace behind a slow link."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import port_below_ephemeral

COMMAND = (sys.executable, "-m", "lightkeeper", "preflight", "--json")
FLOOR_GBPS = 0.02
REPORT_S_MAX = 400.0  # each node imports torch, several times, on a machine that may be busy

pytestmark = pytest.mark.timeout(600)


class Nodes:
    """Processes of the command, one a node."""

    def __init__(self, count: int, host: str = "127.0.0.1") -> None:
        self.count = count
        self.rendezvous = f"{host}:{port_below_ephemeral()}"
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, node: int, *words: str, prefix: Sequence[str] = (), **environment: str) -> None:
        named = ("--nnodes", str(self.count), "--node-rank", str(node), "--rendezvous", self.rendezvous)
        self.processes[node] = subprocess.Popen(
            [*prefix, *COMMAND, *named, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "LIGHTKEEPER_TOKEN": "secret", **environment},
        )  # fmt: skip

    def report(self, node: int) -> dict[str, Any]:
        process = self.processes[node]
        out, said = process.communicate(timeout=REPORT_S_MAX)
        print(said)
        report: dict[str, Any] = json.loads(out)
        assert process.returncode == (0 if report["may_join"] else 1)
        return report

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(60)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(3)
    yield made
    made.end()


def result(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in report["results"] if one["name"] == name)
    return found


def start_with_an_odd_one(nodes: Nodes, folder: Path, wait_s: float) -> list[dict[str, Any]]:
    """Three nodes, of which the last has another NCCL than the others, who have none."""
    fake = folder / "lib" / "nvidia_nccl_cu12-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 9.9.9\n")
    words = (
        "--only",
        "facts,clock,storage",
        "--wait-s",
        str(wait_s),
        "--checkpoint",
        str(folder),
        "--storage-mib",
        "1",
    )
    nodes.start(0, *words)
    nodes.start(1, *words)
    nodes.start(2, *words, PYTHONPATH=str(fake.parent))
    reports = [nodes.report(node) for node in range(3)]
    assert [report["may_join"] for report in reports] == [True, True, False]
    assert "nccl is 9.9.9, 2 of 3 nodes have none" in result(reports[2], "facts")["reason"]
    for report in reports:
        assert [report["nodes"][str(node)]["may_join"] for node in range(3)] == [True, True, False]
        assert result(report, "clock")["state"] == "ok"
        assert set(result(report, "storage")["evidence"]["nodes"]) == {"0", "1", "2"}
    assert "node 2 differs: nccl is 9.9.9" in result(reports[0], "facts")["reason"]
    return reports


def test_a_node_that_differs_is_named_by_all(nodes: Nodes, tmp_path: Path) -> None:
    for report in start_with_an_odd_one(nodes, tmp_path, 60):
        assert result(report, "peers")["reason"] == "3 of 3 have come"


@pytest.mark.long
def test_a_node_that_does_not_come_is_named_and_the_others_get_their_verdict(nodes: Nodes, tmp_path: Path) -> None:
    nodes.count = 4
    for report in start_with_an_odd_one(nodes, tmp_path, 60):
        assert result(report, "peers")["reason"] == "3 of 4 have come; node 3 did not come: do not join it"
        assert report["nodes"]["3"] == {"came": False}


def test_without_node_0_the_others_are_not_stopped(nodes: Nodes) -> None:
    nodes.start(1, "--only", "facts,disk", "--wait-s", "1")
    report = nodes.report(1)
    assert report["may_join"]
    assert "node 0 did not come, or this node cannot reach it" in result(report, "peers")["reason"]
    assert result(report, "facts")["state"] == "skipped" and report["nodes"]["0"] == {"came": False}


def check_of(process: subprocess.Popen[str], port: int) -> psutil.Process:
    """The process of the check that is at the meeting, once it is there."""
    until = time.monotonic() + 150
    while time.monotonic() < until:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile
                if any(one.raddr and one.raddr.port == port for one in child.net_connections("tcp")):
                    return child
        time.sleep(0.02)
    raise AssertionError("no check has come to the meeting")


@pytest.mark.long
def test_a_node_without_the_token_is_not_let_in_and_one_that_freezes_is_left_out(nodes: Nodes) -> None:
    """The frozen one has come; the others say that it has not answered."""
    words = ("--only", "facts,clock", "--wait-s", "50")
    port = int(nodes.rendezvous.rpartition(":")[2])
    nodes.start(0, *words)
    nodes.start(1, *words)
    nodes.start(2, *words, LIGHTKEEPER_TOKEN="another")
    check_of(nodes.processes[1], port)
    os.kill(nodes.processes[1].pid, signal.SIGSTOP)  # the command alone: its check goes on, and nobody hears of it
    stranger = nodes.report(2)
    assert "the job's token is missing or another one" in result(stranger, "peers")["reason"]
    assert not stranger["may_join"]
    report = nodes.report(0)
    assert result(report, "peers")["evidence"]["missing"] == [2], "node 1 has come"
    assert result(report, "facts")["reason"].endswith("without node 1, which did not answer: do not join it")
    assert report["may_join"] and report["nodes"]["1"] == report["nodes"]["2"] == {"came": False}


@pytest.mark.long
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 128 + signal.SIGTERM), ("SIGKILL", -signal.SIGKILL)])
def test_no_check_outlives_the_command(nodes: Nodes, name: str, code: int) -> None:
    nodes.start(0, "--only", "peers", "--wait-s", "60")
    check = check_of(nodes.processes[0], int(nodes.rendezvous.rpartition(":")[2]))
    nodes.processes[0].send_signal(signal.Signals[name])
    assert nodes.processes[0].wait(60) == code
    assert psutil.wait_procs([check], 30)[1] == []


@pytest.mark.long
def test_all_measure_and_calibrate(nodes: Nodes, tmp_path: Path) -> None:
    path = tmp_path / "floors.json"
    measuring = "bandwidth-node,bandwidth-pairs,bandwidth-all"
    for node in range(3):
        nodes.start(node, "--only", measuring, "--ranks", "2", "--bandwidth-mib", "4", "--calibrate", str(path))
    reports = [nodes.report(node) for node in range(3)]
    assert all(report["may_join"] for report in reports), reports
    floors = json.loads(path.read_text())
    assert set(floors) == {"allreduce_node_gbps", "allreduce_pair_gbps", "allreduce_all_gbps"}
    assert all(gbps > 0 for gbps in floors.values())
    for name in ("bandwidth-pairs", "bandwidth-all"):
        assert all("no floor: not judged" in result(report, name)["reason"] for report in reports)
    assert result(reports[0], "bandwidth-all")["reason"].startswith("6 ranks of 3 nodes")


@pytest.mark.long
def test_a_node_that_freezes_while_it_is_measured_is_named_and_the_others_are_measured(nodes: Nodes) -> None:
    for node in range(3):
        nodes.start(node, "--only", "bandwidth-pairs,bandwidth-all", "--bandwidth-mib", "512")
    frozen = freeze_in_a_group(nodes.processes[1])
    reports = {node: nodes.report(node) for node in (0, 2)}
    assert all(process.status() == psutil.STATUS_STOPPED for process in frozen)
    for report in reports.values():
        assert report["may_join"], report
        assert "node 1 is slow with every partner" in result(report, "bandwidth-pairs")["reason"]
        assert result(report, "bandwidth-pairs")["evidence"]["missing"] == [1]
        assert result(report, "bandwidth-all")["evidence"]["nodes"] == [0, 2]
        assert report["nodes"]["1"] == {"came": False}


def freeze_in_a_group(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """Stops all processes of a node once one of them takes part in an all-reduce: that one is two below torch's."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        with contextlib.suppress(psutil.NoSuchProcess):  # checks come and go meanwhile
            tree = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
            if sum("preflight.collective" in " ".join(process.cmdline()) for process in tree) >= 3:
                for process in tree:
                    process.send_signal(signal.SIGSTOP)
                return tree
        time.sleep(0.005)
    raise AssertionError("nothing was measured")


@pytest.mark.long
def test_a_node_whose_own_ranks_are_slow_is_left_out_of_what_the_others_measure(nodes: Nodes, tmp_path: Path) -> None:
    floors = tmp_path / "floors.json"
    floors.write_text('{"allreduce_node_gbps": 1e6}')
    for node in range(3):
        judged = ("--floors", str(floors)) if node == 1 else ()
        only = ("--only", "bandwidth-node,bandwidth-pairs,bandwidth-all", "--ranks", "2", "--bandwidth-mib", "4")
        nodes.start(node, *only, *judged)
    reports = [nodes.report(node) for node in range(3)]
    assert [report["may_join"] for report in reports] == [True, False, True]
    assert reports[1]["reasons"][0].startswith("bandwidth-node: allreduce_node_gbps")
    assert "as they should" in result(reports[1], "bandwidth-pairs")["reason"]
    for report in (reports[0], reports[2]):
        assert list(result(report, "bandwidth-pairs")["evidence"]["gbps"]) == ["0-2"]
        assert result(report, "bandwidth-all")["reason"].startswith("4 ranks of 2 nodes")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


class Network:
    """Three nodes in namespaces of their own, joined by a bridge in a fourth; one of their cables is slow."""

    def __init__(self, slow: int) -> None:
        self.hub = f"lkp{os.getpid()}"
        self.slow = slow

    def name(self, node: int) -> str:
        return f"{self.hub}n{node}"

    def up(self) -> None:
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for node in range(3):
            name, there = self.name(node), f"p{node}"
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", there, "netns", self.hub)
            ip("-n", self.hub, "link", "set", there, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.231.78.{node + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        for where, device in ((self.name(self.slow), "eth0"), (self.hub, f"p{self.slow}")):
            shape = (
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                "40mbit",
                "burst",
                "64kb",
                "latency",
                "200ms",
            )
            subprocess.run(["tc", "-n", where, *shape], check=True, capture_output=True, text=True, timeout=10)

    def remove(self) -> None:
        for name in (*map(self.name, range(3)), self.hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(slow=1)
    try:
        try:
            made.up()
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"no namespaces with a slow link can be made here: {why.strip()}")
        yield made
    finally:
        made.remove()


@pytest.mark.long
@pytest.mark.parametrize("by", ["floor", "sweep"])
def test_the_node_behind_a_slow_cable_is_named_and_the_others_join(network: Network, tmp_path: Path, by: str) -> None:
    """40 Mbit/s is 0.005 GB/s; the all-reduce among all is then made without it."""
    nodes = Nodes(3, "10.231.78.1")
    floors = tmp_path / "floors.json"
    floors.write_text(json.dumps({"allreduce_pair_gbps": FLOOR_GBPS, "allreduce_all_gbps": FLOOR_GBPS}))
    words = ("--floors", str(floors)) if by == "floor" else ("--sweep",)
    try:
        for node in range(3):
            prefix = ("ip", "netns", "exec", network.name(node))
            only = ("--only", "bandwidth-pairs,bandwidth-all", "--bandwidth-mib", "4")
            nodes.start(node, *only, *words, prefix=prefix)
        reports = [nodes.report(node) for node in range(3)]
    finally:
        nodes.end()
    assert [report["may_join"] for report in reports] == [True, False, True], reports
    slow = result(reports[1], "bandwidth-pairs")
    assert slow["reason"].startswith("node 1 is slow with every partner"), slow
    assert slow["figures"]["allreduce_pair_gbps"] < 0.01 and len(slow["evidence"]["gbps"]) == 3
    assert "left out" in result(reports[1], "bandwidth-all")["reason"]
    for report in (reports[0], reports[2]):
        assert "node 1 is slow with every partner" in result(report, "bandwidth-pairs")["reason"]
        assert result(report, "bandwidth-all")["evidence"]["nodes"] == [0, 2]
        assert not report["nodes"]["1"]["may_join"]
