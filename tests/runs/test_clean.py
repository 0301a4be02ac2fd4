"""Runs without a fault: the same bits as the plain loop, or the same numbers."""

from __future__ import annotations

import pytest
from facts import Gold
from harness import Job, names

from lightkeeper.events import schema

STEPS = 10


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse("--lease-s", "5")


def test_one_group_is_bit_equal_to_the_plain_loop(job: Job, gold) -> None:
    job.start_all(1, steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, {"g0"})
    plain: Gold = gold(steps=STEPS)
    trace = facts.traces["g0"]
    assert trace.digests == plain.digests
    assert trace.losses == plain.losses
    assert trace.all("done")[0][1] == plain.weights


@pytest.mark.parametrize("count", [2, 3])
def test_several_groups_equal_the_plain_loop(job: Job, gold, count: int) -> None:
    job.start_all(count, steps=STEPS, microbatches=7)
    facts = job.finish()
    facts.check(STEPS, set(names(count)))
    assert facts.members == [tuple(names(count))]
    assert not facts.lost and not facts.all(schema.ReduceFailed) and not facts.all(schema.UserError)
    for group in names(count):
        shares = {len(commit.microbatches) for commit in facts.commits(group).values()}
        assert shares <= {7 // count, 7 // count + 1}
        facts.near(gold(steps=STEPS, microbatches=7), group)


def test_a_batch_ramp(job: Job, gold) -> None:
    ramp = [1, 2, 3, 5, 8, 2]
    job.start_all(3, steps=6, microbatches=ramp)
    facts = job.finish()
    facts.check(6, set(names(3)))
    assert [facts.commits("g0")[step].total for step in range(6)] == ramp
    facts.near(gold(steps=6, microbatches=ramp), "g1")


def test_the_loop_without_generators(job: Job, gold) -> None:
    job.start_all(3, steps=STEPS, loop="plain_calls")
    facts = job.finish()
    facts.check(STEPS, set(names(3)))
    facts.near(gold(steps=STEPS), "g2")


def test_extras_are_reduced_alike_everywhere(job: Job) -> None:
    job.start_all(3, steps=4, loop="with_extras", microbatches=7)
    facts = job.finish()
    facts.check(4, set(names(3)))
    told = {group: trace.all("extras") for group, trace in facts.traces.items()}
    assert told["g0"] == told["g1"] == told["g2"] and len(told["g0"]) == 4
    for _, reduced, kinds in told["g0"]:
        assert reduced["load"] == [21.0 + 7 * i for i in range(5)]
        assert reduced["tokens"] == 7 * 2**40 + 21  # exact, though float32 could not hold it
        assert kinds == {"loss": "torch.float64", "load": "torch.float32", "tokens": "torch.int64"}
