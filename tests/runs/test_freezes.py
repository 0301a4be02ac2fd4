"""SIGSTOP: a frozen group is left out after the lease, fenced, and whatever it does after its thaw has no effect."""

from __future__ import annotations

import os
import signal

import pytest
from harness import Job

from lightkeeper.events import schema
from lightkeeper.events.reader import seconds_between

STEPS, AT, LEASE_S = 10, 5, 1.0
PATIENT_S = 3.0  # a lease that no manager which runs overruns because the machine is busy
LIVE = {"g0", "g1"}


@pytest.mark.parametrize("phase", ["compute", "reduce"])
def test_a_frozen_trainer_is_left_out_fenced_and_killed(job: Job, phase: str) -> None:
    job.start_lighthouse("--lease-s", str(PATIENT_S))
    job.start_all(3, fault=f"freeze:g2:{phase}:{AT}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9})  # its manager, which runs, has killed it
    fault = facts.fault("freeze", phase, "g2", AT)
    lost = facts.lost["g2"]
    assert facts.lost.keys() == {"g2"} and lost.detected_by == "frozen"
    assert seconds_between(fault, lost) >= PATIENT_S - 0.2
    fences = facts.all(schema.Fenced)
    assert len(fences) == 1 and fences[0].incarnation == fault.incarnation
    assert "exit code 104" in facts.said["g2"] and "stopped" in facts.said["g2"]
    assert max(facts.commits("g2")) == AT - 1
    assert sorted(k for r in facts.all(schema.Recovered, step=AT) for k in r.further) == [4, 5]


@pytest.mark.parametrize("phase", ["compute", "reduce", "vote"])
def test_a_frozen_tree_thaws_to_find_itself_left_out(job: Job, phase: str) -> None:
    job.start_all(3, fault=f"freeze-tree:g2:{phase}:{AT}", steps=STEPS)
    fault = job.wait_for(schema.FaultInjected)
    manager = job.manager_pid("g2")
    job.wait("g0", "g1")
    assert job.trainers["g2"].exitcode is None
    before = [e for e in job.events() if e.process == "rank g2/0"]
    os.kill(manager, signal.SIGCONT)
    os.kill(job.trainers["g2"].pid, signal.SIGCONT)
    job.wait("g2")
    facts = job.finish()
    facts.fault("freeze-tree", phase, "g2", AT)
    after = [e for e in facts.events if e.process == "rank g2/0"][len(before) :]
    assert not [e for e in after if isinstance(e, schema.Committed | schema.Finished)], after
    facts.check(STEPS, LIVE, {"g2": facts.codes["g2"]})
    assert facts.codes["g2"] not in (0, None)
    assert facts.lost.keys() == {"g2"} and facts.lost["g2"].detected_by == "lease"
    assert seconds_between(fault, facts.lost["g2"]) >= LEASE_S - 0.3
    assert "manager g2: ends with exit code" in facts.said["g2"], "it must say why it ends"


def test_thawed_while_the_job_still_runs(job: Job) -> None:
    """The lighthouse is there and fences the incarnation by name."""
    job.start_all(3, fault=f"freeze-tree:g2:reduce:{AT}", steps=60, **job.lingering(0.3))
    job.wait_for(schema.FaultInjected)
    manager = job.manager_pid("g2")
    job.wait_for(schema.Committed, group="g0", step=AT + 2)
    os.kill(manager, signal.SIGCONT)
    os.kill(job.trainers["g2"].pid, signal.SIGCONT)
    job.wait("g2")
    assert job.trainers["g0"].exitcode is None, "the job was to be running still"
    job.hurry()
    facts = job.finish()
    facts.check(60, LIVE, {"g2": -9})
    assert facts.lost.keys() == {"g2"}
    assert "ends with exit code 104: left out of the job" in facts.said["g2"]
    assert max(facts.commits("g2")) == AT - 1


def test_a_short_freeze_evicts_nobody(job: Job) -> None:
    """Shorter than the lease: the others stand for it, and that is all."""
    job.start_lighthouse("--lease-s", "10")  # also if this test is slow to let it go on
    job.start_all(3, fault=f"freeze-tree:g2:compute:{AT}", steps=STEPS)
    fault = job.wait_for(schema.FaultInjected)
    manager = job.manager_pid("g2")
    job.until(lambda: _stopped(manager) and _stopped(fault.pid), "both are stopped")
    os.kill(manager, signal.SIGCONT)
    os.kill(fault.pid, signal.SIGCONT)
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1", "g2"})
    assert not facts.lost and len(facts.epochs) == 1


def _stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"T"
