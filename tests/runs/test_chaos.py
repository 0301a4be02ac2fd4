"""Every fault of `lightkeeper chaos list` on a real job, and faults on a job that runs already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightkeeper.chaos import checkers
from lightkeeper.chaos.acts import SKIPPED, CannotStrike
from lightkeeper.chaos.checkers import Outcome, Struck
from lightkeeper.chaos.faults import FAULTS, ONES, OTHER, VICTIM, Plan, Shape, plan
from lightkeeper.chaos.journal import Journal, read_journal
from lightkeeper.chaos.strikes import Striker
from lightkeeper.chaos.workloads import Workload
from lightkeeper.events import read_run, schema
from lightkeeper.manager import exits
from lightkeeper.manager.processes import has_ended

TWO = Shape(groups=2)
SEED = int(os.environ.get("LIGHTKEEPER_SEED", "0"))
RUN_S_MAX = 400.0


def chaos(*words: str, within_s: float = RUN_S_MAX) -> dict[str, Any]:
    """What the command says; the test fails with what it told on the way unless all its checks hold."""
    command = [sys.executable, "-m", "lightkeeper", "chaos", *words, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, env=environment, check=False)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, f"{done.returncode}: {done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["ok"] and done.returncode == 0, f"{result['failed']}\n{done.stderr}"
    return result


def on_two(name: str, **expected: Any) -> Plan:
    """The fault on a job of two groups, with what is expected there instead."""
    fault = FAULTS[name]
    return plan(replace(fault, shape=TWO, expected=replace(fault.expected, **expected)), SEED)


def test_faults_on_one_job_of_two_groups(tmp_path: Path) -> None:
    """Three that nobody is to be blamed for; then one is frozen, left out and not started again."""
    folder = tmp_path / "run"
    plans = [on_two(name) for name in ("freeze-short", "log-unwritable", "cut-link")]
    plans.append(on_two("freeze", away=(VICTIM,), codes=(exits.FENCED,)))
    struck, told = [], []
    with Workload(folder, TWO, SEED, restarts=0) as job:
        journal = Journal(folder, "the test", {}, told.append)
        job.start({})
        job.await_steps(set(TWO.names), 2, "all train")
        before = job.descriptors(set(TWO.names))
        for planned in plans:
            try:
                done = Striker(job, journal).strike(planned)
            except CannotStrike as error:
                assert planned.fault.name == "cut-link", error
                continue
            struck.append(Struck(planned, tuple(done.back)))
        after = job.descriptors({planned.roles[OTHER] for planned in plans[-1:]})
        codes, left = job.finish(), job.leftovers()
    events = read_run(folder).events
    started = [event for event in events if isinstance(event, schema.ProcessStarted)]
    assert [event.process for event in started if event.process == "lighthouse"], "else a new one is not found"
    outcome = Outcome(events, TWO.names, struck, codes, left, before, after)
    failed = checkers.as_dict(checkers.check(outcome))["failed"]
    assert not failed and len(struck) >= 3, [failed, *told]


@pytest.mark.long
@pytest.mark.timeout(RUN_S_MAX + 20)
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_strikes_and_the_right_one_is_blamed(name: str, tmp_path: Path) -> None:
    result = chaos("run", name, "--seed", str(SEED), "--run-folder", str(tmp_path / "run"))
    assert result["checks"]["fault"]["holds"] and result["checks"]["blamed"]["holds"]
    journal = read_journal(tmp_path / "run")
    assert journal[0]["asked"] == {"name": name, "seed": SEED} and journal[-1]["what"] == "result"
    assert [entry for entry in journal if entry["what"] == "injected"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_soak_of_some_faults_holds(tmp_path: Path) -> None:
    words = ("--minutes", "1.5", "--interval-s", "15", "--seed", str(SEED))
    chaos("soak", *words, "--run-folder", str(tmp_path / "run"), within_s=880)
    journal = read_journal(tmp_path / "run")
    done = [entry["fault"] for entry in journal if entry["what"] == "injected"]
    skipped = [entry["fault"] for entry in journal if entry["what"] == "skipped"]
    planned = [entry["fault"] for entry in journal if entry["what"] == "planned"]
    assert len(done) >= 2 and sorted(planned) == sorted([*done, *skipped])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Workload]:
    """A job of three groups that trains."""
    with Workload(tmp_path / "run", ONES, SEED) as made:
        made.start({})
        made.await_steps(set(ONES.names), 3, "all train")
        yield made


@pytest.mark.long
@pytest.mark.timeout(RUN_S_MAX)
def test_faults_are_injected_into_a_job_that_runs(job: Workload) -> None:
    folder = ("--run", str(job.folder))
    chaos("inject", "freeze-short", *folder, "--group", "g1")
    found = chaos("inject", "freeze", *folder, "--group", "g1")
    assert found["checks"]["blamed"]["text"].startswith("g1 (")
    job.await_event(schema.Rejoined, 0, "g1 is back", 150, group="g1")
    chaos("inject", "log-unwritable", "--lighthouse", job.lighthouse, "--group", "g2")
    job.await_steps(set(ONES.names), 3, "all train on")
    codes = job.finish()
    assert set(codes.values()) == {0} and not job.leftovers()


@pytest.mark.long
@pytest.mark.timeout(RUN_S_MAX)
def test_what_is_not_there_any_more_is_refused(job: Workload) -> None:
    job.finish()
    command = [sys.executable, "-m", "lightkeeper", "chaos", "inject", "kill", "--group", "g1"]
    command += ["--run", str(job.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 1 and "is not running any more" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.timeout(RUN_S_MAX)
def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "lightkeeper", "chaos", "run", "kill", "--run-folder", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 180
    while not (folder / "events").exists() or not any((folder / "events").glob("rank-*.jsonl")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    pids = {event.pid for event in read_run(folder).events if event.process != "chaos"}
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in out, out
    left = [pid for pid in pids if not has_ended(pid)]
    assert not left, left
