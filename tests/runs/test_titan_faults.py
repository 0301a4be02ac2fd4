"""Each kind of fault in torchtitan jobs of three shapes, healed; beside torchtitan's own HSDP that nothing befalls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from harness import Job
from test_titan import HEAL_S, START_S, arguments, holds, plain, start
from test_titan import pytestmark as needed

from lightkeeper.events import schema
from lightkeeper.manager import exits

pytestmark = [*(mark for mark in needed if mark.name != "timeout"), pytest.mark.long, pytest.mark.timeout(2400)]

STEPS, AT, COMPARED = 120, 9, 30
Killed = Callable[[Job], None]


@pytest.fixture(scope="module")
def hsdp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], dict[int, float]]:
    """A function from groups and ranks to the losses of torchtitan's HSDP on as many ranks, run once for each shape."""
    known: dict[tuple[int, int], dict[int, float]] = {}

    def of(groups: int, ranks: int) -> dict[int, float]:
        if (groups, ranks) not in known:
            shape = [
                "--parallelism.data_parallel_replicate_degree", str(groups),
                "--parallelism.data_parallel_shard_degree", str(ranks),
            ]  # fmt: skip
            folder = tmp_path_factory.mktemp("hsdp")
            lines = plain(folder, groups * ranks, STEPS, *shape, stop=COMPARED, within_s=1200)
            known[groups, ranks] = {step: line["exact"] for step, line in lines.items()}
        return known[groups, ranks]

    return of


def tree(job: Job, group: str) -> list[psutil.Process]:
    """The group's launcher, its manager, its ranks."""
    launcher = psutil.Process(job.launchers[group].pid)
    return [launcher, *launcher.children(recursive=True)]


def again(job: Job, group: str, faults: str = "") -> None:
    """Starts a group whose launcher was killed by the same line; what the first one printed is kept."""
    job.until(lambda: job.launchers[group].poll() is not None, f"the end of the launcher of {group}")
    assert job.launchers[group].returncode == -signal.SIGKILL
    job.output(group).rename(job.folder / f"{group}-first.out")
    job.start_command(group, arguments(job, group, STEPS), faults, env={"LIGHTKEEPER_RESTARTS": "0"})


def torchrun(job: Job, group: str, ranks: int) -> None:
    """Starts a group by torchrun alone, with nothing of ours around it."""
    words = ["--local-addr", "127.0.0.1", "--standalone", "--nproc-per-node", str(ranks)]
    more = {"LIGHTKEEPER_ENABLE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with job.output(group).open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *arguments(job, group, STEPS)],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=job._group_environment(group, "", None, more),
        )  # fmt: skip
    job.launchers[group] = child
    job.started.add(child.pid)


def reached(job: Job, group: str = "g0", step: int = AT) -> None:
    job.wait_for(schema.Committed, START_S, group=group, step=step)


def traced(job: Job, group: str, rank: int) -> list[tuple[int, str]]:
    """Step and digest of all that every start of the group did, in order."""
    return [(line["step"], line["digest"]) for line in trace(job, group, rank)]


def trace(job: Job, group: str, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / f"titan-{group}.{rank}").read_text().splitlines()]


def check(facts: Any, job: Job, shape: tuple[int, int], lost: set[str], plain_losses: dict[int, float]) -> None:
    """What every run here must show, whatever befell the groups in `lost`."""
    groups, ranks = shape
    names = {f"g{i}" for i in range(groups)}
    assert facts.codes == dict.fromkeys(names, 0)
    assert facts.lost.keys() == lost, {name: (e.cause, e.detected_by) for name, e in facts.lost.items()}
    assert {e.group for e in facts.all(schema.Fenced)} <= lost
    assert set(facts.members[-1]) == names, facts.members
    for name in lost:
        assert facts.all(schema.Healed, group=name) and facts.all(schema.Rejoined, group=name)
    holds(facts, STEPS)
    for rank in range(ranks):
        state: dict[int, str] = {}
        for name in sorted(names):
            mine = traced(job, name, rank)
            assert mine[-1][0] == STEPS
            if name not in lost:
                assert [step for step, _ in mine] == list(range(1, STEPS + 1)), f"{name} did not do each step once"
            for step, digest in mine:
                assert state.setdefault(step, digest) == digest, f"step {step}, rank {rank}: {name} has other bits"
    whole = {line["step"]: line["exact"] for line in trace(job, min(names - lost), 0)}
    assert [whole[step] for step in plain_losses] == pytest.approx(list(plain_losses.values()), rel=1e-5)
    assert len(plain_losses) == COMPARED > AT + 10


# ---------------------------------------------------------------- processes die


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (3, 1)])
def test_a_whole_group_is_killed_and_started_again(job: Job, hsdp: Any, shape: tuple[int, int]) -> None:
    """SIGKILL of launcher, manager and ranks at once, as when its machine is gone."""
    start(job, *shape, STEPS)
    reached(job)
    victims = tree(job, "g1")
    assert len(victims) >= 2 + shape[1]
    for process in victims:
        process.kill()
    again(job, "g1")
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    assert facts.lost["g1"].step >= AT
    check(facts, job, shape, {"g1"}, hsdp(*shape))


@pytest.mark.parametrize("phase", ["compute", "reduce"])
def test_one_rank_of_two_is_killed(job: Job, hsdp: Any, phase: str) -> None:
    """Its group is gone as a whole, by its manager's word, and its launcher starts it again."""
    start(job, 2, 2, STEPS, f"kill:g1/1:{phase}:{AT}", restarts=2)
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    facts.fault("kill", phase, "g1", AT)
    assert facts.lost["g1"].detected_by == "manager" and "rank 1 was killed by SIGKILL" in facts.lost["g1"].cause
    assert max(e.step for e in facts.all(schema.Committed, incarnation=facts.lost["g1"].incarnation)) == AT - 1
    check(facts, job, (2, 2), {"g1"}, hsdp(2, 2))


def test_the_launcher_alone_is_killed(job: Job, hsdp: Any) -> None:
    """The manager and the ranks below it end with it; the same line starts the group again."""
    start(job, 2, 1, STEPS)
    reached(job)
    below = tree(job, "g1")[1:]
    os.kill(job.launchers["g1"].pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=60)
    assert len(below) >= 2 and not alive, "they outlive their launcher"
    again(job, "g1")
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    check(job.finish(within_s=HEAL_S), job, (2, 1), {"g1"}, hsdp(2, 1))


def test_the_torchrun_of_a_group_is_killed(job: Job, hsdp: Any) -> None:
    """The agent alone: its ranks do not go on as orphans, and the same line starts the group again."""
    job.settings.update(groups=2, outage_budget_s=60, bucket_mb=1)
    job.start_lighthouse()
    for group in ("g0", "g1"):
        torchrun(job, group, 2)
    reached(job)
    agent = job.launchers["g1"]
    ranks = psutil.Process(agent.pid).children()
    assert len(ranks) >= 2
    agent.kill()
    lost = job.wait_for(schema.GroupLost, 60, group="g1")
    assert f"torchrun (pid {agent.pid}) was killed by SIGKILL" in lost.cause and lost.detected_by == "manager"
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "they outlive their torchrun"
    assert agent.wait() == -signal.SIGKILL
    job.output("g1").rename(job.folder / "g1-first.out")
    torchrun(job, "g1", 2)
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    check(job.finish(within_s=HEAL_S), job, (2, 2), {"g1"}, hsdp(2, 2))


def test_two_groups_one_after_the_other(job: Job, hsdp: Any) -> None:
    """Three groups, then two, then one; both come back."""
    start(job, 3, 1, STEPS, f"kill:g1:reduce:{AT},kill:g2:compute:{AT + 5}", restarts=2)
    for group in ("g1", "g2"):
        job.wait_for(schema.Rejoined, HEAL_S, group=group)
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    faults = {(e.group, e.phase, e.step) for e in facts.all(schema.FaultInjected)}
    assert faults == {("g1", "reduce", AT), ("g2", "compute", AT + 5)}
    assert min(len(members) for members in facts.members) == 1
    check(facts, job, (3, 1), {"g1", "g2"}, hsdp(3, 1))


def test_the_group_that_serves_a_heal_is_killed(job: Job, hsdp: Any) -> None:
    """It dies with the first range that it is about to send; the joiner gets the state from the other one."""
    start(job, 3, 1, STEPS, f"kill:g2:reduce:{AT}", restarts=2, only={"g0": {"behave": "die-sending"}})
    for group in ("g2", "g0"):
        job.wait_for(schema.Rejoined, HEAL_S, group=group)
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    faults = {e.group: e for e in facts.all(schema.FaultInjected)}
    assert faults.keys() == {"g0", "g2"} and (faults["g2"].phase, faults["g2"].step) == ("reduce", AT)
    donated = [e for e in facts.all(schema.Copied, group="g0") if e.mono_ns < faults["g0"].mono_ns]
    rejoined = facts.all(schema.Rejoined, group="g2")[0]
    assert donated and faults["g0"].mono_ns < rejoined.mono_ns, "it did not die while it served"
    check(facts, job, (3, 1), {"g0", "g2"}, hsdp(3, 1))


# ---------------------------------------------------------------- processes freeze


@pytest.mark.parametrize(("shape", "phase"), [((2, 1), "reduce"), ((2, 2), "compute"), ((3, 1), "compute")])
def test_a_frozen_group_thaws_commits_nothing_and_heals(
    job: Job, hsdp: Any, shape: tuple[int, int], phase: str
) -> None:
    """SIGSTOP of a rank and its manager, SIGCONT once the others have gone on."""
    start(job, *shape, STEPS, f"freeze-tree:g1:{phase}:{AT}", restarts=2)
    fault = job.wait_for(schema.FaultInjected, START_S)
    manager = job.manager_pid("g1")
    job.wait_for(schema.Committed, START_S, group="g0", step=AT + 2)
    for pid in (manager, fault.pid):
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        os.kill(pid, signal.SIGCONT)
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    facts.fault("freeze-tree", phase, "g1", AT)
    assert facts.lost["g1"].detected_by == "lease" and facts.lost["g1"].incarnation == fault.incarnation
    done = facts.all(schema.Committed, incarnation=fault.incarnation)
    assert max(e.step for e in done) == AT - 1, "it committed after its thaw"
    assert f"exit code {exits.FENCED}" in facts.said["g1"], "it must say that it was left out"
    check(facts, job, shape, {"g1"}, hsdp(*shape))


def test_one_frozen_rank_of_two_is_found_by_its_manager(job: Job, hsdp: Any) -> None:
    start(job, 2, 2, STEPS, f"freeze:g1/1:compute:{AT}", restarts=2)
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    facts.fault("freeze", "compute", "g1", AT)
    assert facts.lost["g1"].detected_by == "frozen"
    check(facts, job, (2, 2), {"g1"}, hsdp(2, 2))
