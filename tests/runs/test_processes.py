"""Trainer, manager and launcher end together, in time, and say who ended first and how (scenario 27)."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema

STEPS = 400  # more than are ever reached
SLOW = {"steps": STEPS, "delay": 0.01}


def test_the_manager_is_killed(job: Job) -> None:
    job.start_lighthouse("--lease-s", "10")  # so that only the broken stream can tell of it
    job.start_all(2, **SLOW)
    job.wait_for(schema.Committed, group="g1", step=3)
    manager = job.manager_pid("g1")
    os.kill(manager, signal.SIGKILL)
    job.wait("g1")
    assert job.trainers["g1"].exitcode == 107
    assert f"the group's manager (pid {manager}) was killed by SIGKILL" in job.said("g1")
    job.wait_for(schema.GroupLost, group="g1", detected_by="stream")
    os.kill(job.trainers["g0"].pid, signal.SIGKILL)
    job.finish()


def test_the_trainer_is_killed(job: Job) -> None:
    job.start_lighthouse(*PATIENT)
    job.start_all(1, **SLOW)
    job.wait_for(schema.Committed, step=3)
    manager = psutil.Process(job.manager_pid("g0"))
    os.kill(job.trainers["g0"].pid, signal.SIGKILL)
    gone, _ = psutil.wait_procs([manager], timeout=120)
    assert gone, "the manager outlives its trainer"
    assert "rank 0 was killed by SIGKILL" in job.said("g0")
    assert job.finish().codes == {"g0": -9}


def test_the_trainer_dies_before_it_joins(job: Job) -> None:
    """Waiting for its peers is no time in which anything may be left behind (scenario 6)."""
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=6)
    job.wait_for(schema.Joined, group="g0")
    os.kill(job.trainers["g0"].pid, signal.SIGKILL)
    job.until(lambda: not job.left_over(), "only the lighthouse is left")
    for group in ("g1", "g2"):
        job.start(group, steps=6)
    facts = job.finish()
    assert facts.codes == {"g0": -9, "g1": 0, "g2": 0}
    assert facts.members == [("g1", "g2")]


def test_the_socket_is_there_before_the_manager_listens(job: Job, tmp_path: Path) -> None:
    """Between `bind` and `listen` the path exists and refuses connections: not an error but a moment to wait."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import socket, time\nreal = socket.socket.listen\n"
        "def listen(self, *given):\n    time.sleep(0.3 if self.family == socket.AF_UNIX else 0)\n"
        "    return real(self, *given)\n"
        "socket.socket.listen = listen\n"
    )
    job.start_lighthouse(*PATIENT)
    job.start("g0", steps=4, env={"PYTHONPATH": str(tmp_path / "site")})
    job.finish().check(4, {"g0"})


def left_by_a_killed_group(parent: str) -> Path:
    ended = psutil.Popen(["true"])
    ended.wait()
    folder = Path(parent) / f"lightkeeper-{ended.pid}-abcd_123"
    folder.mkdir()
    (folder / "progress-0").write_bytes(b"x")
    os.utime(folder, (0, 0))
    return folder


@pytest.mark.parametrize("way", ["start", "launch"])
def test_a_manager_removes_what_killed_groups_left_and_its_own(job: Job, way: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = left_by_a_killed_group(parent)
        job.start_lighthouse(*PATIENT)
        start = job.start if way == "start" else job.launch
        start("g0", steps=4, env={"TMPDIR": parent})
        job.finish().check(4, {"g0"})
        assert not folder.exists()
        assert not [path for path in Path(parent).iterdir() if path.name.startswith("lightkeeper")]


# ---------------------------------------------------------------- lightkeeper launch


def launched(job: Job, **options: object) -> tuple[int, int]:
    """One launched group that trains: pids of launcher (the manager) and the rank, its child."""
    job.start_lighthouse(*PATIENT)
    launcher = job.launch("g0", **{**SLOW, **options})
    commit = job.wait_for(schema.Committed, step=2)
    assert psutil.Process(commit.pid).ppid() == launcher.pid
    return launcher.pid, commit.pid


def test_launch_hands_the_exit_code_on(job: Job) -> None:
    job.start_lighthouse(*PATIENT)
    job.launch("g0", steps=4)
    facts = job.finish()
    facts.check(4, {"g0"})


@pytest.mark.parametrize(("behave", "code"), [("raise:2", 1), ("exit-5:2", 5)])
def test_launch_hands_a_failure_on(job: Job, behave: str, code: int) -> None:
    job.start_lighthouse(*PATIENT)
    job.launch("g0", steps=4, behave=behave)
    facts = job.finish()
    assert facts.codes == {"g0": code}
    assert ("a bug of the user's" in facts.said["g0"]) == (code == 1)


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_one_process_of_a_launched_group_is_killed(job: Job, victim: str) -> None:
    launcher, rank = launched(job)
    os.kill({"rank": rank, "launcher": launcher}[victim], signal.SIGKILL)
    job.until(lambda: not job.left_over(), "nothing of the group is left, the rank neither")
    facts = job.finish()
    wanted = {"rank": 137, "launcher": -9}
    assert facts.codes == {"g0": wanted[victim]}
    said = facts.said["g0"]
    if victim == "rank":
        assert "rank 0 was killed by SIGKILL" in said
        assert facts.lost["g0"].detected_by == "manager"
    # the kernel ends the rank with its launcher, so it has no last words; and with nobody waiting for it, a broken
    # stream alone is no reason to call the group gone
    assert "Exception in callback" not in said
