"""An entry that one group missed: it is taken from a donor and not computed anew; and the donor may die over it."""

from __future__ import annotations

import pytest
from harness import Job

from lightkeeper.events import schema
from lightkeeper.events.lineage import lineage

STEPS, AT = 10, 5
ALL = {"g0", "g1", "g2"}
MISSES = {"behave": f"fail-after-reduce:{AT} await:0"}
MISSES_ALONE = {"behave": f"{MISSES['behave']} await-too:2"}  # what g1 has reported would break g2's reduce as well


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse("--lease-s", "5")


def test_a_missed_entry_is_adopted_from_a_donor(job: Job, gold) -> None:
    job.start_all(3, steps=STEPS, only={"g1": MISSES_ALONE})
    facts = job.finish()
    facts.check(STEPS, ALL)
    assert facts.traces["g1"].all("failed-after-reduce") == [[AT]]
    failed = facts.all(schema.ReduceFailed, step=AT)
    assert [e.group for e in failed] == ["g1"]
    assert not facts.lost, "nobody died"

    adopted = facts.one(schema.Adopted)
    assert (adopted.group, adopted.step, adopted.epoch) == ("g1", AT, 1) and adopted.donor in ("g0", "g2")
    parameters = 8 * 16 + 16 + 16 * 16 + 16 + 16 + 1
    assert adopted.bytes >= 4 * parameters
    assert lineage(facts.events).epoch_of[AT][0] == 1, "the entry keeps the name under which the others committed it"
    assert facts.commits("g1")[AT].epoch == 1
    assert facts.epochs[1].first_step == AT + 1 and facts.epochs[1].members == ("g0", "g1", "g2")
    facts.near(gold(steps=STEPS), "g1")


def test_two_groups_miss_it_and_one_serves_both(job: Job) -> None:
    job.start_all(3, steps=STEPS, only={"g1": MISSES, "g2": MISSES})
    facts = job.finish()
    facts.check(STEPS, ALL)
    adopted = facts.all(schema.Adopted)
    assert {(e.group, e.donor, e.step) for e in adopted} == {("g1", "g0", AT), ("g2", "g0", AT)}
    assert not facts.lost and all(e.bytes > 0 for e in adopted)


def test_an_entry_in_its_own_buckets_is_adopted_without_a_transfer(job: Job) -> None:
    """g0 has reduced the step well, but promised a recovery before it voted; g2 has committed it meanwhile."""
    late, misses = {"behave": f"late-vote:{AT}"}, {"behave": f"fail-after-reduce:{AT} await:2 reduced:0"}
    job.start_all(3, steps=STEPS, only={"g0": late, "g1": misses})
    facts = job.finish()
    assert facts.traces["g0"].all("voted-late") == [[AT]]
    facts.check(STEPS, ALL)
    assert facts.one(schema.Adopted, group="g0").bytes == 0 and facts.one(schema.Adopted, group="g1").bytes > 0
    assert not facts.lost and lineage(facts.events).epoch_of[AT][0] == 1


def test_all_miss_it_and_it_is_reduced_anew(job: Job) -> None:
    others = {"g0": (1, 2), "g1": (0, 2), "g2": (0, 1)}
    all_miss = {
        group: {"behave": f"fail-after-reduce:{AT} reduced:{a} reduced-too:{b}"} for group, (a, b) in others.items()
    }
    job.start_all(3, steps=STEPS, only=all_miss)
    facts = job.finish()
    facts.check(STEPS, ALL)
    assert [trace.all("failed-after-reduce") for trace in facts.traces.values()] == [[[AT]]] * 3
    assert not facts.all(schema.Adopted) and not facts.lost
    assert lineage(facts.events).epoch_of[AT][0] > 1


def test_the_donor_dies_serving_and_another_gives_the_entry(job: Job) -> None:
    job.start_all(3, steps=STEPS, only={"g0": {"behave": "die-serving"}, "g1": MISSES_ALONE})
    facts = job.finish()
    assert facts.traces["g0"].all("die-serving") == [[]]
    facts.check(STEPS, {"g1", "g2"}, {"g0": -9})
    adopted = facts.one(schema.Adopted)
    assert (adopted.group, adopted.donor, adopted.step) == ("g1", "g2", AT) and adopted.bytes > 0
    assert facts.lost.keys() == {"g0"}


def test_the_only_donor_dies_and_the_step_is_done_anew(job: Job, gold) -> None:
    """Its entry dies with it, so it was never final; the one that is left has its own local sum and the orphans."""
    job.start_all(2, steps=STEPS, only={"g0": {"behave": "die-serving"}, "g1": MISSES})
    facts = job.finish()
    assert facts.traces["g0"].all("die-serving") == [[]]
    facts.check(STEPS, {"g1"}, {"g0": -9})
    assert not facts.all(schema.Adopted)
    assert sorted(facts.commits("g1")[AT].microbatches) == list(range(6))
    facts.near(gold(steps=STEPS), "g1")
