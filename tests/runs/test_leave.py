"""A planned leave: nobody is blamed, no step is lost, the old epoch is closed in order."""

from __future__ import annotations

import signal

import pytest
from harness import Job

from lightkeeper.events import schema

STEPS = 60


def test_sigterm_to_a_launched_group(job: Job, gold) -> None:
    job.settings["groups"] = 3
    job.start_lighthouse()
    launcher = job.launch("g2", steps=STEPS, delay=0.01)
    job.start("g0", steps=STEPS, delay=0.01)
    job.start("g1", steps=STEPS, delay=0.01)
    job.wait_for(schema.Committed, group="g2", step=3, within_s=60)
    launcher.send_signal(signal.SIGTERM)
    facts = job.finish()
    assert not facts.lost, facts.lost
    assert not facts.all(schema.ReduceFailed) and not facts.all(schema.Recovered)
    facts.check(STEPS, {"g0", "g1"}, {"g2": 0}, left={"g2"})
    assert facts.members == [("g0", "g1", "g2"), ("g0", "g1")]
    prepared = facts.all(schema.Prepared, change="planned")
    assert [e.members for e in prepared] == [("g0", "g1")]
    left = facts.one(schema.Left)
    assert left.group == "g2" and left.mono_ns < min(e.mono_ns for e in facts.all(schema.Finished, group="g0"))
    last = max(facts.commits("g2"))
    assert (
        last < STEPS - 1
        and facts.commits("g0")[last].epoch == 1
        and facts.commits("g0")[last + 1].epoch == prepared[0].epoch
    )
    facts.near(gold(steps=STEPS), "g0")


def test_sigterm_to_the_only_group(job: Job) -> None:
    job.start_lighthouse()
    launcher = job.launch("g0", steps=STEPS, delay=0.02)
    job.wait_for(schema.Committed, step=3, within_s=60)
    launcher.send_signal(signal.SIGTERM)
    job.wait("g0", within_s=15)
    facts = job.finish()
    assert facts.codes == {"g0": 0}, facts.said
    assert not facts.lost
    stopped = facts.one(schema.JobStopped)
    assert stopped.ok and "asked to leave" in stopped.reason and "SIGTERM" in stopped.reason


@pytest.mark.parametrize("second_s", [0.0])
def test_sigterm_twice_ends_at_once(job: Job, second_s: float) -> None:
    job.start_lighthouse()
    launcher = job.launch("g0", steps=STEPS, delay=2.0)
    job.wait_for(schema.Activated, process="manager g0", within_s=60)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGINT)
    job.wait("g0", within_s=8)
    facts = job.finish()
    assert facts.codes == {"g0": 143}
    assert "asked to end at once" in facts.said["g0"]


def test_asking_from_within_the_script(job: Job) -> None:
    """A rank may ask as well (`AskLeave`), for instance when its machine gives notice."""
    job.start_all(3, steps=STEPS, delay=0.01, only={"g1": {"behave": "ask-leave:5"}})
    facts = job.finish()
    assert not facts.lost
    facts.check(STEPS, {"g0", "g2"}, {"g1": 0}, left={"g1"})
    assert facts.members == [("g0", "g1", "g2"), ("g0", "g2")]


def test_one_dies_while_another_leaves(job: Job) -> None:
    """The planned change is given up for the recovery, and the leaver leaves after it."""
    job.start_all(
        4, steps=STEPS, delay=0.01, microbatches=8, fault="kill:g3:reduce:6", only={"g1": {"behave": "ask-leave:5"}}
    )
    facts = job.finish()
    assert facts.lost.keys() == {"g3"}
    facts.check(STEPS, {"g0", "g2"}, {"g1": 0, "g3": -9}, left={"g1"})
    assert facts.members[-1] == ("g0", "g2")


def test_a_leaver_does_not_say_that_it_finished(job: Job) -> None:
    """`finished` means the end of the run; the leaver's line is `left`."""
    job.start_all(2, steps=20, delay=0.01, only={"g1": {"behave": "ask-leave:5"}})
    facts = job.finish()
    facts.one(schema.Left, group="g1")
    assert not facts.all(schema.Finished, group="g1")
