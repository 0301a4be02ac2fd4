"""A watch of a job whose lighthouse, managers and ranks all stand: no process says so of itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import TOKEN, Job

from lightkeeper.events import schema

STEPS = 60


def everybody(job: Job) -> list[psutil.Process]:
    """All processes of the job that live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RUN_OF_TEST") == str(job.folder) or process.pid in job.started:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def told(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_job_that_stands_as_a_whole_is_told_and_told_again(job: Job, tmp_path: Path) -> None:
    job.settings["groups"] = 2
    job.start_all(2, steps=STEPS, delay=0.1)
    job.wait_for(schema.Committed, 60, step=5, group="g1")
    got, pager = tmp_path / "got", tmp_path / "pager.py"
    pager.write_text(f"import sys; open({str(got)!r}, 'a').write(sys.stdin.read() + chr(10))")
    words = [sys.executable, "-m", "lightkeeper", "watch", str(job.folder), "--stalled-after", "8", "--json"]
    words += ["--interval-s", "0.3", "--command", f"{sys.executable} {pager}", "--lighthouse", job.lighthouse]
    environment = {**os.environ, "LIGHTKEEPER_TOKEN": TOKEN}
    watch = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    stopped = everybody(job)
    assert len(stopped) >= 5, "a lighthouse, two managers, two ranks"
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    assert watch.stdout is not None
    first = json.loads(watch.stdout.readline())
    assert all(process.status() == psutil.STATUS_STOPPED for process in stopped), "the fault lasted until it was told"
    assert first["what"] == "stalled" and "; the last one is " in first["summary"]
    assert "no lighthouse answers" in first["summary"], "it stands too"
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    assert json.loads(watch.stdout.readline())["what"] == "goes_on"
    job.finish()
    out, err = watch.communicate(timeout=120)
    assert watch.returncode == 0, err
    message, end = map(json.loads, out.splitlines())
    assert (message["what"], end["state"]) == ("finished", "finished")
    assert [one["what"] for one in told(got)] == ["stalled", "goes_on", "finished"]
