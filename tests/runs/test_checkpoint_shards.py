"""A run that is begun again with other numbers of groups, and of ranks in each, goes on from the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from facts import Facts
from harness import Job

from lightkeeper.events import schema

STEPS = 6  # of each start
SAMPLES = 6 * 4  # of a step, whoever computes them

StartOf = Callable[[], Job]


@pytest.fixture
def start_of(tmp_path: Path) -> Iterator[StartOf]:
    """Makes one job after another; whatever they left running is ended."""
    made: list[Job] = []

    def new() -> Job:
        made.append(Job(tmp_path / f"run-{len(made)}"))
        return made[-1]

    yield new
    for job in made:
        job.end()


def ran(job: Job, groups: int, ranks: int, layout: str, start: int, folder: Path) -> Facts:
    """One start of the run, from its first step to its last."""
    job.settings["groups"] = groups
    job.start_lighthouse("--lease-s", "5")  # nobody is to be lost because the machine is busy
    for i in range(groups):
        job.start_ranks(
            f"g{i}", ranks, layout=layout, steps=(start + 1) * STEPS, dropout=0.0,
            checkpoints={"folder": str(folder), "every": 5},  # so that none is due while the one before it is written
        )  # fmt: skip
    return job.finish()


def check(facts: Facts, groups: int, ranks: int, start: int, before: str) -> str:
    """Every rank began with the state that was saved, and no sample was lost or repeated; the state at the end."""
    names = [f"g{i}.{rank}" for i in range(groups) for rank in range(ranks)]
    assert {facts.codes[name] for name in names} == {0}, facts.codes
    first, end = start * STEPS, (start + 1) * STEPS
    ends = set()
    for name in names:
        trace = facts.traces[name]
        assert [trace.all("loaded")[0][0]] == [first], name
        assert not before or trace.all("loaded")[0][1] == before, name
        assert [line[0] for line in trace.all("norm")] == list(range(first, end)), name
        assert {line[2] for line in trace.all("norm")} == {SAMPLES}, name
        ends.add(trace.all("whole")[0][1])
    assert len(ends) == 1
    loaded = facts.all(schema.CheckpointLoaded)
    assert {e.group for e in loaded} == ({f"g{i}" for i in range(groups)} if start else set())
    assert {e.step for e in loaded} <= {first} and {e.restarts for e in loaded} <= {start}
    saved = facts.all(schema.CheckpointSaved)
    assert [e.step for e in saved][-1] == end and not facts.all(schema.CheckpointFailed)
    assert len({e.group for e in saved}) == 1, "one group writes"
    return ends.pop()


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 2, "fsdp"), (1, 2, "tp"), (2, 1, "whole")],
        pytest.param([(2, 2, "fsdp"), (1, 4, "fsdp"), (4, 1, "fsdp")], marks=pytest.mark.long),
        pytest.param([(4, 1, "whole"), (1, 4, "fsdp-tp"), (2, 2, "ddp")], marks=pytest.mark.long),
        pytest.param([(1, 4, "hsdp"), (2, 2, "tp"), (2, 2, "fsdp")], marks=pytest.mark.long),
    ],
    ids=lambda shapes: "-".join(f"{groups}x{ranks}{layout}" for groups, ranks, layout in shapes),
)
def test_groups_and_ranks_change_and_the_run_is_the_same(
    start_of: StartOf, gold, tmp_path: Path, shapes: list[tuple[int, int, str]]
) -> None:
    """Bits are equal over each load; after it the sums have another order, so losses are the plain run's nearly."""
    before, losses = "", {}
    for start, (groups, ranks, layout) in enumerate(shapes):
        facts = ran(start_of(), groups, ranks, layout, start, tmp_path / "checkpoints")
        before = check(facts, groups, ranks, start, before)
        losses.update(facts.traces["g0.0"].losses)
    plain = gold(loop="sharded-gold", steps=len(shapes) * STEPS, parts=1, dropout=0.0)
    assert losses == pytest.approx(plain.losses, rel=1e-4)
