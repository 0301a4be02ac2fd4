"""Faults that real users reported, by their number in the list of scenarios that this project keeps."""

from __future__ import annotations

import re

import pytest
from harness import Job, names
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.events.reader import seconds_between
from lightkeeper.lighthouse.changes import RECOVERIES_MAX

LIVE = {"g0", "g1"}


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def test_14_release_from_a_reduce_is_bound_by_the_lease_not_by_its_time_out(job: Job) -> None:
    """Reduce time-out 240 s (twelve budgets), lease 5 s; g2 dies after its first buckets, so the others are inside."""
    job.start_all(3, steps=12, fault="", only={"g2": {"behave": "kill-in-reduce:6"}})
    facts = job.finish()
    facts.check(12, LIVE, {"g2": -9})
    fault = facts.fault("kill", "reduce", "g2", 6)
    for group in sorted(LIVE):
        assert seconds_between(fault, facts.commits(group)[7]) < 60.0, "a quarter of what the reduce itself bears"


def test_18_a_transient_error_now_and_then_evicts_nobody(job: Job, gold) -> None:
    """Second half, scaled: one failed reduce every five steps for fifty steps, always of the same group."""
    steps = 50
    job.settings["deal"] = "even"  # other shares would be an epoch of their own
    job.start_all(3, steps=steps, delay=0.02, only={"g1": {"behave": "transient-every:5"}})
    facts = job.finish()
    facts.check(steps, set(names(3)))
    times = len(facts.traces["g1"].all("transient"))
    assert times == steps // 5
    assert not facts.lost and len(facts.epochs) == 1 + times
    assert all(epoch.members == tuple(names(3)) for epoch in facts.epochs)
    facts.near(gold(steps=steps), "g1")


def test_18_commits_between_failures_count_even_if_no_beat_shows_them(job: Job) -> None:
    """A failure in every step, faster than the beats: each epoch commits one step, so nobody is condemned."""
    steps = 10
    job.start_all(3, steps=steps, only={"g1": {"behave": "transient-every:1 await:0"}})
    facts = job.finish()
    facts.check(steps, set(names(3)))
    assert len(facts.traces["g1"].all("transient")) == steps and not facts.lost


def test_19_a_group_whose_reduce_always_fails_is_left_out(job: Job, gold) -> None:
    """It complains, and of nobody but itself: after three recoveries without a commit the others go on without it."""
    steps, at = 12, 5
    job.start_all(3, steps=steps, only={"g1": {"behave": f"never-reduces:{at}"}})
    facts = job.finish()
    facts.check(steps, {"g0", "g2"}, {"g1": -9})
    tries = facts.traces["g1"].all("raised")
    assert tries == [[at]] * len(tries) and RECOVERIES_MAX <= len(tries) <= RECOVERIES_MAX + 2
    lost = facts.one(schema.GroupLost)
    assert lost.group == "g1" and lost.detected_by == "failures"
    assert "the network card says no" in lost.cause and "the network card says no" in facts.said["g1"]
    assert facts.members[-1] == ("g0", "g2") and max(facts.commits("g1")) == at - 1
    facts.near(gold(steps=steps), "g0")


def test_19_if_the_reduce_of_all_groups_always_fails_the_job_says_why(job: Job) -> None:
    at = 5
    job.start_all(3, steps=12, behave=f"never-reduces:{at}")
    facts = job.finish()
    stopped = facts.one(schema.JobStopped)
    assert not stopped.ok and "the network card says no" in stopped.reason
    assert f"{RECOVERIES_MAX} recoveries in a row without a commit" in stopped.reason
    for group in names(3):
        assert "the network card says no" in facts.said[group], group
        assert facts.codes[group] not in (0, None) and max(facts.commits(group)) == at - 1


def test_20_a_cut_connection_costs_one_failed_step_and_one_epoch(job: Job, gold) -> None:
    """Connections of g1 are cut while g0 and g2 stand in the reduce of step 5; nobody dies."""
    steps = 8
    job.settings["deal"] = "even"
    job.start_all(3, steps=steps, only={"g1": {"behave": "cut:5", "delay": 0.8}})
    facts = job.finish()
    facts.check(steps, set(names(3)))
    assert facts.traces["g1"].all("cut") == [[5]]
    assert not facts.lost
    failed = facts.all(schema.ReduceFailed)
    assert failed and {e.step for e in failed} == {5}
    assert facts.members == [tuple(names(3))] * 2 and facts.epochs[1].first_step == 5
    assert all(commit.attempts >= 1 for commit in facts.commits("g0").values())
    facts.near(gold(steps=steps), "g2")


def test_47_all_end_together_and_nobody_before_the_last_step_is_everybodys(job: Job) -> None:
    """Without the rejoin: 20 steps, g1 is killed after backward at step 7."""
    job.start_all(3, steps=20, only={"g1": {"behave": "kill-after-backward:7"}})
    facts = job.finish()
    facts.check(20, {"g0", "g2"}, {"g1": -9})
    facts.fault("kill", "compute", "g1", 7)
    assert [k for s, k in facts.traces["g1"].forward if s == 7], "it had computed"
    ends = [e for e in facts.all(schema.Finished) if e.fingerprint]
    last = max(facts.commits(group)[19].mono_ns for group in ("g0", "g2"))
    assert len(ends) == 2 and all(end.mono_ns > last for end in ends)
    assert abs(seconds_between(ends[0], ends[-1])) < 60.0, "a quarter of what a reduce bears"
    for step in range(20):
        consumed = sorted(
            k for g in ("g0", "g1", "g2") if step in facts.commits(g) for k in facts.commits(g)[step].microbatches
        )
        assert consumed == list(range(6)), step


def test_50_the_global_batch_stays(job: Job, gold) -> None:
    steps, total = 12, 24
    job.settings["deal"] = "even"
    job.start_all(4, steps=steps, microbatches=total, fault="kill:g3:compute:4,kill:g1:reduce:8")
    facts = job.finish()
    facts.check(steps, {"g0", "g2"}, {"g1": -9, "g3": -9})
    assert list(dict.fromkeys(len(members) for members in facts.members)) == [4, 3, 2]
    for step in range(steps):
        done = [facts.commits(group)[step] for group in names(4) if step in facts.commits(group)]
        assert all(commit.counted == commit.total == total for commit in done)
        assert sorted(k for commit in done for k in commit.microbatches) == list(range(total))
    assert {len(facts.commits("g0")[step].microbatches) for step in (1, 6, 10)} == {6, 8, 12}
    facts.near(gold(steps=steps, microbatches=total), "g0")


def test_51_survivors_compute_what_is_orphaned_and_nothing_else(job: Job) -> None:
    job.settings["deal"] = "even"
    job.start_all(3, steps=10, microbatches=9, delay=0.05, fault="kill:g2:reduce:5")
    facts = job.finish()
    facts.check(10, LIVE, {"g2": -9})
    facts.fault("kill", "reduce", "g2", 5)
    ran = {group: [k for step, k in facts.traces[group].forward if step == 5] for group in names(3)}
    assert ran["g2"] == [6, 7, 8], "it had computed its share before it died"
    assert ran["g0"][:3] == [0, 1, 2] and ran["g1"][:3] == [3, 4, 5]
    assert sorted(ran["g0"][3:] + ran["g1"][3:]) == [6, 7, 8]
    assert {len(ran["g0"]), len(ran["g1"])} == {4, 5}


def test_71_proxy_variables_have_no_effect(job: Job) -> None:
    dead = "http://127.0.0.1:9"
    env = {
        name: dead for low in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy") for name in (low, low.upper())
    }
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT, env=env, log="log-of-second")
    for group in ("g0", "g1"):
        job.start(group, steps=6, env=env)
    facts = job.finish()
    facts.check(6, {"g0", "g1"})
    assert not any(re.search(r"proxy|127\.0\.0\.1:9\b", text) for text in facts.said.values())


def test_74_a_slow_end_hook_disturbs_nobody(job: Job) -> None:
    job.start_all(3, steps=8, only={"g0": {"behave": "sleep-at-end:20"}})
    job.wait("g1", "g2")
    assert job.trainers["g0"].exitcode is None, "g0 was to be in its hook still"
    facts = job.finish()
    facts.check(8, set(names(3)))
    assert not facts.lost and not facts.all(schema.ReduceFailed)


@pytest.mark.parametrize("count", [1, 2])
def test_79_begin_share_reduce_commit_is_the_same_with_one_group_and_with_two(job: Job, gold, count: int) -> None:
    """The loop that is not ours; `steps()` with one group and several is in test_clean.py, 2x2 ranks elsewhere."""
    steps = 8
    job.start_all(count, steps=steps, loop="plain_calls")
    facts = job.finish()
    facts.check(steps, set(names(count)))
    plain = gold(steps=steps)
    facts.near(plain, "g0")
    if count == 1:
        assert facts.traces["g0"].digests == plain.digests
