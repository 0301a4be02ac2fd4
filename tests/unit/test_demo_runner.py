"""The demo's processes, with stand-ins."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from demo_runs import OPTIONS, STEPS

from lightkeeper.demo import job as job_module
from lightkeeper.demo import runner
from lightkeeper.demo.job import LocalJob
from lightkeeper.demo.options import DemoOptions
from lightkeeper.demo.view import RunState, View
from lightkeeper.errors import RunFolderError, ToldError
from lightkeeper.events import EventLog, schema


def test_run_folder_is_new_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = runner.new_folder(None)
    second = runner.new_folder(None)
    assert first != second
    assert first.parent == second.parent == tmp_path / "runs"
    assert runner.new_folder(tmp_path / "mine") == tmp_path / "mine"
    (tmp_path / "mine" / "x").write_text("")
    with pytest.raises(RunFolderError, match="is not empty"):
        runner.new_folder(tmp_path / "mine")
    with pytest.raises(RunFolderError, match="cannot make"):
        runner.new_folder(tmp_path / "mine" / "x" / "y")


def test_only_the_victim_is_told_to_break_itself() -> None:
    options = DemoOptions(steps=40, fault="freeze")
    assert runner.fault_environment(options, "g1", "g1") == {"LIGHTKEEPER_FAULT": "freeze:g1:reduce:10"}
    assert runner.fault_environment(options, "g0", "g1") == {}


FAKE = """
import os, subprocess, sys, time
words = sys.argv[1:]
if words[0] == "lighthouse":
    print("lighthouse: listening on 127.0.0.1:4711, term 1", flush=True)
    time.sleep(60)
name = words[words.index("--group") + 1]
assert os.environ["LIGHTKEEPER_TOKEN"] and "LIGHTKEEPER_STRAY" not in os.environ
print(name, words, flush=True)
if name == "g1":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(60)
sys.exit(3 if name == "g2" else 0)
"""


@pytest.fixture
def fake_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m lightkeeper` runs the stand-in above."""
    package = tmp_path / "fake" / "lightkeeper"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("LIGHTKEEPER_STRAY", "1")
    monkeypatch.chdir(tmp_path / "fake")
    monkeypatch.setattr(job_module, "ASKED_S_MAX", 4.0)  # who is asked to end and does not is killed
    monkeypatch.setattr(runner, "GONE_S_MAX", 0.1)


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("fake_commands")
def test_job_starts_watches_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with LocalJob(tmp_path / "run", ("g0", "g1", "g2"), "j", {"fingerprint-every": "1"}) as job:
        assert job.start_lighthouse() == "127.0.0.1:4711"
        for group in job.groups:
            job.start_group(group, ["train.py", "--x"])
        wait_for(lambda: job.running() == ["g1"] and "child" in job.output("g1"))
        codes = job.exit_codes()
        assert (codes["g0"], codes["g2"], codes["lighthouse"]) == (0, 3, None)
        assert "'--fingerprint-every', '1', '--', 'train.py', '--x'" in job.output("g0")
        child = int(job.last_line("g1").split()[1])
        job.running()
        os.kill(job.children["g1"].pid, signal.SIGKILL)
        wait_for(lambda: not job.running())
        assert job.leftovers() == [f"{child} {psutil.Process(child).name()}"]
        os.kill(child, signal.SIGSTOP)
        assert job.stop_lighthouse() == -signal.SIGTERM
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert job.token not in job.output("g0")


@pytest.mark.usefixtures("fake_commands")
def test_a_lighthouse_that_does_not_come_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = tmp_path / "fake" / "lightkeeper" / "__main__.py"
    main.write_text("import sys; print('no port'); sys.exit(2)")
    with LocalJob(tmp_path / "run", ("g0",)) as job, pytest.raises(ToldError, match="ended with 2: no port"):
        job.start_lighthouse()
    main.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(job_module, "START_S_MAX", 0.3)
    with LocalJob(tmp_path / "run2", ("g0",)) as job, pytest.raises(ToldError, match="did not listen"):
        job.start_lighthouse()


@pytest.mark.usefixtures("fake_commands")
def test_silence_gives_the_run_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STARTING_S_MAX", 10.0)  # by then g0 has ended
    options = DemoOptions(groups=2, steps=STEPS, microbatches=6)
    out = runner.train(options, tmp_path / "run", "", "without fault", io.StringIO())
    why = "g1 had not finished starting (it imports torch): is the machine busy?"
    assert out.trouble == f"nothing went on for 10 s at step 0: {why}"


@pytest.mark.usefixtures("fake_commands")
@pytest.mark.parametrize("victim", ["g1", "g2"])
def test_a_group_that_fails_by_itself_gives_the_run_up(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that is to be broken, as long as it has not been."""
    monkeypatch.setattr(runner, "FAILED_S_MAX", 0.1)
    out = runner.train(OPTIONS, tmp_path / "run", victim, "with fault", io.StringIO())
    assert out.trouble.startswith("g2 ended with 3: g2 ['launch', '--group', 'g2'")
    assert out.exit_codes["g2"] == 3


LATE = """
import os, sys, time
words = sys.argv[1:]
if words[0] == "lighthouse":
    print("lighthouse: listening on 127.0.0.1:4711, term 1", flush=True)
    time.sleep(60)
sys.path.insert(0, os.environ["REAL"])
for name in [name for name in sys.modules if name.startswith("lightkeeper")]:
    del sys.modules[name]
from lightkeeper.events import EventLog, schema
name, folder = words[words.index("--group") + 1], words[words.index("--run-folder") + 1]
log = EventLog(folder, f"rank {name}/0", group=name, incarnation=str(os.getpid()))
log.write(schema.Left(reason="done"))
time.sleep(60 if name == "g1" else 0)
"""


@pytest.mark.usefixtures("fake_commands")
def test_a_broken_group_that_is_back_too_late_is_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is over; its launcher would wait for the others."""
    (tmp_path / "fake" / "lightkeeper" / "__main__.py").write_text(LATE)
    monkeypatch.setenv("REAL", str(Path(__file__).parents[2]))
    monkeypatch.setattr(runner, "LATE_S_MAX", 0.3)
    out = runner.train(OPTIONS, tmp_path / "run", "g1", "with fault", io.StringIO())
    assert out.exit_codes["g1"] == -signal.SIGTERM
    assert out.leftovers == [] and out.trouble == ""


def test_waiting_is_told_now_and_then_and_does_not_count_as_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RunState()
    told = [state.update(schema.Waiting(whom="g2", since_s=float(second))) for second in range(25)]
    assert [line for line in told if line] == [f"waiting for g2 since {second}.0 s" for second in (0, 10, 20)]
    assert state.update(schema.Waiting(whom="g1", since_s=1.0)) == "waiting for g1 since 1.0 s"

    monkeypatch.setattr(runner, "SILENCE_S_MAX", 0.3)
    log = EventLog(tmp_path, "lighthouse")
    log.write(schema.Joined(group="g0", incarnation="i"))

    class Waits(LocalJob):
        def running(self) -> list[str]:
            log.write(schema.Waiting(whom="g2", since_s=1.0))
            return ["g0"]

    with View("", STEPS, io.StringIO()) as view:
        trouble = runner.watch(Waits(tmp_path, ("g0",)), view, "")
    assert trouble == "nothing went on for 0.3 s at step 0: g2 since 1.0 s"
