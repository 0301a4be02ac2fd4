"""A group on several nodes: one agent each, the manager on the first. Whatever dies, the whole group ends, and who is
to blame is named. The ranks are plain ones: what they compute plays no part in it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import port_below_ephemeral
from healed import PATIENT
from node_job import NodeJob

from lightkeeper.events import schema

STEPS = 200
SAVES_S = 8.0
HOST = socket.gethostname()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodeJob]:
    made = NodeJob(tmp_path / "run")
    made.settings["groups"] = 2
    yield made
    made.end()


def start(job: NodeJob, steps: int = STEPS, lease: tuple[str, str] = PATIENT) -> None:
    """g0 on two nodes of two ranks each, and g1 with as many on one; both train, slowly until they are to hurry."""
    job.start_lighthouse(*lease)
    slow = {"steps": steps, **job.lingering(0.5)}
    for node in (1, 0):
        job.start_node("g0", node, ranks=2, child=True, **slow)
    job.start_node("g1", nnodes=1, ranks=4, **slow)
    for rank in range(4):
        job.await_step("g0", rank, 3)


def check_survivor(job: NodeJob, codes: dict[str, int]) -> None:
    """g1 goes on alone to its end; g0 is gone from all its nodes, and what its ranks had started with it."""
    job.hurry()
    facts = job.finish()
    assert facts.codes == {**codes, "g1": 0}
    assert facts.members == [("g0", "g1"), ("g1",)]
    assert len(job.traced("g1", 0)) == STEPS
    for rank in range(1, 4):
        ours = [(e["step"], e["epoch"]) for e in job.traced("g0", rank)]
        both = min(len(ours), len(job.traced("g0", 0)))
        assert ours[:both] == [(e["step"], e["epoch"]) for e in job.traced("g0", 0)][:both]


def test_a_group_on_two_nodes_trains_to_the_end(job: NodeJob) -> None:
    start(job, steps=20)
    job.hurry()
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g0.1": 0, "g1": 0}
    commits = [[(e["step"], e["share"]) for e in job.traced("g0", rank)] for rank in range(4)]
    assert len(commits[0]) == 20 and all(other == commits[0] for other in commits)
    served = [job.traced("g0", rank, "registered")[0] for rank in range(4)]
    assert len({entry["incarnation"] for entry in served}) == 1
    launchers = [job.launchers[name].pid for name in ("g0", "g0", "g0.1", "g0.1")]
    assert [entry["served_by"] for entry in served] == launchers
    assert "agent g0/1: serves ranks 2 to 3 for the manager at" in facts.said["g0.1"]


def test_a_rank_of_the_second_node_is_killed(job: NodeJob) -> None:
    start(job)
    os.kill(job.pid_of("g0", 3), signal.SIGKILL)
    lost = job.lost("g0")
    assert lost.cause == "rank 3 was killed by SIGKILL" and lost.detected_by == "manager"
    assert lost.phase in ("compute", "vote") and lost.step >= 3
    check_survivor(job, {"g0": 137, "g0.1": 137})
    assert "agent g0/1: ends with exit code 137: rank 3 was killed by SIGKILL" in job.said("g0.1")
    assert "no word from" not in job.said("g0"), "its agent has said that nothing runs there any more"
    kept = {e.process: e for e in job.events() if isinstance(e, schema.Evidence) and e.group == "g0"}
    assert kept["agent g0/1"].folder.endswith("-ended-node1") and "log-rank3" in kept["agent g0/1"].taken
    assert kept["agent g0/1"].missing["stacks-rank3"] == "it was killed by SIGKILL"
    assert (
        kept["manager g0"].folder.endswith("-killed") and {"log-rank0", "log-rank1"} <= kept["manager g0"].taken.keys()
    )


@pytest.mark.long
def test_a_rank_of_the_first_node_is_killed(job: NodeJob) -> None:
    start(job)
    os.kill(job.pid_of("g0", 0), signal.SIGKILL)
    assert job.lost("g0").cause == "rank 0 was killed by SIGKILL"
    check_survivor(job, {"g0": 137, "g0.1": 137})


def test_the_second_agent_is_killed(job: NodeJob) -> None:
    start(job)
    agent = job.launchers["g0.1"].pid
    os.kill(agent, signal.SIGKILL)
    lost = job.lost("g0")
    assert lost.cause == f"the agent of node 1 ({HOST}, pid {agent}) is gone" and lost.detected_by == "manager"
    check_survivor(job, {"g0": 107, "g0.1": -9})


def test_the_manager_is_killed(job: NodeJob) -> None:
    start(job)
    os.kill(job.launchers["g0"].pid, signal.SIGKILL)
    job.until(lambda: job.launchers["g0.1"].poll() is not None, "the end of the agent")
    assert "the group's manager at" in job.said("g0.1") and "is gone" in job.said("g0.1")
    assert not [rank for rank in (2, 3) if psutil.pid_exists(job.pid_of("g0", rank))]
    os.kill(job.launchers["g1"].pid, signal.SIGKILL)  # nobody waits for g0: the broken stream alone is no reason
    job.finish()


def test_a_frozen_agent_ends_the_group_within_the_lease_and_its_ranks_when_it_thaws(job: NodeJob) -> None:
    start(job)
    agent = job.launchers["g0.1"].pid
    os.kill(agent, signal.SIGSTOP)
    lost = job.lost("g0")
    assert lost.cause.startswith(f"node 1 ({HOST}, pid {agent}) has not been heard for ")
    job.until(lambda: job.launchers["g0"].poll() is not None, "the end of the manager")
    assert f"no word from node 1 ({HOST}, pid {agent}) that nothing runs there any more" in job.said("g0")
    os.kill(agent, signal.SIGCONT)
    check_survivor(job, {"g0": 107, "g0.1": 107})


@pytest.mark.long
def test_a_manager_that_stood_still_for_longer_than_the_lease_blames_itself(job: NodeJob) -> None:
    start(job, lease=("--lease-s", "2"))  # shorter than a ping is waited for, which would end the agent before
    manager = job.launchers["g0"].pid
    os.kill(manager, signal.SIGSTOP)
    job.until(lambda: job.launchers["g0.1"].poll() is not None, "the end of the agent")
    assert "nothing was heard of the manager at" in job.said("g0.1")
    assert not [rank for rank in (2, 3) if psutil.pid_exists(job.pid_of("g0", rank))]
    os.kill(manager, signal.SIGCONT)
    assert job.lost("g0").cause.startswith("this manager stood still for")
    check_survivor(job, {"g0": 107, "g0.1": 107})


def test_a_signal_to_any_agent_lets_the_group_leave(job: NodeJob) -> None:
    start(job)
    job.launchers["g0.1"].send_signal(signal.SIGTERM)
    job.until(lambda: all(job.traced("g0", rank, "left") for rank in range(4)), "all ranks have left")
    assert len({job.traced("g0", rank, "left")[0]["step"] for rank in range(4)}) == 1
    check_survivor(job, {"g0": 0, "g0.1": 0})
    assert not [e for e in job.events() if isinstance(e, schema.GroupLost) and e.detected_by != "left"]


ENDS_SECOND = """
import os, signal, time
if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 6:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["signal", "notice"])
def test_an_agent_that_is_asked_in_a_pause_still_tells_the_others(job: NodeJob, tmp_path: Path, how: str) -> None:
    """Both nodes start again at the same time; one that said nothing would be waited for by the other."""
    script, notice = tmp_path / "script.py", tmp_path / "notice"
    script.write_text(ENDS_SECOND)
    job.start_lighthouse(*PATIENT)
    job.start_node("g0", 0, settings={"groups": 1}, script=script, restarts=9)
    job.start_node("g0", 1, settings={"groups": 1, "notice_file": notice}, script=script, restarts=9)
    job.until(lambda: "started again in 8 s" in job.said("g0.1"), "a pause long enough to be met")
    job.launchers["g0.1"].send_signal(signal.SIGTERM) if how == "signal" else notice.write_text("60")
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g0.1": 0}, facts.said
    why = f"asked to leave ({'SIGTERM' if how == 'signal' else f'notice in {notice}'})"
    assert f"agent g0/1: {why}: looks for the manager of g0 for up to" in job.said("g0.1")
    assert [job.said(node).count("is started again") for node in ("g0", "g0.1")] == [6, 6], "asked, it is not"


def test_a_node_whose_ranks_take_longer_to_end_than_a_lease_is_waited_for(job: NodeJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('start', flush=True)\ntime.sleep(600)\n")  # killed only when its time is up
    job.start_lighthouse("--lease-s", "3")
    for node in (0, 1):
        job.start_node("g0", node, settings={"groups": 1}, script=script)
    job.until(lambda: "start" in job.said("g0") and "start" in job.said("g0.1"), "all ranks run")
    job.launchers["g0.1"].send_signal(signal.SIGTERM)
    assert job.finish().codes == {"g0": 0, "g0.1": 0}
    assert "no word from" not in job.said("g0")


def test_an_agent_that_is_asked_twice_looks_no_longer(job: NodeJob) -> None:
    job.start_lighthouse(*PATIENT)
    agent = job.start_node("g0", 1)
    job.until(lambda: "waits for the manager of g0 since" in job.said("g0.1"), "it waits")
    agent.send_signal(signal.SIGTERM)
    job.until(lambda: "looks for the manager of g0 for up to 5 s" in job.said("g0.1"), "it looks on")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=120) == 143


@pytest.mark.long
def test_the_manager_may_listen_where_it_was_told(job: NodeJob) -> None:
    """Without a lighthouse that could say where it is, at first: the agent waits for the manager, and finds it."""
    port = port_below_ephemeral()
    settings = {"groups": 1, "manager": f"127.0.0.1:{port}", "outage_budget_s": 60}
    job.start_node("g0", 1, settings={**settings, "lighthouse": "127.0.0.1:1"}, steps=5)
    waits = re.compile(rf"waits for the manager of g0 since \d+ s: the manager at 127\.0\.0\.1:{port}")
    job.until(lambda: waits.search(job.said("g0.1")) is not None, "it says where it looks")
    job.start_lighthouse(*PATIENT)
    job.start_node("g0", 0, settings=settings, steps=5)
    assert job.finish().codes == {"g0": 0, "g0.1": 0}
    assert len(job.traced("g0", 1)) == 5


def test_an_agent_that_was_started_otherwise_is_refused_in_one_line(job: NodeJob) -> None:
    job.start_lighthouse(*PATIENT)
    job.start_node("g0", 0, nnodes=3, steps=5, settings={"groups": 1})
    other = job.start_node("g0", 1, nnodes=2, steps=5, settings={"groups": 1})
    assert other.wait(timeout=120) == 103
    assert job.said("g0.1").splitlines()[-1].endswith("this group's manager has --nnodes 3, and the agent --nnodes 2")
    awaited = "waiting for the agents of nodes 1, 2 (the group has 3 nodes) since"
    job.until(lambda: awaited in job.said("g0"), "it says who is missing")
    job.launchers["g0"].send_signal(signal.SIGTERM)
    assert job.finish().codes == {"g0": 0, "g0.1": 103}


def test_a_node_that_cannot_come_says_why_in_one_line(job: NodeJob) -> None:
    job.start_lighthouse(*PATIENT)
    taken = job.lighthouse.rpartition(":")[2]
    codes = {
        "g0": job.start_node("g0", 0, settings={"manager": f"127.0.0.1:{taken}"}),
        "g1.1": job.start_node("g1", 1, settings={"token": "wrong"}),
        "g2.1": job.start_node("g2", 1, settings={"lighthouse": "127.0.0.1:1", "outage_budget_s": 1}),
        "g3.1": job.start_node("g3", 1),
    }
    job.until(lambda: "waits for the manager of g3 since" in job.said("g3.1"), "it waits for its manager")
    codes["g3.1"].send_signal(signal.SIGTERM)
    assert {name: child.wait(timeout=120) for name, child in codes.items()} == {
        "g0": 2,
        "g1.1": 103,
        "g2.1": 105,
        "g3.1": 0,
    }
    lines = {name: job.said(name).splitlines() for name in codes}
    assert lines["g0"] == [f"lightkeeper: --manager 127.0.0.1:{taken}: cannot listen at port {taken}, is it in use?"]
    assert lines["g1.1"][-1].startswith(f"agent g1/1: the lighthouse at {job.lighthouse} refused our token")
    assert (
        "the lighthouse at 127.0.0.1:1 is not reachable (connection refused); start this node again"
        in lines["g2.1"][-1]
    )
    told = list(dict.fromkeys(re.sub(r"since \d+ s", "since N s", line) for line in lines["g3.1"]))
    assert told == [  # it says the first again if it waits for long
        f"agent g3/1: waits for the manager of g3 since N s: the lighthouse at {job.lighthouse} knows no manager of g3 "
        "that lives",
        "agent g3/1: asked to leave (SIGTERM): looks for the manager of g3 for up to 5 s, to say so",
    ]
    job.until(lambda: not job.left_over(), "nothing is left")


@pytest.mark.long
def test_the_group_that_keeps_the_last_step_waits_for_its_ranks_on_all_nodes(job: NodeJob) -> None:
    """Longer than a lease, and than the other ranks take; then all of its nodes end alike."""
    job.settings.update(minimum=2)
    job.start_lighthouse("--lease-s", str(SAVES_S / 2))
    slow = {"settings": {"quorum_wait_s": 1}, "steps": STEPS, "delay": 0.5}
    for node in (1, 0):
        job.start_node("g0", node, ranks=2, saves=SAVES_S, **slow)
    job.start_node("g1", nnodes=1, ranks=4, **slow)
    for rank in range(4):
        job.await_step("g0", rank, 3)
    os.kill(job.pid_of("g1", 2), signal.SIGKILL)
    facts = job.finish()
    assert facts.codes == {"g0": 105, "g0.1": 105, "g1": 137}
    last = job.traced("g0", 0)[-1]["step"]
    assert [job.traced("g0", rank, "kept") for rank in range(4)] == [[{"kind": "kept", "step": last}]] * 4
    stopped = facts.one(schema.JobStopped)
    assert stopped.keep == "g0" and stopped.reason.startswith("quorum lost: g1 lost: rank 2 was killed by SIGKILL")
    assert "ends with exit code 105: quorum lost" in facts.said["g0.1"]
