"""The user's own bugs: loud, fatal for their group at once, and never taken for a peer's fault."""

from __future__ import annotations

import pytest
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema

STEPS, AT = 10, 5
ALL, LIVE = {"g0", "g1", "g2"}, {"g0", "g1"}


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        ("raise", "ValueError", "a bug of the user's"),
        ("raise-in-hook", "TypeError", "a bug in a gradient hook"),  # scenario 21
        ("break", "LoopError", "was left before it was exhausted (break"),
        ("early-step", "LoopError", "was changed before the step was committed"),
    ],
)
def test_one_group_has_a_bug_and_the_others_go_on(job: Job, gold, behave: str, kind: str, words: str) -> None:
    job.start_all(3, steps=STEPS, only={"g2": {"behave": f"{behave}:{AT}"}})
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": 1})
    said = facts.said["g2"]
    assert words in said
    traceback = "Traceback (most recent call last)" in said and kind in said
    assert traceback != (kind == "LoopError"), "a broken rule of the loop is told in one line"
    error = facts.one(schema.UserError)
    assert (error.group, error.rank, error.step, error.type) == ("g2", 0, AT, kind) and words in error.message
    assert error.traceback and "loops.py" in error.traceback
    lost = facts.lost["g2"]
    assert facts.lost.keys() == {"g2"} and lost.detected_by == "manager" and kind in lost.cause
    assert facts.members[0] == ("g0", "g1", "g2") and facts.members[-1] == ("g0", "g1")
    assert max(facts.commits("g2")) == AT - 1
    facts.near(gold(steps=STEPS), "g0")


@pytest.mark.parametrize(("behave", "kind"), [("raise", "ValueError"), ("raise-in-hook", "TypeError")])
def test_the_same_bug_in_all_groups_stops_the_job(job: Job, behave: str, kind: str) -> None:
    job.start_all(3, steps=STEPS, behave=f"{behave}:{AT}")
    facts = job.finish()
    assert all(code not in (0, None) for code in facts.codes.values()), facts.codes
    assert all(max(facts.commits(group)) == AT - 1 for group in ALL)
    stopped = facts.one(schema.JobStopped)
    assert not stopped.ok and "the same exception in all groups" in stopped.reason and kind in stopped.reason
    assert f"step {AT}" in stopped.reason
    assert {e.group for e in facts.all(schema.UserError, type=kind)} == ALL


def test_two_groups_have_it_and_the_third_goes_on(job: Job) -> None:
    job.start_all(3, steps=STEPS, only={"g1": {"behave": f"raise:{AT}"}, "g2": {"behave": f"raise:{AT}"}})
    facts = job.finish()
    facts.check(STEPS, {"g0"}, {"g1": 1, "g2": 1})
    assert facts.lost.keys() == {"g1", "g2"}


def test_exit_0_before_the_run_is_closed(job: Job) -> None:
    job.start_all(3, steps=STEPS, only={"g2": {"behave": f"exit-0:{AT}"}})
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": 0})
    lost = facts.lost["g2"]
    assert "before the run was closed" in lost.cause and "exited 0" in lost.cause
    assert "before the run was closed" in facts.said["g2"]


def test_a_loop_left_early_is_told_how_to_end_the_run(job: Job) -> None:
    job.start_all(3, steps=STEPS, only={"g2": {"behave": f"leave-loop:{AT}"}})
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": 0})
    how = f"the loop over manager.steps() was left at step {AT} of {STEPS}; call manager.finish() to end the run early"
    assert how in facts.lost["g2"].cause and facts.said["g2"].count(how) == 1


def test_finish_in_all_groups_at_one_step_ends_the_run_early_and_well(job: Job) -> None:
    job.start_all(3, steps=STEPS, behave=f"finish-early:{AT}")
    facts = job.finish()
    facts.check(AT + 1, ALL, {})
    assert {event.step for event in facts.all(schema.Finished)} == {AT + 1} and not facts.lost


def test_a_bug_alone(job: Job) -> None:
    """One group has nobody to go on for it."""
    job.start_all(1, steps=STEPS, behave=f"raise:{AT}")
    facts = job.finish()
    assert facts.codes == {"g0": 1} and "a bug of the user's" in facts.said["g0"]
    assert facts.one(schema.UserError).type == "ValueError"
