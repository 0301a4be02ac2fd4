"""A planned leave: nobody is blamed, no step is lost, the old epoch is closed in order."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from facts import Facts
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.events.of_progress import Armed, Stuck

pytestmark = pytest.mark.usefixtures("dealt_evenly")  # other shares are an epoch, and epochs are counted here

STEPS, LINGER_S = 60, 0.15  # over each microbatch, until somebody has left
ERRORS = (
    schema.GroupLost, schema.ReduceFailed, schema.Recovered, schema.Fenced, schema.UserError, schema.BuildFailed,
    schema.Diverged, schema.Adopted,
)  # fmt: skip


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def finished_after_the_leave(job: Job) -> Facts:
    """What is left of the run is done fast."""
    job.wait_for(schema.Left)
    job.hurry()
    return job.finish()


def in_good_order(facts: Facts, group: str, survivors: set[str], steps: int = STEPS) -> int:
    """One group has left, nobody is blamed, nobody saw an error, nothing was lost; the step before which it left."""
    errors = [event for event in facts.events if isinstance(event, ERRORS)]
    assert not errors, errors
    facts.check(steps, survivors, {group: 0}, left={group})
    assert facts.members == [tuple(sorted({group} | survivors)), tuple(sorted(survivors))]
    left = facts.one(schema.Left)
    assert left.group == group
    last = max(facts.commits(group))
    assert left.reason == f"before step {last + 1}" and last < steps - 1
    mine = facts.commits(group)[last].microbatches
    before, after = (sorted(k for g in survivors for k in facts.commits(g)[s].microbatches) for s in (last, last + 1))
    assert mine and sorted((*before, *mine)) == after, "its share was handed over"
    return last + 1


def test_sigterm_to_a_launched_group(job: Job, gold) -> None:
    job.settings["groups"] = 3
    launcher = job.launch("g2", steps=STEPS, **job.lingering(LINGER_S))
    job.start("g0", steps=STEPS, **job.lingering(LINGER_S))
    job.start("g1", steps=STEPS, **job.lingering(LINGER_S))
    job.wait_for(schema.Committed, group="g2", step=3)
    launcher.send_signal(signal.SIGTERM)
    facts = finished_after_the_leave(job)
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
    launcher = job.launch("g0", steps=STEPS, delay=0.1)
    job.wait_for(schema.Committed, step=3)
    launcher.send_signal(signal.SIGTERM)
    job.wait("g0")
    facts = job.finish()
    assert facts.codes == {"g0": 0}, facts.said
    assert not facts.lost
    stopped = facts.one(schema.JobStopped)
    assert stopped.ok and "asked to leave" in stopped.reason and "SIGTERM" in stopped.reason


def test_a_script_that_takes_its_time_to_end_after_a_stop_is_not_stuck(job: Job) -> None:
    job.settings.update(groups=2, stall_floor_s=6)
    launchers = [job.launch(g, steps=2000, behave="ends-slowly:15", **job.lingering(LINGER_S)) for g in ("g0", "g1")]
    for group in ("g0", "g1"):
        job.wait_for(Armed, group=group)  # its deadlines are learnt
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0}, facts.said
    assert all("ends slowly" in said for said in facts.said.values())
    assert any("the job ends: all groups asked to leave" in said for said in facts.said.values())
    assert not facts.all(Stuck) and not facts.lost


def test_sigterm_twice_ends_at_once(job: Job) -> None:
    launcher = job.launch("g0", steps=STEPS, delay=30.0)  # a step takes longer than is waited for
    job.wait_for(schema.Activated, process="manager g0")
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGINT)
    job.wait("g0")
    facts = job.finish()
    assert facts.codes == {"g0": 143}
    assert "asked to end at once" in facts.said["g0"]


def test_asking_from_within_the_script(job: Job) -> None:
    """A rank may ask as well (`AskLeave`), for instance when its machine gives notice."""
    job.start_all(3, steps=STEPS, **job.lingering(LINGER_S), only={"g1": {"behave": "ask-leave:3"}})
    facts = finished_after_the_leave(job)
    assert not facts.lost
    facts.check(STEPS, {"g0", "g2"}, {"g1": 0}, left={"g1"})
    assert facts.members == [("g0", "g1", "g2"), ("g0", "g2")]


def test_one_dies_while_another_leaves(job: Job) -> None:
    """The planned change is given up for the recovery, and the leaver leaves after it."""
    leaves = {"g1": {"behave": "ask-leave:3"}}
    job.start_all(4, "kill:g3:reduce:4", leaves, steps=STEPS, microbatches=8, **job.lingering(LINGER_S))
    facts = finished_after_the_leave(job)
    assert facts.one(schema.FaultInjected).group == "g3"
    assert facts.lost.keys() == {"g3"}
    facts.check(STEPS, {"g0", "g2"}, {"g1": 0, "g3": -9}, left={"g1"})
    assert facts.members[-1] == ("g0", "g2")


def test_a_leaver_does_not_say_that_it_finished(job: Job) -> None:
    """`finished` means the end of the run; the leaver's line is `left`."""
    job.start_all(2, steps=STEPS, **job.lingering(LINGER_S), only={"g1": {"behave": "ask-leave:3"}})
    facts = finished_after_the_leave(job)
    facts.one(schema.Left, group="g1")
    assert not facts.all(schema.Finished, group="g1")


# ---------------------------------------------------------------- whoever gets the signal


def test_sigterm_to_a_trainer(job: Job) -> None:
    job.start_all(3, steps=STEPS, **job.lingering(LINGER_S))
    pid = job.wait_for(schema.Committed, group="g1", step=3).pid
    os.kill(pid, signal.SIGTERM)
    facts = finished_after_the_leave(job)
    in_good_order(facts, "g1", {"g0", "g2"})
    assert "asked to leave (SIGTERM to rank 0)" in facts.said["g1"]


def test_sigterm_to_everything_of_a_group_is_one_request_and_a_loader_worker_stays(job: Job) -> None:
    job.settings["groups"] = 2
    launcher = job.launch("g1", steps=STEPS, behave="loader", **job.lingering(LINGER_S))
    job.start("g0", steps=STEPS, **job.lingering(LINGER_S))
    job.wait_for(schema.Committed, group="g1", step=3)
    everything = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    assert len(everything) >= 3, "launcher, rank, worker"
    for process in everything:
        process.send_signal(signal.SIGTERM)
    facts = finished_after_the_leave(job)
    in_good_order(facts, "g1", {"g0"})
    (worker,) = facts.traces["g1"].all("worker")
    assert worker[0] in {process.pid for process in everything}


def test_a_loader_worker_ends_when_its_trainer_says_so(job: Job) -> None:
    """`Process.terminate` is SIGTERM as well, and without it an interpreter would wait for the worker for ever."""
    job.start_all(1, steps=3, behave="loader stubborn-child")
    facts = job.finish()
    facts.check(3, {"g0"})


def test_sigterm_to_all_groups_ends_the_job_well(job: Job) -> None:
    job.start_all(3, steps=STEPS, delay=LINGER_S, behave="keeps")
    job.wait_for(schema.Committed, group="g1", step=3)
    for group in job.trainers:
        os.kill(job.trainers[group].pid or 0, signal.SIGTERM)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g2": 0}, facts.said
    assert not facts.lost and not facts.all(schema.UserError)
    stopped = facts.one(schema.JobStopped)
    assert stopped.ok
    assert max(facts.commits("g0")) < STEPS - 1
    kept = {group: facts.traces[group].all("keeps") for group in job.trainers}
    ((step, fingerprint, _),) = kept.pop(stopped.keep)
    assert not any(kept.values()), "one group alone keeps what they have"
    assert step == max(commits := facts.commits(stopped.keep)) and fingerprint == commits[step].fingerprint
    assert step >= max(max(facts.commits(group)) for group in job.trainers) - 1, "all that is final"


def test_sigterm_twice_to_a_trainer_ends_it_in_mid_step_and_nobody_is_blamed(job: Job) -> None:
    job.start_all(3, steps=20, delay=0.01, only={"g2": {"delay": 60.0}})
    pid = job.wait_for(schema.Activated, process="manager g2") and job.trainers["g2"].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    job.until(lambda: "asked to leave (SIGTERM" in job.said("g2"), "its line")
    os.kill(pid, signal.SIGTERM)
    facts = job.finish()
    assert not facts.lost, facts.lost
    facts.check(20, {"g0", "g1"}, {"g2": -9}, left={"g2"})
    assert facts.one(schema.Left).reason == "was asked to end at once (SIGTERM to rank 0)"
    assert facts.epochs[-1].cause == "g2 was asked to end at once (SIGTERM to rank 0)"
    assert "ends with exit code 143: was asked to end at once (SIGTERM to rank 0)" in facts.said["g2"]


def test_sigterm_before_the_group_is_a_member(job: Job) -> None:
    job.settings["groups"] = 2
    launcher = job.launch("g0", steps=STEPS)
    job.start("g1", steps=STEPS)
    job.wait_for(schema.ProcessStarted, process="manager g0")
    job.wait_for(schema.Joined, group="g1")
    os.kill(job.trainers["g1"].pid or 0, signal.SIGTERM)  # its rank waits for the first epoch
    launcher.send_signal(signal.SIGTERM)  # this one's rank may still import torch
    job.wait("g0", "g1")
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0}, facts.said
    assert not facts.lost


# ---------------------------------------------------------------- an operator, and the machine's own notice


def test_drain_by_an_operator(job: Job) -> None:
    job.start_all(3, steps=STEPS, **job.lingering(0.3))
    job.wait_for(schema.Committed, group="g1", step=3)
    done = job.command("drain", "g2", "--lighthouse", job.lighthouse, "--deadline", "60")
    facts = finished_after_the_leave(job)
    step = in_good_order(facts, "g2", {"g0", "g1"})
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1].startswith(f"g2 left before step {step}: drained by ")
    assert facts.one(schema.OperatorDrained, group="g2").deadline_s == 60.0


def test_drain_of_a_group_that_does_not_make_it(job: Job) -> None:
    job.start_all(3, steps=20, delay=0.01, only={"g2": {"delay": 60.0}})
    job.wait_for(schema.Activated, process="manager g2")
    done = job.command("drain", "g2", "--lighthouse", job.lighthouse, "--deadline", "0.5")
    facts = job.finish()
    assert done.returncode == 1 and "within 0.5 s" in done.stderr and "did not make it" in done.stderr, done
    assert not facts.lost, facts.lost
    facts.check(20, {"g0", "g1"}, {"g2": -9}, left={"g2"})


def test_drain_of_who_is_not_there_and_at_nobody(job: Job) -> None:
    job.start_all(1, steps=10_000, delay=0.02)  # it goes on until it is drained
    job.wait_for(schema.Committed, group="g0", step=1)
    done = job.command("drain", "g7", "--lighthouse", job.lighthouse)
    assert done.returncode == 1 and "has no group g7 here; it has g0" in done.stderr
    done = job.command("drain", "g0", "--lighthouse", "127.0.0.1:1")
    assert done.returncode == 1 and "no lighthouse answers at 127.0.0.1:1" in done.stderr
    assert job.command("drain", "g0", "--deadline", "-1").returncode == 2
    done = job.command("drain", "g0", "--lighthouse", job.lighthouse)
    assert done.returncode == 0 and "all groups asked to leave: drained by" in done.stdout
    facts = job.finish()
    assert facts.codes == {"g0": 0} and facts.one(schema.JobStopped).ok


def test_two_operators_who_drain_one_group_are_both_told_that_it_has_left(job: Job) -> None:
    job.settings["groups"] = 3
    for group in ("g0", "g1"):  # they wait for the third
        job.start(group, steps=STEPS)
        job.wait_for(schema.Joined, group=group)
    first, second = (job.command("drain", "g0", "--lighthouse", job.lighthouse) for _ in range(2))
    os.kill(job.trainers["g1"].pid or 0, signal.SIGTERM)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0} and not facts.lost
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    (line,) = second.stdout.splitlines()
    assert line == first.stdout.splitlines()[-1] and line.startswith("g0 left before it was a member: drained by ")
    assert len(facts.all(schema.OperatorDrained)) == 1
    assert "lightkeeper: this group leaves: asked to leave before it was a member: drained by" in facts.said["g0"]
    assert "the job ends" not in facts.said["g0"]
    assert facts.one(schema.Left, group="g0", process="rank g0/0").reason == "before it was a member"


def test_a_notice_of_the_machine(job: Job) -> None:
    notice = job.folder / "notice"
    job.settings["groups"] = 3
    for group in ("g0", "g1", "g2"):
        own = {"notice_file": notice} if group == "g1" else None
        job.start(group, steps=STEPS, settings=own, **job.lingering(LINGER_S))
    job.wait_for(schema.Committed, group="g1", step=3)
    notice.write_text("60\n")
    facts = finished_after_the_leave(job)
    in_good_order(facts, "g1", {"g0", "g2"})
    assert f"asked to leave within 60 s (notice in {notice})" in facts.said["g1"]
