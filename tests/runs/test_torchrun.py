"""Groups of two ranks that torchrun started, without a launcher of ours: who is lost, who is blamed, who comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from facts import Facts
from harness import HERE, Job, port_below_ephemeral
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.events.summary import fingerprints_equal, one_lineage, samples_exactly_once, steps_lost

pytestmark = pytest.mark.timeout(400)  # each start imports torch three times, beside other tests
AT, RANKS = 5, 2
ALONE = ("--standalone", "--nproc-per-node", "2")
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch's own ranks meet dead ones after a restart


class TorchrunJob(Job):
    """A job whose groups are started by torchrun."""

    def torchrun(
        self, group: str, fault: str = "", words: tuple[str, ...] = ALONE, suffix: str = "", **options: Any
    ) -> subprocess.Popen[bytes]:
        """Starts one group of two ranks, or its part on one node.

        Args:
            group: name of the group.
            fault: as in ``LIGHTKEEPER_FAULT``.
            words: options of torchrun.
            suffix: of its name in the harness.
            options: of `loops.run`.
        """
        name = group + suffix
        options = {"loop": "sharded", "trace": str(self.folder / f"trace-{name}"), "hurry": self.mark, **options}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *words,
            str(HERE / "script.py"), json.dumps(options),
        ]  # fmt: skip
        with self.output(name).open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=self._group_environment(group, fault, None, {**FRESH_STORE, "OMP_NUM_THREADS": "1"}),
            )  # fmt: skip
        self.launchers[name] = child
        self.started.add(child.pid)
        return child

    @property
    def mark(self) -> str:
        """The file that has the loops hurry."""
        return str(self.folder / "hurry")

    def pids(self, group: str) -> dict[int, int]:
        """Of the ranks of the group's newest start, as they have written events."""
        starts = [e for e in self.events() if re.fullmatch(rf"rank {group}/\d+", e.process)]
        return {int(e.process.rpartition("/")[2]): e.pid for e in starts}

    def await_step(self, group: str, step: int) -> None:
        """Returns once both ranks have committed it."""
        for rank in range(RANKS):
            self.wait_for(schema.Committed, 240, group=group, rank=rank, step=step)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchrunJob]:
    made = TorchrunJob(tmp_path / "run")
    made.settings.update(groups=2, outage_budget_s=60)
    made.start_lighthouse(*PATIENT)  # nobody is to be lost because the machine is busy
    yield made
    made.end()


def check(facts: Facts, steps: int) -> None:
    """No step is lost, no sample twice, and all who hold a state hold the same bits."""
    for rule in (samples_exactly_once(facts.events, steps), one_lineage(facts.events), steps_lost(facts.events)):
        assert rule.holds, rule.why
    assert fingerprints_equal(facts.events).holds
    for rank in range(RANKS):
        assert [e.step for e in facts.all(schema.Committed, group="g0", rank=rank)] == list(range(steps))
    assert not facts.all(schema.UserError) and not facts.all(schema.Diverged)


def test_a_rank_is_killed(job: TorchrunJob) -> None:
    """A group beside it was started in another way, which makes no difference."""
    job.torchrun("g1", f"kill:g1/1:compute:{AT}", steps=10)
    job.start_ranks("g0", RANKS, steps=10)
    facts = job.finish(within_s=300)
    check(facts, 10)
    hit = facts.one(schema.FaultInjected)
    assert (hit.group, hit.phase, hit.step, hit.process) == ("g1", "compute", AT, "rank g1/1")
    assert facts.codes == {"g0": 0, "g0.0": 0, "g0.1": 0, "g1": 1}, "torchrun reports it"
    assert facts.lost.keys() == {"g1"} and facts.lost["g1"].cause.startswith("rank 1 was killed by SIGKILL")
    assert (facts.lost["g1"].step, facts.lost["g1"].detected_by) == (AT, "manager")
    assert facts.members == [("g0", "g1"), ("g0",)]
    assert "local_rank: 1" in facts.said["g1"] and "exitcode: -9" in facts.said["g1"]


@pytest.mark.long
def test_torchrun_alone_is_killed(job: TorchrunJob) -> None:
    """Its ranks do not outlive it, and are not blamed; the group is started again under the same name at once."""
    for group in ("g0", "g1"):
        job.torchrun(group, steps=200, delay=0.1)
    job.await_step("g1", AT)
    ranks, torchrun = job.pids("g1"), job.launchers["g1"]
    assert {psutil.Process(pid).ppid() for pid in ranks.values()} == {torchrun.pid}
    torchrun.send_signal(signal.SIGKILL)
    lost = job.wait_for(schema.GroupLost, group="g1")
    told = f"the launcher of the group's ranks, torchrun (pid {torchrun.pid}) was killed by SIGKILL"
    assert lost.cause == told and lost.detected_by == "manager"
    job.until(lambda: not any(map(psutil.pid_exists, ranks.values())), "its ranks have ended")
    job.torchrun("g1", suffix="-again", steps=200, delay=0.1)
    for rank in range(RANKS):
        job.wait_for(schema.Rejoined, 240, group="g1", rank=rank)
    job.hurry()
    facts = job.finish(within_s=240)
    check(facts, 200)
    assert facts.codes == {"g0": 0, "g1": -9, "g1-again": 0} and facts.lost.keys() == {"g1"}


@pytest.mark.long
def test_torchrun_starts_its_ranks_again(job: TorchrunJob) -> None:
    for group in ("g0", "g1"):
        job.torchrun(group, words=(*ALONE, "--max-restarts", "1"), steps=200, delay=0.1)
    job.await_step("g1", AT)
    before = job.pids("g1")
    os.kill(before[1], signal.SIGKILL)
    for rank in range(RANKS):
        job.wait_for(schema.Rejoined, 240, group="g1", rank=rank)
    after, torchrun = job.pids("g1"), job.launchers["g1"]
    assert not set(after.values()) & set(before.values())
    assert {psutil.Process(pid).ppid() for pid in after.values()} == {torchrun.pid}, "by the same torchrun"
    job.hurry()
    facts = job.finish(within_s=240)
    check(facts, 200)
    assert facts.codes == {"g0": 0, "g1": 0}
    assert facts.lost.keys() == {"g1"} and facts.lost["g1"].cause.startswith("rank 1 was killed by SIGKILL")
    assert {e.rank for e in facts.all(schema.Healed)} == set(range(RANKS))
    assert len({e.incarnation for e in facts.all(schema.Committed, group="g1")}) == 2


@pytest.mark.long
def test_a_signal_to_torchrun_lets_the_group_leave(job: TorchrunJob) -> None:
    """torchrun hands it to its ranks, and kills those that have not ended after 30 s."""
    for group in ("g0", "g1"):
        job.torchrun(group, steps=200, delay=0.05)
    job.await_step("g1", AT)
    job.launchers["g1"].send_signal(signal.SIGTERM)
    job.until(lambda: job.launchers["g1"].poll() is not None, "the end of g1's torchrun")
    job.hurry()
    facts = job.finish(within_s=240)
    check(facts, 200)
    assert facts.codes["g0"] == 0 and facts.members[-1] == ("g0",)
    assert "this group leaves before step" in facts.said["g1"]
    assert "g1 left before step" in facts.said["g0"] and "SIGTERM to rank" in facts.said["g0"]
    assert not [e for e in facts.all(schema.GroupLost) if e.detected_by != "left"]


@pytest.mark.long
def test_the_torchrun_of_one_of_two_nodes_is_killed(job: TorchrunJob) -> None:
    """The first rank of the second node has started an agent, which finds the manager at the lighthouse."""
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint")
    words = (*words, f"127.0.0.1:{port_below_ephemeral()}")
    job.torchrun("g0", steps=150, delay=0.05)
    for suffix in ("", ".1"):
        job.torchrun("g1", words=words, suffix=suffix, steps=150, delay=0.05)
    job.await_step("g1", AT)
    torchrun = psutil.Process(job.pids("g1")[1]).parent()
    assert torchrun is not None
    torchrun.kill()
    lost = job.wait_for(schema.GroupLost, group="g1")
    node = f"node 1 ({socket.gethostname()})"
    assert lost.cause == f"the launcher of the ranks of {node}, torchrun (pid {torchrun.pid}) was killed by SIGKILL"
    job.hurry()
    facts = job.finish(within_s=240)
    check(facts, 150)
    assert sorted(facts.codes.items(), key=str)[0] == ("g0", 0)
    assert sorted(code for name, code in facts.codes.items() if name != "g0") == [-9, 1]
    assert "agent g1/1: serves ranks 1 to 1 for the manager at" in facts.said["g1"] + facts.said["g1.1"]
