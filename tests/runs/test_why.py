"""`lightkeeper why` on real runs: who did it, said by all that the processes wrote."""

from __future__ import annotations

import json

import pytest
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema

STEPS, AT = 10, 5
FLOOR_S = 8.0


def verdict(job: Job, *which: str) -> dict:
    done = job.command("why", str(job.folder), *which, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(told: dict, group: str) -> set[str]:
    return {signal["name"] for signal in told["signals"] if signal["group"] == group}


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def test_a_rank_that_was_killed(job: Job) -> None:
    job.start_all(3, fault=f"kill:g1:reduce:{AT}", steps=STEPS)
    facts = job.finish()
    facts.fault("kill", "reduce", "g1", AT)
    told = verdict(job)
    who = told["culprit"]
    assert (who["group"], who["rank"], who["kind"], told["step"]) == ("g1", 0, "killed", AT)
    assert "SIGKILL" in who["cause"] and who["confidence"] >= 0.9 and not told["low"] and not told["others"]
    assert who["node"] == facts.fault("kill", "reduce", "g1", AT).host
    assert "exit" in names(told, "g1") and not names(told, "g0") - {"not arrived", "complains of itself"}
    assert told["victims"] == ["g0", "g2"]
    assert any(done.startswith(f"g1 left out from step {AT}") for done in told["done"])
    stalls = {r.group: r.stall_s for r in facts.all(schema.Recovered, step=AT)}
    assert told["cost"]["stalls_s"].keys() == stalls.keys() and told["cost"]["steps_lost"] == 0
    assert all(told["cost"]["stalls_s"][group] >= stall_s - 1e-4 for group, stall_s in stalls.items())
    assert told["cost"]["further"] == len({k for r in facts.all(schema.Recovered) for k in r.further}) > 0
    lines = job.command("why", str(job.folder)).stdout.splitlines()
    assert len(lines) == 6 and lines[0].startswith("g1 rank 0 on ") and "OOM killer" in lines[5]
    assert job.command("why", str(job.folder), "g1").stdout.splitlines() == lines
    missing = job.command("why", str(job.folder), "99")
    assert missing.returncode == 2 and f"there are 1, at step {AT}; about g1" in missing.stderr


@pytest.mark.long
def test_a_rank_that_was_stopped(job: Job) -> None:
    job.start_all(3, fault=f"freeze:g2:compute:{AT}", steps=STEPS)
    facts = job.finish()
    fault = facts.fault("freeze", "compute", "g2", AT)
    told = verdict(job)
    who = told["culprit"]
    assert (who["group"], who["kind"], told["step"]) == ("g2", "frozen", AT)
    noticed = facts.lost["g2"].wall
    assert fault.wall - 0.5 < who["since"] < noticed - 0.9, "since it stood still, not since it was noticed"
    assert "g2 fenced" in told["done"] and told["victims"] == ["g0", "g1"]


@pytest.mark.long
def test_a_rank_that_is_stuck(job: Job) -> None:
    job.settings["stall_floor_s"] = FLOOR_S
    job.start_all(3, fault=f"stall:g2:compute:{AT}", steps=STEPS)
    facts = job.finish()
    fault = facts.fault("stall", "compute", "g2", AT)
    told = verdict(job)
    who = told["culprit"]
    assert (who["group"], who["rank"], who["kind"], told["step"]) == ("g2", 0, "stuck", AT)
    assert fault.wall - 0.5 < who["since"] < facts.lost["g2"].wall - FLOOR_S + 0.1 and told["victims"] == ["g0", "g1"]
    assert max(told["cost"]["stalls_s"].values()) > 1.0, "they stood for it until its deadline"
    assert names(told, "g2") >= {"deadline", "not arrived"} and "manager.expect" in told["advice"]


@pytest.mark.long
def test_a_group_with_a_bug(job: Job) -> None:
    job.start_all(3, steps=STEPS, only={"g2": {"behave": f"raise:{AT}"}})
    facts = job.finish()
    assert facts.one(schema.UserError).group == "g2"
    told = verdict(job)
    who = told["culprit"]
    assert (who["group"], who["rank"], who["kind"], told["step"]) == ("g2", 0, "exception", AT)
    assert "ValueError" in who["cause"] and "fix it" in told["advice"]


@pytest.mark.long
def test_73_one_raises_one_is_stopped_and_the_others_wait(job: Job) -> None:
    """The report names both, with what each did; who only waited is no culprit."""
    only = {"g2": {"behave": f"raise-in-hook:{AT}"}}  # over its backward pass, when g1 has long been stopped
    job.start_all(4, fault=f"freeze:g1:compute:{AT}", steps=STEPS, only=only, delay=0.5)
    facts = job.finish()
    facts.fault("freeze", "compute", "g1", AT)
    told = verdict(job)
    held = {one["group"]: one for one in (told["culprit"], *told["others"])}
    assert held.keys() == {"g1", "g2"} and told["victims"] == ["g0", "g3"]
    assert "raised TypeError" in held["g2"]["cause"] and held["g1"]["kind"] == "frozen"
    assert told["culprit"]["since"] <= told["others"][0]["since"] and told["step"] == AT
    assert any("g1, g2 left out" in done for done in told["done"])


@pytest.mark.long
def test_the_same_bug_in_all_groups_is_the_jobs(job: Job) -> None:
    job.start_all(3, steps=STEPS, behave=f"raise:{AT}")
    job.finish()
    told = verdict(job)
    assert (told["culprit"]["group"], told["culprit"]["kind"], told["step"]) == ("", "job", AT)
    assert "ValueError" in told["culprit"]["cause"]


@pytest.mark.long
def test_nothing_happened(job: Job) -> None:
    job.start_all(2, steps=3)
    job.finish()
    done = job.command("why", str(job.folder))
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert done.stdout.startswith("no incident in ")
