"""Faults on jobs that are not ours: which processes are hit, and what is refused in one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from cli_said import one_line, only_the_token

from lightkeeper.chaos.acts import ACTS, CannotStrike, Hit
from lightkeeper.chaos.targets import NotHere, Processes, run_folder_at
from lightkeeper.cli.app import run
from lightkeeper.events import EventLog, read_run, schema
from lightkeeper.manager.processes import is_stopped

HOST = socket.gethostname()
MINE = f"of-this-test-{os.getpid()}"  # a name that no other job on this machine has
WRITES = """
import sys, time
from lightkeeper.events import EventLog, schema
log = EventLog(sys.argv[1], sys.argv[2], job="j", group="g1", incarnation="i1")
log.write(schema.ProcessStarted())
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    log.write(schema.Waiting(whom="the test", since_s=0.0))
    time.sleep(0.01)
"""


@contextmanager
def started(folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes under this name until it is ended."""
    addresses = {"LIGHTKEEPER_LIGHTHOUSE": f"127.0.0.1:9,{MINE}:2", "LIGHTKEEPER_RUN_FOLDER": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(folder), name],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **addresses},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with started(tmp_path, "rank g1/0") as process:
        yield process


def hit(folder: Path) -> Hit:
    return Hit(Processes(read_run(folder).events), "g1")


def test_the_rank_that_wrote_is_found_until_it_is_gone(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    assert hit(tmp_path).rank_pid == rank.pid and hit(tmp_path).processes.incarnation("g1") == "i1"
    ACTS["kill"].strike(hit(tmp_path))
    assert rank.wait(timeout=60) == -signal.SIGKILL
    with pytest.raises(NotHere, match=f"rank g1/0 .pid {rank.pid}. is not running any more"):
        ACTS["kill"].strike(hit(tmp_path))


def test_a_frozen_rank_is_thawed(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    struck = hit(tmp_path)
    ACTS["freeze"].strike(struck)
    assert is_stopped(rank.pid)
    ACTS["freeze"].mend(struck)
    written = len(read_run(tmp_path).events)
    until = time.monotonic() + 60
    while len(read_run(tmp_path).events) == written:
        assert time.monotonic() < until, "it does not go on"


def test_nothing_can_be_written_until_it_is_mended(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    with started(tmp_path, "manager g1") as manager:
        struck = hit(tmp_path)
        ACTS["log-unwritable"].strike(struck)
        for process in (rank, manager):
            assert process.stderr is not None
            assert "events are being dropped" in process.stderr.readline()
        ACTS["log-unwritable"].mend(struck)
        for process in (rank, manager):
            assert process.stderr is not None
            assert "writing works again" in process.stderr.readline()
        dropped = [e.process for e in read_run(tmp_path).events if isinstance(e, schema.EventsDropped)]
        assert sorted(dropped) == ["manager g1", "rank g1/0"]


def test_whoever_runs_elsewhere_or_had_the_pid_before_is_not_hit() -> None:
    there = schema.Waiting(
        whom="x", since_s=0, process="rank g1/0", host="elsewhere", pid=os.getpid(), wall=time.time()
    )
    with pytest.raises(NotHere, match=f"rank g1/0 runs on elsewhere, and this is {HOST}"):
        Processes([there]).pid("rank g1/0")
    before = schema.Waiting(whom="x", since_s=0, process="rank g1/0", host=HOST, pid=os.getpid(), wall=1000.0)
    with pytest.raises(NotHere, match="is not running any more"):
        Processes([before]).pid("rank g1/0")
    with pytest.raises(NotHere, match="no rank g7/0 has written"):
        Processes([before]).pid("rank g7/0")


def test_the_run_folder_is_found_by_the_lighthouse(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    assert run_folder_at(f"{MINE}:2") == tmp_path
    with pytest.raises(NotHere, match="give --run RUN"):
        run_folder_at(f"{MINE}:1")


def test_there_is_no_link_between_processes_that_do_not_speak(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    EventLog(tmp_path, "rank g0/0", group="g0").write(schema.ProcessStarted())
    struck = hit(tmp_path)
    struck.other = "g0"
    with pytest.raises((NotHere, CannotStrike), match="no TCP connection|needs root"):
        ACTS["cut-link"].strike(struck)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The log of a job whose processes are all gone."""
    log = EventLog(tmp_path, "lighthouse", job="j")
    log.write(schema.Activated(epoch=1, first_step=0, members=("g0", "g1")))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run meteor", "no fault 'meteor' (there are: kill, "),
        ("run freze", "no fault 'freze' (did you mean freeze?)"),
        ("run kill --seed -1", "--seed must be within 0.."),
        ("soak --minutes 0.1", "--minutes must be within 0.333333.."),
        ("soak --interval-s 0", "--interval-s must be within 1..3600, got 0"),
        ("repeat /nonexistent", "no journal in /nonexistent"),
        ("inject meteor --run RUN --group g1", "no fault 'meteor'"),
        (
            "inject stall-in-compute --run RUN --group g1",
            "start its group with LIGHTKEEPER_FAULT=stall:GROUP:compute:STEP",
        ),
        ("inject cut-host --run RUN --group g1", "needs a job of its own (chaos run cut-host)"),
        ("inject kill --group g1", "give --run RUN or --lighthouse HOST:PORT, one of them"),
        ("inject kill --run RUN --lighthouse h:1 --group g1", "one of them"),
        ("inject kill --lighthouse nowhere --group g1", "--lighthouse: 'nowhere' is not an address"),
        ("inject kill --run /nonexistent --group g1", "no event log in /nonexistent"),
        ("inject kill --run RUN --group g7", "g7 is no member of the run in RUN (members: g0, g1)"),
        ("inject kill --run RUN", "no group is no member"),
        ("inject kill --run RUN --group g1", "no rank g1/0 has written into this run's event log"),
        ("inject kill --run RUN --group g1 --rank -1", "--rank must be within 0.."),
        ("inject freeze-manager --run RUN --group g1", "no manager g1 has written"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    words: str, says: str, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_the_token(monkeypatch)
    assert run(["chaos", *words.replace("RUN", str(job)).split()]) in (1, 2)
    assert says.replace("in RUN", f"in {job}") in one_line(capsys)
    assert not [e for e in read_run(job).events if isinstance(e, schema.FaultInjected)], "said, and not done"


@pytest.mark.parametrize(("columns", "chars_max"), [("", 120), ("80", 80), ("9999", 120)])
def test_the_list_names_every_fault(
    columns: str, chars_max: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightkeeper.chaos.faults import FAULTS

    monkeypatch.setenv("COLUMNS", columns)
    assert run(["chaos", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(FAULTS)
    assert all(len(line) <= chars_max for line in lines)
    assert all(" ".join(fault.what.split()) in " ".join(" ".join(lines).split()) for fault in FAULTS.values())
    told = " ".join(" ".join(lines).split())
    supervised = {name for name, fault in FAULTS.items() if fault.shape.supervised}
    whats = [" ".join(FAULTS[name].what.split()) for name in supervised]
    assert whats and all(f"{what} (supervised job)" in told for what in whats)
    assert told.count("(supervised job)") == len(supervised) < len(FAULTS)
    assert run(["chaos", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(FAULTS)
    assert {row["name"] for row in rows if row["supervised"]} == supervised
