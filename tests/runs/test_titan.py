"""torchtitan's own loop in replica groups that die, freeze and come back; beside torchtitan alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, Job, port_below_ephemeral

from lightkeeper.events import schema
from lightkeeper.events.summary import fingerprints_equal, one_lineage, samples_exactly_once, steps_lost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.timeout(400),
]

SCRIPT = HERE / "titan_script.py"
LOSS = re.compile(r"step: *(\d+)  loss: *([0-9.]+)")
START_S, HEAL_S = 400, 400  # two cores import torchtitan for several processes at once


def arguments(job: Job, group: str, steps: int, *more: str, **own: Any) -> list[str]:
    options = {"trace": str(job.folder / f"titan-{group}"), "hurry": str(job.folder / "hurry"), "delay": 0.3, **own}
    return [str(SCRIPT), json.dumps(options), "--training.steps", str(steps), "--dump_folder", str(job.folder), *more]


def start(
    job: Job, groups: int, ranks: int, steps: int, fault: str = "", restarts: int = 0, more: Any = (), only: Any = None
) -> None:
    """A lighthouse and so many groups; `more` words for torchtitan, `only` the script's options of single groups."""
    job.settings.update(groups=groups, ranks=ranks, outage_budget_s=60, bucket_mb=1)
    job.variables.update(OMP_NUM_THREADS="1", LIGHTKEEPER_WARM="0")
    job.start_lighthouse()
    for i in range(groups):
        words = arguments(job, f"g{i}", steps, *more, **(only or {}).get(f"g{i}", {}))
        job.start_command(f"g{i}", words, fault, env={"LIGHTKEEPER_RESTARTS": str(restarts)})


def plain(
    folder: Path, ranks: int, steps: int, *more: str, stop: int = 0, within_s: float = START_S
) -> dict[int, dict[str, Any]]:
    """torchtitan alone on so many ranks; what rank 0 wrote after each step, and its losses."""
    folder.mkdir(exist_ok=True)
    options = json.dumps({"trace": str(folder / "plain"), "plain": True, "stop": stop})
    meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_below_ephemeral())}
    words = [sys.executable, str(SCRIPT), options, "--training.steps", str(steps), "--debug.seed", "0",
             "--dump_folder", str(folder), *more]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
    children = []
    for rank in range(ranks):
        own = {**clean, **meet, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"plain-{rank}.out").open("wb") as output:
            children.append(subprocess.Popen(words, env=own, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [child.wait(timeout=within_s) for child in children]
    finally:
        for child in children:
            child.kill()
    said = (folder / "plain-0.out").read_text()
    assert codes == [0] * ranks, said
    found = {line["step"]: line for line in map(json.loads, (folder / "plain.0").read_text().splitlines())}
    return {step: {**line, "loss": dict(losses(said))[step]} for step, line in found.items()}


def losses(said: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in LOSS.findall(said)]


def digests(job: Job, group: str, rank: int = 0) -> dict[int, str]:
    lines = (job.folder / f"titan-{group}.{rank}").read_text().splitlines()
    return {line["step"]: line["digest"] for line in map(json.loads, lines)}


def holds(facts: Any, steps: int) -> None:
    for rule in (samples_exactly_once(facts.events, steps), one_lineage(facts.events), steps_lost(facts.events)):
        assert rule.holds, rule.why
    assert fingerprints_equal(facts.events).holds


def test_one_group_has_the_bits_of_torchtitan_alone(job: Job, tmp_path: Path) -> None:
    start(job, 1, 1, 6)
    job.hurry()
    facts = job.finish(within_s=START_S)
    assert facts.codes == {"g0": 0}
    alone = plain(tmp_path / "plain", 1, 6)
    assert digests(job, "g0") == {step: line["digest"] for step, line in alone.items()} and len(alone) == 6
    assert losses(facts.said["g0"]) == [(step, line["loss"]) for step, line in alone.items()]


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [(1, "kill:g1:reduce:9"), pytest.param(2, "kill:g1/1:compute:9", marks=pytest.mark.long)],
)
def test_a_killed_group_comes_back_and_the_run_is_the_same(job: Job, tmp_path: Path, ranks: int, fault: str) -> None:
    steps, compared = 200, 80
    start(job, 2, ranks, steps, fault, restarts=2)
    job.wait_for(schema.Rejoined, HEAL_S, group="g1")
    job.hurry()
    facts = job.finish(within_s=HEAL_S)
    assert facts.codes == {"g0": 0, "g1": 0}
    assert len(facts.all(schema.FaultInjected)) == 1 and facts.lost.keys() == {"g1"}
    holds(facts, steps)
    for rank in range(ranks):
        ours, theirs = digests(job, "g0", rank), digests(job, "g1", rank)
        assert len(ours) == steps and all(ours[step] == digest for step, digest in theirs.items())
        assert steps in theirs
    shape = [
        "--parallelism.data_parallel_replicate_degree",
        "2",
        "--parallelism.data_parallel_shard_degree",
        str(ranks),
    ]
    alone = plain(tmp_path / "plain", 2 * ranks, steps, *shape, stop=compared)
    said = dict(losses(facts.said["g0"]))
    assert len(alone) == compared
    if ranks == 1:
        assert [said[step] for step in alone] == [line["loss"] for line in alone.values()]
    else:  # the sums have another order: the last bits differ, and grow
        first = [alone[step]["loss"] for step in range(1, 16)]
        assert [said[step] for step in range(1, 16)] == pytest.approx(first, rel=1e-5)


@pytest.mark.long
def test_data_that_ends_cancels_the_same_step_in_all_groups(job: Job) -> None:
    """g0 reads a loader of six batches, g1 one of seven; torchtitan's own loop ends as without fault tolerance."""
    start(job, 2, 1, 40, only={"g0": {"ends": 6}, "g1": {"ends": 6}})
    job.hurry()
    facts = job.finish(within_s=START_S)
    assert facts.codes == {"g0": 0, "g1": 0} and not facts.lost
    holds(facts, 6)
    assert digests(job, "g0") == digests(job, "g1") and max(digests(job, "g0")) == 6
    for said in facts.said.values():
        assert said.count("the data ends before step 6: 1 of 2 parts of its microbatches have no batch") == 1
        assert said.count("Ran out of data; last step was canceled.") == 1 and "Training completed" in said


def saving(interval: int) -> list[str]:
    """Words that keep checkpoints from which a run can go on, with a rate that does not depend on the last step."""
    return [
        "--lr_scheduler.decay_ratio", "0.0", "--checkpoint.enable", "--checkpoint.interval", str(interval),
        "--checkpoint.no-last_save_model_only",
    ]  # fmt: skip


@pytest.fixture
def again(job: Job, tmp_path: Path) -> Iterator[Callable[[int, list[str]], Job]]:
    """Ends a run of two groups after so many steps, and returns a job in whose folder its checkpoint lies."""
    made = Job(tmp_path / "again")

    def after(steps: int, words: list[str]) -> Job:
        start(job, 2, 1, steps, more=words)
        job.hurry()
        assert job.finish(within_s=START_S).codes == {"g0": 0, "g1": 0}
        shutil.copytree(job.folder / "checkpoint", made.folder / "checkpoint")
        return made

    yield after
    made.end()


@pytest.mark.long
def test_a_run_goes_on_from_its_checkpoint_and_reads_what_comes_next(
    again: Callable[[int, list[str]], Job], tmp_path: Path
) -> None:
    """Its losses are those of a run that was never ended; g1 does not write the checkpoint, and loads it."""
    same = saving(8)
    resumed = again(8, same)
    start(resumed, 2, 1, 16, more=same)
    resumed.hurry()
    facts = resumed.finish(within_s=START_S)
    assert facts.codes == {"g0": 0, "g1": 0} and facts.epochs[0].first_step == 8
    assert digests(resumed, "g0") == digests(resumed, "g1") and sorted(digests(resumed, "g0")) == list(range(9, 17))
    shape = ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]
    alone = plain(tmp_path / "plain", 2, 16, *shape, *same[:2])
    assert losses(facts.said["g0"]) == [(step, alone[step]["loss"]) for step in range(9, 17)]
    assert not facts.all(schema.Healed), "both had loaded it"


@pytest.mark.long
def test_a_group_comes_back_to_a_run_that_began_at_a_checkpoint(again: Callable[[int, list[str]], Job]) -> None:
    """Whoever loaded it has the optimizer's keys in another order than who loads nothing and is healed."""
    same, steps = saving(500), 150
    resumed = again(4, same)
    start(resumed, 2, 1, steps, "kill:g1:reduce:7", restarts=2, more=same)
    resumed.wait_for(schema.Rejoined, HEAL_S, group="g1")
    resumed.hurry()
    facts = resumed.finish(within_s=HEAL_S)
    assert facts.codes == {"g0": 0, "g1": 0} and facts.epochs[0].first_step == 4
    assert len(facts.all(schema.FaultInjected)) == 1 and facts.lost.keys() == {"g1"}
    assert not facts.all(schema.HealFailed)
    ours, theirs = digests(resumed, "g0"), digests(resumed, "g1")
    assert theirs.items() <= ours.items() and steps in theirs and sorted(ours) == list(range(5, steps + 1))
