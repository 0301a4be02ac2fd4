"""Too few groups are left: the job ends, and is begun again at the very step after the last one that was committed."""

from __future__ import annotations

import os
import signal

from lives import Lives, loaded

from lightkeeper.events import schema

STEPS = 60
OPTIONS = {"warm_up": 12, "microbatches": 3, "delay": 0.3, "dropout": 0.5}


def test_what_the_last_group_holds_is_kept_and_nothing_is_done_again(lives: Lives, gold) -> None:
    """Two of three groups die, and two are the minimum; no save was due, so without the keeping all would be lost."""
    lives.options = {**OPTIONS, "steps": STEPS, "checkpoints": {"every": 1000}}
    lives.settings = {"minimum": 2, "quorum_wait_s": 0.5}
    job = lives.begin(3)
    job.until(lambda: any(e.step >= 3 for e in job.events() if isinstance(e, schema.Committed)), "some steps")
    for group in ("g1", "g2"):
        pid = job.trainers[group].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert job.wait() == {"g0": 1, "g1": -9, "g2": -9}
    facts = job.finish()
    assert {e.exit_code for e in facts.all(schema.ProcessEnded, process="manager g0") if e.child is None} == {105}
    stopped = facts.one(schema.JobStopped)
    assert "g1" in stopped.reason and "g2" in stopped.reason and "quorum lost" in stopped.reason
    assert facts.lost.keys() == {"g1", "g2"}
    last = max(facts.traces["g0"].digests)
    saved = facts.one(schema.CheckpointSaved)
    assert (saved.group, saved.step) == ("g0", last + 1) and "was to keep its state" in saved.final
    assert f"the state of step {last + 1} is kept" in facts.said["g0"]

    again = lives.begin(3)
    again.hurry()
    ended = lives.finish()
    assert set(ended.codes.values()) == {0}
    assert loaded(again) == dict.fromkeys(("g0", "g1", "g2"), last + 1)
    assert min(e.step for e in ended.all(schema.Committed)) == last + 1, "nothing was done again"
    lives.check_states(gold(**OPTIONS, steps=STEPS))


def test_all_groups_are_asked_to_leave_and_the_run_goes_on_from_there(lives: Lives, gold) -> None:
    """A scheduler ends the whole job: everybody exits with 0, and the last step is kept."""
    lives.options = {**OPTIONS, "steps": STEPS, "checkpoints": {"every": 1000}}
    job = lives.begin(3)
    job.until(lambda: any(e.step >= 3 for e in job.events() if isinstance(e, schema.Committed)), "some steps")
    for process in job.trainers.values():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
    assert set(job.wait().values()) == {0}
    facts = job.finish()
    assert not facts.lost
    saved = facts.one(schema.CheckpointSaved)
    reached = max(max(facts.traces[name].digests) for name in ("g0", "g1", "g2"))
    assert reached <= saved.step <= reached + 1

    again = lives.begin(3)
    again.hurry()
    ended = lives.finish()
    assert set(ended.codes.values()) == {0}
    assert loaded(again) == dict.fromkeys(("g0", "g1", "g2"), saved.step)
    lives.check_states(gold(**OPTIONS, steps=STEPS))
