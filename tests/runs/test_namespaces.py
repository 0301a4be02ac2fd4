"""A group on two nodes that are two network namespaces of this machine, joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from facts import read_trace
from harness import HERE as RUNS
from node_job import NodeJob

from lightkeeper.events import schema

STEPS = 400
LEASE_S = 2.0
GONE = r"the group's manager at 10\.231\.77\.1:\d+ is gone"
HERE, THERE = "10.231.77.1", "10.231.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


class Link:
    """The second node's namespace, and its link to this one."""

    def __init__(self) -> None:
        self.name = f"lk{os.getpid()}"
        self.near, self.far = f"{self.name}a", f"{self.name}b"

    def up(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
        ip("addr", "add", f"{HERE}/30", "dev", self.near)
        ip("link", "set", self.near, "up")
        ip("-n", self.name, "addr", "add", f"{THERE}/30", "dev", self.far)
        ip("-n", self.name, "link", "set", self.far, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Packets are dropped from now on; nobody is told."""
        ip("link", "set", self.near, "down")

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def remove(self) -> None:
        for words in (("link", "del", self.near), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=10)


@contextmanager
def linked() -> Iterator[Link]:
    link = Link()
    try:
        try:
            link.up()
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"no network namespace can be made here: {why.strip()}")
        yield link
    finally:
        link.remove()


@pytest.fixture
def link() -> Iterator[Link]:
    with linked() as made:
        yield made


def start(made: NodeJob, link: Link, **options: Any) -> None:
    """g0 on a node here and one there, g1 here."""
    made.settings["groups"] = 2
    made.start_lighthouse("--lease-s", str(LEASE_S), bind=HERE)
    made.start_node("g0", 1, prefix=link.prefix, **options)
    made.start_node("g0", 0, **options)
    made.start_node("g1", nnodes=1, **{**options, "ranks": 2 * options["ranks"]})


@pytest.fixture
def job(tmp_path: Path, link: Link) -> Iterator[NodeJob]:
    """Two groups of four plain ranks, which train."""
    made = NodeJob(tmp_path / "run")
    try:
        start(made, link, ranks=2, steps=STEPS, child=True)
        for rank in range(4):
            made.await_step("g0", rank, 3)
        yield made
    finally:
        made.end()


def check_survivor(job: NodeJob, codes: dict[str, int]) -> None:
    facts = job.finish()
    assert facts.codes == {**codes, "g1": 0}
    assert facts.members == [("g0", "g1"), ("g1",)] and len(job.traced("g1", 0)) == STEPS


@pytest.mark.long
def test_a_rank_of_the_node_over_there_is_killed(job: NodeJob) -> None:
    os.kill(job.pid_of("g0", 2), signal.SIGKILL)
    assert job.lost("g0").cause == "rank 2 was killed by SIGKILL"
    check_survivor(job, {"g0": 137, "g0.1": 137})


@pytest.mark.long
def test_the_agent_over_there_is_killed(job: NodeJob) -> None:
    agent = job.launchers["g0.1"].pid
    os.kill(agent, signal.SIGKILL)
    cause = job.lost("g0").cause
    assert cause.startswith("the agent of node 1 (") and cause.endswith(f"pid {agent}) is gone")
    check_survivor(job, {"g0": 107, "g0.1": -9})


def test_the_link_is_cut(job: NodeJob, link: Link) -> None:
    """Neither side is told. Each ends what it holds once the lease is over, and the manager names the node."""
    link.cut()
    committed = len(job.traced("g0", 3))
    cause = job.lost("g0").cause
    assert cause.startswith("node 1 (") and "has not been heard for " in cause
    job.until(lambda: job.launchers["g0.1"].poll() is not None, "the agent has ended")
    said = job.said("g0.1")  # by its lease or by a ping that was not answered, which take as long
    assert "nothing was heard of the manager at 10.231.77.1:" in said or re.search(GONE, said), said
    assert len(job.traced("g0", 3)) <= committed + 3, "it went on without its manager"
    check_survivor(job, {"g0": 107, "g0.1": 107})
    assert "no word from node 1 (" in job.said("g0")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "cause"), [("KILL", "rank 1 was killed by SIGKILL"), ("STOP", "a rank has been stopped")]
)
def test_a_group_on_two_nodes_comes_back_by_itself_with_the_same_bits(
    tmp_path: Path, link: Link, fault: str, cause: str
) -> None:
    """Trainers with torch: extras summed within the group over the link, and healing across it."""
    job = NodeJob(tmp_path / "run", plain=False)
    options = {"loop": "healing", "warm_up": 12, "delay": 0.05, "steps": 400, "hurry": str(job.folder / "hurry")}
    try:
        start(job, link, ranks=1, restarts=1, script=RUNS / "script.py", **options)
        commit = job.wait_for(schema.Committed, 90, group="g0", rank=1, step=3)
        os.kill(commit.pid, signal.Signals[f"SIG{fault}"])
        for rank in range(2):
            job.wait_for(schema.Rejoined, 90, group="g0", rank=rank)
        job.hurry()
        codes = job.wait("g0", "g0.1", "g1", within_s=90)
        assert codes == {"g0": 0, "g0.1": 0, "g1": 0}
        for name in ("g0", "g0.1"):
            (line,) = (line for line in job.said(name).splitlines() if "is started again" in line)
            assert cause in line and line.endswith("0 of 1 restarts left"), line
        for rank in range(2):
            mine = read_trace(job.folder / f"trace-g0.{rank}-again").digests
            others = read_trace(job.folder / f"trace-g1.{rank}").digests
            assert max(mine) == 399 and len(mine) < 400 and len(others) == 400
            assert mine == {step: others[step] for step in mine}, f"rank {rank}"
    except BaseException:
        print(job.printed())
        raise
    finally:
        job.end()
