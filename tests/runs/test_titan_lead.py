"""The group that leads a torchtitan run is lost while it saves, or before it has said a step's figures."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from harness import Job
from test_titan import arguments, holds
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightkeeper.events import schema

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.timeout(1000),
    pytest.mark.long,
]

WORDS = ["--checkpoint.enable", "--checkpoint.interval", "10", "--checkpoint.keep_latest_k", "2",
         "--metrics.enable_tensorboard"]  # fmt: skip
LOSS, CHECK = "loss_metrics/global_avg_loss", "validation_metrics/loss"
BOUND_S = 400  # a start takes minutes while others use the machine
VALIDATED = re.compile(r"validate step: *(\d+)")


def start(job: Job, steps: int, fault: str, ranks: int = 1, restarts: int = 0, **options: str) -> None:
    job.settings.update(groups=2, ranks=ranks, outage_budget_s=60, bucket_mb=1)
    job.variables.update(OMP_NUM_THREADS="1", LIGHTKEEPER_WARM="0")
    job.start_lighthouse()
    for group in ("g0", "g1"):
        script, told, *more = arguments(job, group, steps, *WORDS)
        words = [script, json.dumps({**json.loads(told), **options}), *more]
        job.start_command(group, words, fault, env={"LIGHTKEEPER_RESTARTS": str(restarts)})


def figures(job: Job, tag: str) -> list[int]:
    """Steps of a figure in the one folder that there is, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (job.folder / "tb").iterdir()
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [event.step for event in read.Scalars(tag)]


def whole(job: Job) -> set[str]:
    return {path.parent.name for path in (job.folder / "checkpoint").glob("*/.metadata")}


@pytest.mark.parametrize(("fault", "ranks"), [("kill:g0:apply:5", 1), ("kill:g0/1:checkpoint:11", 2)])
def test_the_last_step_is_saved_and_every_step_said_once(job: Job, fault: str, ranks: int) -> None:
    """Step 6 is committed and not said yet; the last step is being saved. An earlier run has left a torn save."""
    left = job.folder / "checkpoint" / "step-10" / "__1_0.distcp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"torn")
    start(job, 12, fault, ranks)
    job.hurry()
    facts = job.finish(within_s=BOUND_S)
    assert facts.codes == {"g0": 137, "g1": 0}
    assert len(facts.all(schema.FaultInjected)) == 1 and facts.lost.keys() == {"g0"}
    holds(facts, 12)
    assert figures(job, LOSS) == list(range(1, 13))
    assert whole(job) == {"step-10", "step-12"}
    for path in (job.folder / "checkpoint").iterdir():
        dcp_to_torch_save(path, job.folder / "read")
    assert left.exists() == (ranks == 2) and all(path.stat().st_size > 4 for path in left.parent.iterdir())


def test_the_lead_is_lost_while_it_saves_and_returns(job: Job) -> None:
    steps = 200
    start(job, steps, "kill:g0:checkpoint:19", restarts=2, config="validated")
    job.wait_for(schema.Rejoined, BOUND_S, group="g0")
    job.hurry()
    facts = job.finish(within_s=BOUND_S)
    assert facts.codes == {"g0": 0, "g1": 0}
    assert len(facts.all(schema.FaultInjected)) == 1 and facts.lost.keys() == {"g0"}
    holds(facts, steps)
    assert (
        whole(job) == {f"step-{steps - 10}", f"step-{steps}"} == {p.name for p in (job.folder / "checkpoint").iterdir()}
    )
    assert "no checkpoint is loaded, since g1 trains already" in facts.said["g0"]
    assert figures(job, LOSS) == list(range(1, steps + 1))
    validated = [1, *range(40, steps + 1, 20)]  # the lead was lost before it validated step 20
    assert figures(job, CHECK) == validated
    assert sorted(int(step) for said in facts.said.values() for step in VALIDATED.findall(said)) == validated
