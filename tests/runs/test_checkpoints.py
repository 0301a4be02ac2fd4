"""Exits of all processes at any moment: the run goes on from a checkpoint as the same run, and little is done again."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from lives import MOMENTS, Death, Lives, loaded

from lightkeeper.events import schema

EVERY, KEEP = 20, 2
OPTIONS = {
    "warm_up": 12, "microbatches": 3, "delay": 0.02, "slow_save": 0.02, "dropout": 0.5, "batch_norm": True,
}  # fmt: skip


def check_death(before: Death | None, death: Death) -> None:
    """Nothing that was committed is lost, and no more than what was made since the newest save began."""
    newest = -1 if before is None else before.newest
    assert death.newest >= max(newest, death.noted), (before, death)
    assert len(death.committed) >= min(2, 0 if before is None else len(before.committed)), (before, death)
    # A save begins with each interval, and the one before it has ended by then, or it is told that one was missed.
    assert death.missed or death.done - death.begun <= EVERY + 3, death
    assert death.missed or death.begun - max(death.newest, 0) <= EVERY, death


def exits(lives: Lives, gold, count: int, groups: tuple[int, ...], steps: int, seed: int) -> list[Death]:
    """Kills the run that often, with one number of groups after another, and lets it reach its end."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    lives.options = {**OPTIONS, "steps": steps, "checkpoints": {"every": EVERY, "keep": KEEP}}
    deaths: list[Death] = []
    kept = None
    for number in range(count):
        job = lives.begin(groups[number * len(groups) // count], kept)
        moment = MOMENTS[number % len(MOMENTS)]
        takes_lighthouse = number % 4 == 3
        death = lives.die(moment, draw, takes_lighthouse)
        before = deaths[-1] if deaths else None
        check_death(before, death)
        check_begin(lives, before)
        deaths.append(death)
        kept = None if takes_lighthouse else job
    lives.begin(groups[-1], kept)
    facts = lives.finish(within_s=400)
    check_begin(lives, deaths[-1])
    assert set(facts.codes.values()) == {0} and facts.one_lineage_end() == steps - 1
    assert lives.committed()[0].step == steps
    lives.check_states(gold(**{key: value for key, value in OPTIONS.items() if key != "slow_save"}, steps=steps))
    return deaths


def check_begin(lives: Lives, before: Death | None) -> None:
    """The newest job has begun from the newest checkpoint that the death before it left."""
    newest = 0 if before is None else max(before.newest, 0)
    begun = loaded(lives.job)
    assert begun and set(begun.values()) == {newest}, (begun, before)
    events = [e for e in lives.job.events() if isinstance(e, schema.CheckpointLoaded)]
    assert len(events) == (len(begun) if newest else 0)
    assert all(e.step == newest and e.compared and e.bytes > 0 and e.seconds > 0 for e in events)
    first = min((e.step for e in lives.job.events() if isinstance(e, schema.Committed)), default=newest)
    assert first == newest, "nothing is left out, and nothing done again that was saved"


def test_five_exits_at_any_moment_leave_what_can_be_loaded(lives: Lives, gold) -> None:
    """S57; and S55, since model, optimizer, schedule, registered object and BatchNorm's statistics are of one step."""
    deaths = exits(lives, gold, 5, (1,), 300, random.randrange(2**31))
    assert {death.moment for death in deaths} == set(MOMENTS)
    assert any("saving" in death.kinds for death in deaths), "killed while it saved"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_hundred_exits_at_any_moment_leave_what_can_be_loaded(lives: Lives, gold) -> None:
    """The first half with one group, the second with three."""
    deaths = exits(lives, gold, 100, (1, 3), 1500, random.randrange(2**31))
    during = Counter(kind for death in deaths for kind in death.kinds)
    print(during, "newest at each death:", [death.newest for death in deaths])
    assert during["saving"] >= 20 and during["dropped"] >= 5, during
