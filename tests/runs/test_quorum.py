"""Too few groups are left: the job ends as one, and one group alone keeps its last committed step."""

from __future__ import annotations

import pytest
from harness import Job

from lightkeeper.events import schema, why
from lightkeeper.events.of_progress import Stuck
from lightkeeper.events.verdict import incidents
from lightkeeper.manager import exits


def test_the_survivor_keeps_the_last_step_once_and_nobody_hurries_it(job: Job) -> None:
    """Scenario 57 before the restart: two of three are killed, and the save takes longer than lease and stall floor."""
    job.settings.update(groups=3, minimum=2, quorum_wait_s=1, stall_floor_s=1.25)
    job.start_all(3, "kill:g1:reduce:6,kill:g2:reduce:6", steps=400, delay=0.01, behave="keeps:2")
    facts = job.finish()
    assert facts.codes == {"g0": 1, "g1": -9, "g2": -9}, facts.said
    assert facts.one(schema.ProcessEnded, process="manager g0").exit_code == exits.GAVE_UP
    assert len(facts.all(schema.FaultInjected)) == 2 and facts.lost.keys() == {"g1", "g2"}
    last = max(facts.commits("g0"))
    trace = facts.traces["g0"]
    ((step, fingerprint, reason),) = trace.all("keeps")
    assert step == last and fingerprint == facts.commits("g0")[last].fingerprint, (
        "what it holds is the state after its last commit"
    )
    assert trace.all("kept") == [[]], "it was not killed over it"
    assert not any(facts.traces[group].all("keeps") for group in ("g1", "g2"))
    stopped = facts.one(schema.JobStopped)
    assert (stopped.ok, stopped.keep, stopped.reason) == (False, "g0", reason)
    assert reason.startswith("quorum lost: ") and "g1" in reason and "g2" in reason and "SIGKILL" in reason
    assert f"g0 keeps the state after step {last}, " in reason
    assert not facts.all(Stuck) and not facts.all(schema.Fenced, group="g0")
    assert f"ends with exit code 105: {reason}" in facts.said["g0"]
    told = "\n".join(line for incident in incidents(facts.events) for line in why.lines(incident))
    assert "quorum lost: the job ended, and g0 alone was to keep its last step" in told
    assert "then start all groups again" in told and "bug" not in told


@pytest.mark.long
def test_a_save_that_hangs_is_ended_at_the_deadline(job: Job) -> None:
    job.settings.update(groups=2, minimum=2, quorum_wait_s=1, stop_deadline_s=3)
    job.start_lighthouse()
    job.launch("g0", steps=400, delay=0.01, behave="keeps:60")
    job.start("g1", "kill:g1:reduce:6", steps=400, delay=0.01)
    facts = job.finish()
    assert facts.codes == {"g0": exits.GAVE_UP, "g1": -9} and "is started again" not in facts.said["g0"]
    assert "rank 0 has not ended 3 s after it was told to keep step" in facts.said["g0"]
    assert not facts.traces["g0"].all("kept")
    (evidence,) = [event for event in facts.all(schema.Evidence, group="g0") if event.folder.endswith("gave-up")]
    assert "stacks-rank0" in evidence.taken, "where it hung"


@pytest.mark.long
def test_a_rank_that_ends_before_another_has_saved_does_not_end_the_group(job: Job) -> None:
    job.settings.update(groups=2, minimum=2, quorum_wait_s=1)
    job.start_lighthouse()
    job.launch("g0", settings={"ranks": 2}, loop="sharded", steps=400, delay=0.01, behave="keeps:3")  # of rank 0
    job.launch("g1", "kill:g1/1:reduce:6", settings={"ranks": 2}, loop="sharded", steps=400, delay=0.01)
    facts = job.finish()
    assert facts.codes["g0"] == exits.GAVE_UP, facts.said["g0"]
    trace = job.trace("g0.0")
    assert [keeps[0] for keeps in trace.all("keeps")] == [max(trace.digests)] and trace.all("kept") == [[]]
