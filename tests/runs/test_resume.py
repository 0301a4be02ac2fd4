"""A run that is started again from checkpoints of the user's own, and goes on as the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts import Gold
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.events.pretty import summary_lines
from lightkeeper.events.summary import samples_exactly_once

STEPS, AT = 128, 48  # slow ones: g0 has until `AT` to come back for the first time, and as long again after it
RAMP = [6, 4, 6, 8]


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


@pytest.fixture
def plain(tmp_path: Path, gold) -> Gold:
    """The plain run, which leaves a checkpoint after every step."""
    return gold(steps=STEPS, warm_up=12, microbatches=RAMP, dropout=0.5, save=str(tmp_path / "after-{}.pt"))


def resume(job: Job, groups: dict[str, int], fault: str = "", **options: object) -> None:
    """Groups that have each loaded a checkpoint with so many steps behind it; slow until they are told to hurry."""
    only = {group: {"resume": str(job.folder.parent / f"after-{step}.pt")} for group, step in groups.items()}
    job.start_healing(len(groups), fault, only, **{"steps": STEPS, "microbatches": RAMP, "dropout": 0.5, **options})


def test_the_furthest_checkpoint_begins_the_run_and_all_go_on_by_its_count(job: Job, plain: Gold) -> None:
    """g0 comes with an earlier one and heals; it is killed, and comes back with one that the job has left behind.

    With gradients folded in the order of the microbatches every state is the plain run's, to the last bit: steps,
    numbers of microbatches, data, dropout and learning rate all go by the index in the whole run.
    """
    job.variables["LIGHTKEEPER_REDUCTION"] = "fold"
    resume(job, {"g0": 5, "g1": 7}, f"kill:g0:reduce:{AT}", delay=0.12)
    job.wait_for(schema.Rejoined, group="g0", pid=job.trainers["g0"].pid)
    job.wait_for(schema.FaultInjected)
    job.return_of("g0", resume=str(job.folder.parent / "after-7.pt"))
    job.await_rejoin("g0")
    facts = job.finish()
    assert facts.codes == {"g0": -9, "g1": 0, "g0-again": 0}
    facts.fault("kill", "reduce", "g0", AT)
    assert facts.lost.keys() == {"g0"} and facts.lost["g0"].detected_by == "manager" and facts.lost["g0"].step == AT
    first = facts.epochs[0]
    assert (first.first_step, first.members) == (7, ("g1",)) and "g0" in facts.members[-1]
    assert {(e.group, e.step) for e in facts.all(schema.Joined)} == {("g0", 5), ("g1", 7), ("g0", 7)}
    healed = facts.all(schema.Healed, group="g0")
    assert [e.step for e in healed] == sorted(e.step for e in healed) and 9 <= healed[0].step < AT < healed[1].step
    for name, begins in (("g1", 7), ("g0", healed[0].step), ("g0-again", healed[1].step)):
        digests = facts.traces[name].digests
        end = AT if name == "g0" else STEPS
        assert digests == {step: plain.digests[step] for step in range(begins, end)}, name
        scalars = [[step, text] for step, text in plain.scalars if begins <= step < end]
        assert facts.traces[name].all("scalars") == scalars, name
    whole = samples_exactly_once(facts.events, STEPS)
    assert whole.holds and whole.value == sum(RAMP[step % 4] for step in range(7, STEPS)), whole.why
    lines, holds = summary_lines(facts.events)
    assert holds, lines
    assert "g0 comes with the state before step 5: it takes theirs" in facts.said["g0"]
    assert "the job begins at step 7, from the state that this group was started with" in facts.said["g1"]


@pytest.mark.long
def test_a_finished_run_that_is_started_again_ends_at_once_in_all_groups(job: Job, plain: Gold) -> None:
    resume(job, {"g0": STEPS, "g1": STEPS})
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0}
    assert facts.epochs[0].first_step == STEPS and not facts.all(schema.Committed)
    assert {e.step for e in facts.all(schema.Finished)} == {STEPS} and not facts.lost
    for name in ("g0", "g1"):
        assert not facts.traces[name].all("begins") and facts.traces[name].all("done")[0][0] == plain.digests[STEPS - 1]
    assert summary_lines(facts.events)[1]


@pytest.mark.long
def test_a_finished_run_ends_for_a_group_with_an_earlier_checkpoint_too(job: Job, plain: Gold) -> None:
    """Nothing is left to do, so nobody needs its state; it is told that the job has ended."""
    resume(job, {"g0": 5, "g1": STEPS})
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0} and facts.epochs[0].members == ("g1",)
    assert not facts.all(schema.Committed) and not facts.lost
