"""Who is not let in, and what it is told; nobody else is harmed by it."""

from __future__ import annotations

import time

import pytest
from harness import TOKEN, Job, port_below_ephemeral
from healed import PATIENT

from lightkeeper.events import schema

STEPS = 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 8}, ("microbatches of step 0", "8", "6")),
        ({"width": 17}, ("0.weight", "[17, 8]", "[16, 8]")),
        ({"optimizer": "sgd"}, ("SGD", "AdamW")),
        ({"lr": 2e-2}, ("lr", "0.02", "0.01")),
        ({"seed": 2}, ("seed", "2", "1")),
        ({"steps": STEPS + 1}, ("until", str(STEPS + 1), str(STEPS))),
        ({"loop": "with_extras"}, ("extra load", "float32[5]")),
    ],
)
def test_a_group_that_differs_is_refused_by_name(job: Job, options: dict, words: tuple[str, ...]) -> None:
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=STEPS)
    job.wait_for(schema.Joined, group="g0")
    job.start("g1", **{"steps": STEPS, **options})
    codes = job.wait("g1")
    assert codes["g1"] not in (0, None)
    assert job.trainers["g0"].exitcode is None, "g0 waits for a group that fits"
    refused = job.wait_for(schema.Refused, group="g1")
    assert "g1 differs from g0" in refused.reason and all(word in refused.reason for word in words), refused.reason
    assert all(word in job.said("g1") for word in words), job.said("g1")
    job.start("g1", steps=STEPS)  # and with what the others have it is let in
    facts = job.finish()
    assert facts.codes["g0"] == 0 and facts.codes["g1-again"] == 0
    assert facts.members == [("g0", "g1")]


def test_other_bucket_sizes_are_refused(job: Job) -> None:
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=STEPS)
    job.wait_for(schema.Joined, group="g0")
    job.start("g1", steps=STEPS, settings={"bucket_mb": 2})
    assert job.wait("g1")["g1"] not in (0, None)
    assert "bucket_mb is 2.0" in job.said("g1")


def test_two_processes_claim_one_group(job: Job) -> None:
    job.start_lighthouse(*PATIENT)
    job.start_healing(2, delay=0.25)  # until who comes was seen
    job.wait_for(schema.Committed, group="g1", step=2)
    job.start("g1", **job.heal_options)
    codes = job.wait("g1-again")
    job.hurry()
    assert codes["g1-again"] not in (0, None)
    assert "already run by incarnation" in job.said("g1-again") and "still beats" in job.said("g1-again")
    facts = job.finish()
    assert facts.codes["g0"] == facts.codes["g1"] == 0
    assert not facts.lost and len(facts.epochs) == 1
    assert "already run" in facts.one(schema.Refused, group="g1").reason


def test_two_processes_claim_one_group_before_the_start(job: Job) -> None:
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=STEPS)
    job.wait_for(schema.Joined, group="g0")
    job.start("g0", steps=STEPS)
    assert job.wait("g0-again")["g0-again"] not in (0, None)
    assert "already run by incarnation" in job.said("g0-again")
    job.start("g1", steps=STEPS)
    facts = job.finish()
    assert facts.codes["g0"] == facts.codes["g1"] == 0


def test_a_group_too_many(job: Job) -> None:
    job.start_lighthouse(*PATIENT)
    job.start_healing(2, delay=0.25)  # until who comes was seen
    job.wait_for(schema.Committed, group="g1", step=2)
    job.start("g7", **job.heal_options)
    assert job.wait_for(schema.Parked).group == "g7"
    job.hurry()
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g7": 0} and not facts.lost
    assert "parked: 2 groups are here, the job has 2" in facts.said["g7"]


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_wrong_or_missing_token(job: Job, token: str) -> None:
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=STEPS)
    job.wait_for(schema.Joined, group="g0")
    job.start("g1", steps=STEPS, settings={"token": token})
    assert job.wait("g1")["g1"] not in (0, None)
    said = job.said("g1")
    assert ("refused our token" in said) if token else ("no job token" in said and "LIGHTKEEPER_TOKEN" in said)
    assert TOKEN not in said
    if token:
        job.wait_for(schema.Unauthorised, process="lighthouse")
    job.start("g1", steps=STEPS)
    facts = job.finish()
    assert facts.codes["g0"] == facts.codes["g1-again"] == 0


# ---------------------------------------------------------------- the lighthouse and the run folder


def test_no_lighthouse(job: Job) -> None:
    job.lighthouse = f"127.0.0.1:{port_below_ephemeral()}"
    began = time.monotonic()
    job.start("g0", steps=STEPS, settings={"outage_budget_s": 2})
    job.until(lambda: "trying again" in job.said("g0"), "it says so")
    assert job.lighthouse in job.said("g0")
    assert job.wait("g0")["g0"] not in (0, None)
    assert time.monotonic() - began >= 2.0, "it has tried for as long as the budget"
    assert "could not be reached for" in job.said("g0") and "exit code 105" in job.said("g0")
    job.finish()


def test_the_lighthouse_comes_later(job: Job) -> None:
    port = port_below_ephemeral()
    job.lighthouse = f"127.0.0.1:{port}"
    job.settings.update(groups=2, outage_budget_s=60)  # the lighthouse may take a while to start
    for group in ("g0", "g1"):
        job.start(group, steps=STEPS)
    job.until(lambda: all("trying again" in job.said(g) for g in ("g0", "g1")), "both say so")
    job.start_lighthouse(*PATIENT, port=port)
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"})
    assert all("is back" in text for text in facts.said.values())


@pytest.mark.parametrize("where", ["file", "missing"])
def test_a_run_folder_that_cannot_be_written(job: Job, where: str) -> None:
    job.start_lighthouse(*PATIENT)
    path = job.folder / "taken"
    path.write_text("a file, not a folder")
    job.start("g0", steps=STEPS, settings={"run_folder": path if where == "file" else "/proc/no/such"})
    assert job.wait("g0")["g0"] not in (0, None)
    assert "cannot write the run folder" in job.said("g0")
    job.finish()
