"""Work dealt by speed: a slow group gets fewer microbatches; noise, or the groups' word, leaves the shares even."""

from __future__ import annotations

import itertools

import pytest
from facts import Facts
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.lighthouse.speeds import EVERY_STEPS

STEPS, MICROBATCHES, DELAY_S, SLOW_S = 50, 12, 0.015, 0.04


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def sizes(facts: Facts, step: int) -> dict[str, int]:
    """Microbatches of each group at a step."""
    groups = sorted({event.group for event in facts.all(schema.Committed)})
    return {group: len(facts.commits(group)[step].microbatches) for group in groups}


def new_shares(facts: Facts) -> list[schema.Activated]:
    """Epochs that were planned for them."""
    return [epoch for epoch in facts.epochs if epoch.cause.startswith("new shares: ")]


def quiet(facts: Facts) -> None:
    """Nobody is blamed, nothing is recovered."""
    noticed = (schema.GroupLost, schema.ReduceFailed, schema.Recovered, schema.Fenced)
    assert not [event for event in facts.events if isinstance(event, noticed)]


def test_a_slow_group_gets_fewer_and_the_others_more(job: Job, gold) -> None:
    options = {"steps": STEPS, "microbatches": MICROBATCHES, "delay": DELAY_S}
    job.start_all(3, **options, only={"g2": {"delay": SLOW_S}})
    facts = job.finish()
    quiet(facts)
    facts.check(STEPS, {"g0", "g1", "g2"})
    first, *further = new_shares(facts)
    assert first.cause.startswith("new shares: g2 1.00 -> 0."), first.cause
    assert all(epoch.members == ("g0", "g1", "g2") for epoch in facts.epochs)
    assert sizes(facts, 0) == {"g0": 4, "g1": 4, "g2": 4}
    last = sizes(facts, STEPS - 1)
    assert last["g2"] <= 3 and sum(last.values()) == MICROBATCHES and min(last.values()) >= 1, last
    changed = [s for s in range(1, STEPS) if sizes(facts, s) != sizes(facts, s - 1)]
    assert changed[0] >= EVERY_STEPS and len(changed) == 1 + len(further)
    assert all(after - before >= EVERY_STEPS for before, after in itertools.pairwise(changed)), changed
    facts.near(gold(steps=STEPS, microbatches=MICROBATCHES), "g0")


def test_even_if_the_groups_say_so(job: Job) -> None:
    job.settings["deal"] = "even"
    job.start_all(2, steps=40, microbatches=6, delay=0.01, only={"g1": {"delay": 0.03}})
    facts = job.finish()
    facts.check(40, {"g0", "g1"})
    assert len(facts.epochs) == 1 and sizes(facts, 39) == {"g0": 3, "g1": 3}


def test_groups_that_deal_in_different_ways_are_told(job: Job) -> None:
    job.settings["groups"] = 2
    job.start("g0", steps=5)
    job.wait_for(schema.Joined, group="g0")
    job.start("g1", steps=5, settings={"deal": "even"})
    refused = job.wait_for(schema.Refused, group="g1")
    assert "deal" in refused.reason and "even" in refused.reason and "speed" in refused.reason
    job.end()


def test_shares_stay_even_with_noise(job: Job) -> None:
    """Some per cent, as every machine has."""
    steps = EVERY_STEPS + 10
    job.start_all(3, steps=steps, microbatches=MICROBATCHES, delay=0.1, behave="noise")
    facts = job.finish()
    quiet(facts)
    facts.check(steps, {"g0", "g1", "g2"})
    assert not new_shares(facts), [epoch.cause for epoch in facts.epochs]
