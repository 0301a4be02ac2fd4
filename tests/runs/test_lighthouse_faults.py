"""The lighthouse dies: training goes on without it, and a later fault waits for the next one."""

from __future__ import annotations

import pytest
from harness import ASKED_S_MAX, Job
from healed import PATIENT

from lightkeeper.events import schema

pytestmark = pytest.mark.usefixtures("dealt_evenly")  # other shares are an epoch, and epochs are counted here

STEPS = 30


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def test_training_and_finishing_need_no_lighthouse(job: Job, gold) -> None:
    job.start_all(3, steps=STEPS, **job.lingering(0.5))
    job.wait_for(schema.Committed, group="g0", step=2)
    job.kill_lighthouse()
    job.until(lambda: all("is not reachable" in job.said(group) for group in job.trainers), "all say so")
    job.hurry()
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1", "g2"})
    assert not facts.lost and len(facts.epochs) == 1
    assert all("is not reachable" in text and text.count("is not reachable") == 1 for text in facts.said.values())
    facts.near(gold(steps=STEPS), "g0")


def test_restarted_with_its_log_it_recovers_a_later_kill(job: Job, gold) -> None:
    job.start_all(3, fault="kill:g2:reduce:20", steps=STEPS, **job.lingering(0.3))
    job.wait_for(schema.Committed, group="g0", step=1)
    port = job.kill_lighthouse()
    job.wait_for(schema.Committed, group="g0", step=3)
    job.start_lighthouse(*PATIENT, port=port)
    assert not [e for e in job.events() if isinstance(e, schema.FaultInjected)], "the fault was to come later"
    job.hurry()
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    facts.fault("kill", "reduce", "g2", 20)
    first, second = facts.epochs[0], facts.epochs[-1]  # one in vain may lie between
    assert second.epoch > first.epoch and second.term > first.term
    assert facts.lost.keys() == {"g2"}
    facts.near(gold(steps=STEPS), "g0")


def test_a_kill_while_there_is_none_waits_for_the_next(job: Job) -> None:
    """A death while nobody reigns pauses the job; it never splits it."""
    job.settings["outage_budget_s"] = 60  # a lighthouse takes its time to start on a busy machine
    job.start_all(3, fault="kill:g2:reduce:12", steps=STEPS, **job.lingering(0.5))
    job.wait_for(schema.Committed, group="g0", step=2)
    port = job.kill_lighthouse()
    job.hurry()
    job.wait_for(schema.ReduceFailed, group="g0")
    job.wait_for(schema.ReduceFailed, group="g1")
    assert max(e.step for e in job.events() if isinstance(e, schema.Committed)) == 11
    job.start_lighthouse(*PATIENT, port=port)
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    assert facts.epochs[-1].first_step == 12 and facts.epochs[-1].epoch > facts.epochs[0].epoch


def test_restarted_without_its_log_it_may_not_leave_anybody_out(job: Job) -> None:
    """It needs every member's word, and one is dead with its manager: the job waits, and says for whom."""
    job.settings["outage_budget_s"] = 12
    job.start_all(3, fault="kill-tree:g2:reduce:28", steps=STEPS, **job.lingering(0.3))
    job.wait_for(schema.Committed, group="g0", step=2)
    port = job.kill_lighthouse()
    job.hurry()
    job.wait_for(schema.ReduceFailed, group="g1")
    (job.folder / "log").rename(job.folder / "log-lost")
    job.start_lighthouse(*PATIENT, port=port)
    waiting = job.wait_for(schema.Waiting, whom="g2")
    assert "may not leave anybody out" in waiting.why
    facts = job.finish()
    assert facts.codes == {"g0": -9, "g1": -9, "g2": -9}, "they give up after their budget"
    assert all("outage budget" in facts.said[group] for group in ("g0", "g1"))
    assert max(facts.commits("g0")) == 27 and len(facts.epochs) == 1


def test_restarted_without_its_log_while_all_live(job: Job) -> None:
    """Every member has acknowledged its term, so it reigns again; and its numbers are above all that were used."""
    job.start_all(3, fault="kill:g2:reduce:28", steps=STEPS, **job.lingering(0.5))
    job.wait_for(schema.Committed, group="g0", step=2)
    port = job.kill_lighthouse()
    (job.folder / "log").rename(job.folder / "log-lost")
    job.start_lighthouse(*PATIENT, port=port)
    job.until(lambda: all("is back" in job.said(g) for g in ("g0", "g1", "g2")), "all are in touch again")
    assert not [e for e in job.events() if isinstance(e, schema.FaultInjected)], "the fault was to come later"
    job.hurry()
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    assert facts.epochs[-1].epoch > facts.epochs[0].epoch


def test_a_port_in_use(job: Job) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "lightkeeper", "lighthouse", "--bind", job.lighthouse]
    done = subprocess.run(command, env=job._environment({}), capture_output=True, text=True, timeout=ASKED_S_MAX)
    assert done.returncode == 2 and "the port is in use" in done.stderr and "Traceback" not in done.stderr
    job.finish()
