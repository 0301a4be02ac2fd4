"""Scenario 37: every option of a group and of the lighthouse, set to an extreme, changes what happens."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TOKEN, Job
from healed import PATIENT

from lightkeeper.errors import UsageError
from lightkeeper.events import schema
from lightkeeper.events.reader import seconds_between
from lightkeeper.manager.settings import Settings, read_settings

SHOWN_BY = {
    "lighthouse": "test_lighthouse",
    "job": "test_job",
    "group": "test_clean: names of the members",
    "groups": "test_groups",
    "minimum": "test_minimum",
    "spares": "test_spares: who returns is the spare",
    "role": "test_spares: a reserve is parked; machines/test_lighthouse_spares: set up as a spare",
    "start_window_s": "test_start_window",
    "ranks": "test_ranks",
    "nnodes": "test_nodes",
    "node_rank": "test_nodes",
    "manager": "test_nodes: where the agent looks for it",
    "token": "test_refusals",
    "run_folder": "test_event_log.test_a_run_without_a_folder",
    "outage_budget_s": "test_outage_budget",
    "evidence_s": "unit/test_evidence: a kill is put off by no more",
    "stall_floor_s": "unit/test_deadlines: the deadline of short steps",
    "form_timeout_s": "unit/test_gloo.test_a_build_nobody_joins_ends_by_its_time_out",
    "quorum_wait_s": "test_quorum: the job ends as one and is kept",
    "stop_deadline_s": "machines/test_group_keeps: a save that takes too long",
    "start_budget_s": "test_start_budget",
    "first_step_s": "unit/test_deadlines: a first step",
    "reduce_timeout_s": "unit/test_timeouts: what declared work is compared with",
    "collective_timeout_s": "test_launch: the time-out of the group's own process group",
    "host": "test_host",
    "bucket_mb": "test_bucket_mb",
    "history_mb": "test_heal: a joiner slower than training",
    "fingerprint_every": "test_fingerprint_every",
    "deal": "test_dealing",
    "slow": "test_stuck: a slow group is asked to leave",
    "notice_file": "test_leave",
}


def test_no_option_is_forgotten_here() -> None:
    assert {field.name for field in dataclasses.fields(Settings)} == SHOWN_BY.keys()


def test_lighthouse(job: Job) -> None:
    """Two lighthouses: the group is a member where it was told."""
    first = job.start_lighthouse()
    (job.folder / "log").rename(job.folder / "log-of-first")
    second = job.start_lighthouse()
    job.lighthouse = first
    job.start("g0", steps=3)
    facts = job.finish()
    assert facts.codes == {"g0": 0} and first != second
    assert [e.pid for e in facts.epochs] == [job.lighthouses[0].pid]


def test_job(job: Job) -> None:
    """Two jobs with the same group names on one lighthouse do not meet (scenario 12)."""
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    for i, name in enumerate(("a", "b")):
        for group in ("g0", "g1"):
            settings = {"job": name, "run_folder": str(job.folder / name)}
            job.trainers[f"{name}-{group}"] = job.start(
                group,
                "kill:g1:reduce:5" if i else "",
                settings,
                steps=10,
                trace=str(job.folder / f"trace-{name}-{group}"),
            )
    job.wait()
    facts = job.finish()
    assert [facts.codes[f"a-{g}"] for g in ("g0", "g1")] == [0, 0]
    assert [facts.codes[f"b-{g}"] for g in ("g0", "g1")] == [0, -9]
    epochs = {name: [e for e in facts.epochs if e.job == name] for name in ("a", "b")}
    assert len(epochs["a"]) == 1 and epochs["b"][-1].members == ("g0",)


def test_groups(job: Job) -> None:
    """The first epoch waits for as many as are configured, and says so."""
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=3)
    waiting = job.wait_for(schema.Waiting)
    assert "1 more" in waiting.whom and "needs 2" in waiting.why
    assert not job.events() or not [e for e in job.events() if isinstance(e, schema.Activated)]
    job.start("g1", steps=3)
    job.finish().check(3, {"g0", "g1"})


def test_minimum(job: Job) -> None:
    """With a minimum of two of two, the one that is left waits, and the job ends."""
    job.settings.update(groups=2, minimum=2, quorum_wait_s=2)
    job.start_lighthouse(*PATIENT)
    job.start_all(2, steps=10, fault="kill:g1:reduce:5")
    waiting = job.wait_for(schema.Waiting, whom="any group")
    assert "at least 2" in waiting.why
    facts = job.finish()
    assert facts.codes["g1"] == -9 and facts.codes["g0"] not in (0, None)
    assert {epoch.members for epoch in facts.epochs} == {("g0", "g1")} and max(facts.commits("g0")) == 4
    assert "of at least 2 groups g0 alone was left for 2 s" in facts.said["g0"]


def test_start_window(job: Job) -> None:
    """With it the first epoch starts with fewer than all."""
    job.settings.update(groups=3, minimum=2, start_window_s=1.0)
    job.start_lighthouse(*PATIENT)
    for group in ("g0", "g1"):
        job.start(group, steps=3)
    facts = job.finish()
    facts.check(3, {"g0", "g1"})
    first = min(facts.all(schema.Joined), key=lambda e: e.mono_ns)
    assert seconds_between(first, facts.epochs[0]) >= 0.9


def test_ranks(job: Job) -> None:
    """A group of several ranks takes a launcher, and says so."""
    job.start_lighthouse()
    job.start("g0", steps=3, settings={"ranks": 2})
    assert job.wait("g0")["g0"] not in (0, None)
    assert "use `lightkeeper launch`" in job.said("g0")
    job.finish()


def test_outage_budget(job: Job) -> None:
    """How long a group waits for a lighthouse; `test_refusals.test_no_lighthouse` shows that it does wait."""
    job.lighthouse = "127.0.0.1:9"
    job.start("g0", steps=3, settings={"outage_budget_s": 1})
    job.start("g1", steps=3, settings={"outage_budget_s": 86_000})
    job.wait("g0")
    assert job.trainers["g1"].exitcode is None
    job.trainers["g1"].kill()
    job.finish()


def test_start_budget(job: Job) -> None:
    """How long the first epoch is waited for, while the lighthouse is there."""
    job.settings.update(groups=2, outage_budget_s=8, start_budget_s=9)
    job.start_lighthouse()
    job.start("g0", steps=3)
    assert job.wait("g0")["g0"] not in (0, None)
    assert "step 0 has been waiting for" in job.said("g0") and "exit code 105" in job.said("g0")
    job.finish()


@pytest.mark.parametrize("command", ["launch", "manager"])
def test_an_inverted_order_is_refused_at_the_start(command: str, job: Job, tmp_path: Path) -> None:
    """Scenario 23: before anything is started, in one line that names the pair."""
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    words = [command, "--group", "g0", "--reduce-timeout-s", "100"]
    words += ["--", str(tmp_path / "train.py")] if command == "launch" else []
    done = subprocess.run(
        [sys.executable, "-m", "lightkeeper", *words],
        env={**job._environment({}), "LIGHTKEEPER_FIRST_STEP_S": "150"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "it was started" not in done.stderr, done.stderr
    (line,) = done.stderr.splitlines()
    assert (
        "first_step_s 150 (LIGHTKEEPER_FIRST_STEP_S) must be below reduce_timeout_s 100 (--reduce-timeout-s): the "
        "others stand in their reduce while one does its first step; lower first_step_s or leave it out" in line
    )


def test_a_lease_above_the_budget_ends_a_group_that_is_no_member(job: Job) -> None:
    """The lease is the lighthouse's: the order is wrong once it has said it."""
    job.settings.update(groups=2, outage_budget_s=5)
    job.start_lighthouse("--lease-s", "6")
    job.start("g0", steps=3)
    assert job.wait("g0")["g0"] not in (0, None)
    said = job.said("g0")
    assert (
        "lease_s 6 (--lease-s of the lighthouse) must be below outage_budget_s 5 (LIGHTKEEPER_OUTAGE_BUDGET_S)" in said
    )
    assert "exit code 2" in said and not [e for e in job.events() if isinstance(e, schema.Activated)]
    job.finish()


def test_host(job: Job) -> None:
    """Peers reach the group where it says: 127.0.0.2 is another address of the same machine."""
    job.start_lighthouse(*PATIENT)
    job.start_healing(2, only={"g1": {"settings": {"host": "127.0.0.2"}}})
    job.wait_for(schema.Committed, group="g1", step=2)
    listening = {a.laddr.ip for a in _connections(job.trainers["g1"].pid) if a.status == "LISTEN"}
    assert listening == {"127.0.0.2"}, listening
    job.hurry()
    facts = job.finish()
    facts.check(150, {"g0", "g1"})


def _connections(pid: int | None) -> list:
    import psutil

    return psutil.Process(pid).net_connections("tcp")


def test_bucket_mb(job: Job) -> None:
    """A reduce takes one collective per bucket."""
    collectives = {}
    for size in ("0.001", "64"):
        job.settings.update(job=f"job-{size}", run_folder=str(job.folder / size))
        job.start_all(
            1, steps=3, behave="count-collectives", settings={"bucket_mb": size}, trace=str(job.folder / f"t{size}")
        )
        job.wait()
        from facts import read_trace

        collectives[size] = read_trace(job.folder / f"t{size}").all("collectives")[-1][0]
        job.trainers.clear()
    assert collectives["64"] == 2 < collectives["0.001"]  # one bucket and the extras


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (4, [3])])
def test_fingerprint_every(job: Job, every: int, steps: list[int]) -> None:
    job.start_all(1, steps=6, settings={"fingerprint_every": every})
    facts = job.finish()
    assert [c.step for c in facts.commits("g0").values() if c.fingerprint] == steps


# ---------------------------------------------------------------- the lighthouse's own


def test_lease_s(job: Job) -> None:
    """How long a frozen group is borne."""
    after = {}
    for lease_s in (2.0, 12.0):
        job.settings.update(job=f"job-{lease_s}")
        port = job.start_lighthouse("--lease-s", str(lease_s))
        assert port
        for group in ("g0", "g1"):
            job.start(group, "freeze:g1:reduce:3", {"groups": 2}, steps=6)
        job.wait()
        events = [e for e in job.events() if e.job == f"job-{lease_s}"]
        fault = next(e for e in events if isinstance(e, schema.FaultInjected))
        lost = next(e for e in events if isinstance(e, schema.GroupLost) and e.group == "g1")
        after[lease_s] = seconds_between(fault, lost)
        job.trainers.clear()
        job.lighthouses[-1].send_signal(signal.SIGTERM)
        job.lighthouses[-1].wait(120)
    assert 1.8 <= after[2.0] < 11.7 <= after[12.0], after


def test_a_lease_evicts_nobody_who_beats(job: Job) -> None:
    """The managers beat as often as the lighthouse says, a tenth of the lease, however short that is."""
    job.start_lighthouse("--lease-s", "4")  # shorter than g0 stands for g1 in every step
    job.start_all(2, steps=3, only={"g1": {"delay": 1.7}})
    facts = job.finish()
    facts.check(3, {"g0", "g1"})
    assert not facts.lost


def test_bind_log_run_folder_and_token_of_the_lighthouse(job: Job) -> None:
    address = job.start_lighthouse()
    assert (job.folder / "log" / "lighthouse.log").read_text().count('"kind": "term"') == 1
    printed = (job.folder / "lighthouse-0.out").read_text()
    assert address in printed and str(job.folder / "log") in printed
    job.start("g0", steps=2)
    job.wait_for(schema.Activated, process="lighthouse")
    job.finish()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lease-s", "0"], "0.1 to 3600"),
        (["--bind", "nowhere"], "HOST:PORT"),
        (["--token-file", "/no/such/file"], "cannot read the token file"),
        (["--log", "/proc/no"], "cannot write the lighthouse log"),
        (["--run-folder", "/proc/no"], "cannot write the run folder"),
    ],
)
def test_what_a_lighthouse_cannot_use(words: list[str], said: str, tmp_path: Path, job: Job) -> None:
    given = ["--bind", "127.0.0.1:0", *words]
    done = subprocess.run(
        [sys.executable, "-m", "lightkeeper", "lighthouse", *given],
        env=job._environment({}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert TOKEN not in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        {"minimum": 2},
        {"minimum": 0},
        {"groups": 0},
        {"ranks": 0},
        {"outage_budget_s": 0.5},
        {"bucket_mb": 0},
        {"start_window_s": -1},
        {"fingerprint_every": -1},
        {"group": ""},
        {"group": "a b"},
        {"job": "x/y"},
        {"lighthouse": "nowhere"},
    ],
)
def test_settings_that_cannot_be_right(given: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        Settings(token="t", **given)


def test_settings_come_from_the_environment_and_go_back() -> None:
    settings = Settings(
        token="t",
        groups=3,
        minimum=2,
        lighthouse="[::1]:77",
        outage_budget_s=7.5,
        bucket_mb=0.5,
        host="h",
        run_folder="/r",
    )
    assert read_settings(settings.to_environment()) == settings
    with pytest.raises(UsageError, match="LIGHTKEEPER_GROUPS='three' is not a number"):
        read_settings({"LIGHTKEEPER_GROUPS": "three"})
