"""The event log is never a reason for training to stop."""

from __future__ import annotations

import pytest
from harness import Job

from lightkeeper.events import schema

STEPS = 12


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse("--lease-s", "5")


def test_it_cannot_be_written_any_more(job: Job) -> None:
    """From some step on every write of one rank fails, as on a full disk."""
    job.start_all(2, steps=STEPS, only={"g1": {"behave": "full-disk:5"}})
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0}
    assert sorted(facts.commits("g0")) == list(range(STEPS)) and not facts.lost and len(facts.epochs) == 1
    assert max(facts.commits("g1")) < STEPS - 1, "the disk was not full at all"
    assert facts.said["g1"].count("events are being dropped") == 1
    digests = [facts.traces[group].digests[STEPS - 1] for group in ("g0", "g1")]
    assert digests[0] == digests[1]


def test_a_run_without_a_folder(job: Job) -> None:
    job.start_all(2, steps=STEPS, settings={"run_folder": ""})
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0}
    assert not facts.all(schema.Committed)
    assert facts.traces["g0"].digests == facts.traces["g1"].digests and len(facts.traces["g0"].digests) == STEPS
