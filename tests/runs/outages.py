"""What tests of a lighthouse that is away have in common; their fixtures are in `conftest.py`."""

from __future__ import annotations

from facts import Facts
from harness import Job, names

from lightkeeper.events import schema

STEPS = 30
ALL = set(names(3))


def check_undisturbed(facts: Facts, calm: dict[int, str], steps: int = STEPS) -> None:
    """Nobody was lost, no step was missed or done twice, and the bits are those of a run without faults."""
    facts.check(steps, ALL)
    assert not facts.lost and not facts.all(schema.ReduceFailed)
    assert {e.epoch for e in facts.all(schema.Committed)} == {1}
    assert facts.traces["g1"].digests == calm


def committed(job: Job, group: str) -> int:
    return max((e.step for e in job.events() if isinstance(e, schema.Committed) and e.group == group), default=-1)


def start_three(job: Job, lighthouses: dict[str, str], **options: object) -> None:
    """Three groups; some of them with a lighthouse of their own."""
    job.settings["groups"] = 3
    for group in names(3):
        own = {"lighthouse": lighthouses[group]} if group in lighthouses else {}
        job.start(group, settings=own, **options)
