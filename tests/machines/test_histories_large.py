"""Random histories under the rules of a large job, in which silence is asked about.

With a few groups, so that they stay fast, by the patience of a job sixteen times as large.
"""

from __future__ import annotations

from collections import Counter

import pytest
from sim_job import Job
from test_histories import DEADLY, HARMLESS, history, seeds

from lightkeeper.lighthouse import silence
from lightkeeper.lighthouse.messages import Ask

TIMES = 16


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every job is as patient as one sixteen times as large; counts the asks."""
    count: Counter[str] = Counter()
    of = silence.Patience.of.__func__  # type: ignore[attr-defined]
    enlarged = classmethod(lambda cls, groups, lease_s, beat_s: of(cls, TIMES * silence.OFTEN_MAX, lease_s, beat_s))
    monkeypatch.setattr(silence.Patience, "of", enlarged)
    real = Ask.__init__

    def counted(self: Ask) -> None:
        count["asks"] += 1
        real(self)

    monkeypatch.setattr(Ask, "__init__", counted)
    return count


def evicted(job: Job) -> list[str]:
    """For what those were lost that were."""
    return [line for line in job.trace if "group_lost" in line]


def test_with_frozen_managers_the_others_go_on(asked: Counter[str]) -> None:
    lost = 0
    for seed in seeds(40):
        job, _, _ = history(seed, ("freeze_manager",), count=2)
        lost += sum("'lease'" in line for line in evicted(job))
    assert asked["asks"] > 100 and lost > 5, "in some histories the frozen did not answer in time"


def test_survivors_of_kills_reach_the_end(asked: Counter[str]) -> None:
    for seed in seeds(40):
        history(seed, (*HARMLESS, *DEADLY, "freeze_manager"), 4, 2, count=4)
    assert asked["asks"] > 10


def test_groups_leave_while_others_die() -> None:
    for seed in seeds(40):
        history(seed, ("leave", "kill", "cut"), 4, count=3)


def test_with_a_frozen_lighthouse_nobody_is_lost() -> None:
    for seed in seeds(40):
        _, _, reached = history(seed, ("freeze_lighthouse", "reduce"), count=3)
        assert reached == ["g0", "g1", "g2"], seed


@pytest.mark.parametrize("restart", ["restart", "restart_empty"])
def test_with_a_lighthouse_that_restarts(restart: str) -> None:
    for seed in seeds(40):
        history(seed, (restart, "reduce", "cut", "freeze_manager"), count=4)
