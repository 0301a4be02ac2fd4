"""`lightkeeper run` on this machine: jobs whose nodes, groups and supervisor die, and which end well all the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from harness import HERE

from lightkeeper.errors import RunFolderError
from lightkeeper.events import schema
from lightkeeper.events.of_supervisor import BurnedIn, GroupEnded, GroupStarted, JobRestarts, RunEnded
from lightkeeper.events.reader import read_run

pytestmark = pytest.mark.long
T = TypeVar("T", bound=schema.Event)
WITHIN_S = 150.0


class Run:
    """A run under a supervisor; whatever it leaves is found by its folder's name."""

    def __init__(self, folder: Path) -> None:
        self.base, self.folder = folder, folder / "run"
        self.gate = folder / "gate"
        self.child: subprocess.Popen[bytes] | None = None

    def write(self, steps: int, delay: float = 0.1, behave: str = "", every: int = 1000, **more: str) -> None:
        """The job file, for three groups on four nodes; while `gate` is not there, what is started does not join.

        Steps are slow until `ends` is called: a start imports torch, which may take half a minute.
        """
        self.gate.touch()
        options = {
            "loop": "saving", "trace": str(self.base / "trace"), "steps": steps, "delay": delay, "microbatches": 3,
            "behave": behave, "begin": str(self.gate), "hurry": str(self.base / "hurry"),
            "checkpoints": {"folder": str(self.folder / "checkpoints"), "every": every},
        }  # fmt: skip
        command = json.dumps([str(HERE / "script.py"), json.dumps(options)])
        top = more.pop("top", "")
        tables = "".join(f"[{name}]\n{text}\n" for name, text in more.items())
        self.base.joinpath("job.toml").write_text(
            f'name = "j"\ncommand = {command}\ngroups = 3\nminimum = 2\noutage_budget_s = 20\n{top}\n'
            "[cluster]\nnodes = 4\n[preflight]\noptions = ['--only', 'memory,disk']\n"
            + tables
            + "[[notify]]\nkind = 'command'\n"
            + f"argv = ['sh', '-c', 'cat >> {self.base}/told; echo >> {self.base}/told']\n"
        )

    def start(self) -> subprocess.Popen[bytes]:
        with (self.base / "out").open("ab") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "lightkeeper", "run", str(self.base / "job.toml")],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.child

    def said(self) -> str:
        return (self.base / "out").read_text()

    def told(self) -> list[str]:
        path = self.base / "told"
        return [json.loads(line)["what"] for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind: type[T], **fields: Any) -> list[T]:
        try:
            events = read_run(self.folder).events
        except RunFolderError:
            return []
        return [e for e in events if isinstance(e, kind) and all(getattr(e, n) == v for n, v in fields.items())]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < end, f"not within {WITHIN_S:g} s: {what}\n{self.said()}"
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(e.step >= step for e in self.events(schema.Committed)), f"step {step}")

    def pid(self, group: str) -> int:
        """Of the newest rank of a group."""
        return max(self.events(schema.Committed, group=group), key=lambda e: e.wall).pid

    def left(self) -> list[str]:
        """Processes of the run that live."""
        mark, found = str(self.base), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if mark in words and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(f"{process.pid} {words[-120:]}")
        return found

    def ends(self) -> int:
        """Its exit code; nothing of it is left."""
        assert self.child is not None
        (self.base / "hurry").touch()
        code = self.child.wait(WITHIN_S)
        self.until(lambda: not self.left(), "nothing is left running")
        return code


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if made.child is not None and made.child.poll() is None:
        made.child.kill()
        made.child.wait()
    for text in made.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(text.split()[0]), signal.SIGKILL)


def test_a_lost_node_goes_to_quarantine_and_its_group_to_another(run: Run) -> None:
    run.write(steps=1500, burn_in="rounds = 1\nfor_s = 0")
    run.start()
    run.until_step(5)
    assert not run.events(GroupEnded)
    os.kill(int((run.folder / "nodes" / "n1" / "host.pid").read_text()), signal.SIGKILL)
    run.until(lambda: bool(run.events(schema.Rejoined, group="g1")), "the return of g1")
    run.until(lambda: bool(run.events(BurnedIn)), "the burn-in")
    assert run.ends() == 0, run.said()
    ended = run.events(GroupEnded, whose="node")
    assert [(e.group, e.nodes) for e in ended] == [("g1", ("n1",))]
    book = json.loads((run.base / "quarantine.json").read_text())
    assert [(node["name"], node["out"]) for node in book["nodes"]] == [("n1", False)], "its host came back, and passed"
    assert [(e.node, e.returns) for e in run.events(BurnedIn)] == [("n1", True)]
    assert {"quarantine", "finished"} <= set(run.told())
    assert {e.step for e in run.events(schema.Finished)} == {1500}


def test_the_next_supervisor_takes_up_what_runs(run: Run) -> None:
    run.write(steps=2500)
    first = run.start()
    run.until_step(5)
    first.kill()
    first.wait()
    ranks = {group: run.pid(group) for group in ("g0", "g1", "g2")}
    os.kill(ranks["g1"], signal.SIGKILL)
    run.start()
    run.until(lambda: bool(run.events(schema.Rejoined, group="g1")), "the return of g1")
    assert {group: run.pid(group) for group in ("g0", "g2")} == {group: ranks[group] for group in ("g0", "g2")}
    assert run.ends() == 0, run.said()
    assert "goes on with what runs already" in run.said()
    ended = [e for e in run.events(GroupEnded) if e.failure != "finished"]
    assert [(e.group, e.code, e.whose) for e in ended] == [("g1", 137, "maybe")], "it ended while nobody was there"


def test_a_lost_quorum_starts_the_job_again_where_it_was(run: Run) -> None:
    run.write(steps=1500)
    run.start()
    run.until_step(5)
    run.gate.unlink()
    for group in ("g1", "g2"):
        os.kill(run.pid(group), signal.SIGKILL)
    run.until(lambda: bool(run.events(JobRestarts)), "the restart")
    run.gate.touch()
    run.until(lambda: len(run.events(schema.CheckpointLoaded)) >= 3, "the load")
    assert run.ends() == 0, run.said()
    kept = max(e.step for e in run.events(schema.CheckpointSaved) if "was to keep" in e.final)
    assert {e.step for e in run.events(schema.CheckpointLoaded)} == {kept}
    assert not (run.base / "quarantine.json").exists(), "a killed rank alone blames no node"


def test_all_groups_killed_at_once_go_on_from_the_newest_checkpoint(run: Run) -> None:
    run.write(steps=1500, every=20)
    run.start()
    run.until(lambda: bool(run.events(schema.CheckpointSaved)), "a checkpoint")
    for pid in [run.pid(group) for group in ("g0", "g1", "g2")]:
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: len(run.events(schema.CheckpointLoaded)) >= 3, "the load")
    assert run.ends() == 0, run.said()
    (step,) = {e.step for e in run.events(schema.CheckpointLoaded)}
    assert step >= min(e.step for e in run.events(schema.CheckpointSaved))
    assert {e.whose for e in run.events(GroupEnded)} == {"maybe", "nobody"}, "nobody's code is to blame"
    assert {e.step for e in run.events(schema.Finished)} == {1500}


def test_the_same_exception_everywhere_stops_the_run_and_somebody_is_told(run: Run) -> None:
    run.write(steps=200, behave="raise:5")
    run.start()
    assert run.ends() == 1, run.said()
    assert {"crash_loop", "budget"} & set(run.told())
    (ended,) = run.events(RunEnded)
    assert ended.code == 1 and run.said().count("lightkeeper: gives up (") == 1


def test_an_operator_ends_it_in_good_order_and_it_goes_on_later(run: Run) -> None:
    run.write(steps=800)
    child = run.start()
    run.until_step(5)
    child.send_signal(signal.SIGTERM)
    assert run.ends() == 0, run.said()
    reached = max(e.step for e in run.events(schema.CheckpointSaved))
    run.start()
    assert run.ends() == 0, run.said()
    assert {e.step for e in run.events(schema.CheckpointLoaded)} == {reached}
    assert {e.step for e in run.events(schema.Finished)} == {800}


def test_a_drained_node_is_left_in_good_order_and_its_group_goes_to_another(run: Run) -> None:
    run.write(steps=1500)
    run.start()
    run.until_step(5)
    (run.folder / "nodes" / "n1" / "drain").write_text("new firmware")
    run.until(lambda: bool(run.events(schema.Rejoined, group="g1")), "the return of g1")
    assert run.ends() == 0, run.said()
    (ended,) = [e for e in run.events(GroupEnded) if e.failure != "finished"]
    assert (ended.group, ended.code, ended.whose, ended.failure) == ("g1", 0, "nobody", "left")
    assert [e.nodes for e in run.events(GroupStarted, group="g1")] == [("n1",), ("n3",)]
    assert not run.events(schema.GroupLost) and not run.events(schema.Recovered), "nobody is lost, no step repeated"
    assert not (run.base / "quarantine.json").exists() and set(run.told()) == {"finished"}


def test_a_run_that_gets_notice_is_put_back_and_goes_on_in_its_next_start(run: Run) -> None:
    run.write(steps=800, top="requeue = ['sh', '-c', 'echo again >> requeued']")
    child = run.start()
    run.until_step(5)
    child.send_signal(signal.SIGUSR1)
    assert run.ends() == 0, run.said()
    assert (run.base / "requeued").read_text() == "again\n"
    (stopped,) = run.events(schema.JobStopped)
    assert stopped.reason == "all groups asked to leave: SIGUSR1 from the supervisor"
    reached = max(e.step for e in run.events(schema.CheckpointSaved))
    run.start()
    assert run.ends() == 0, run.said()
    assert {e.step for e in run.events(schema.CheckpointLoaded)} == {reached}
    assert (run.base / "requeued").read_text() == "again\n", "a finished run is not put back"
    assert {e.step for e in run.events(schema.Finished)} == {800}


def test_the_lighthouse_comes_back_at_its_address_when_its_node_is_lost(run: Run) -> None:
    run.write(steps=1500)
    run.start()
    run.until_step(5)
    address = (run.folder / "lighthouse.address").read_text()
    os.kill(int((run.folder / "nodes" / "n3" / "host.pid").read_text()), signal.SIGKILL)
    run.until(lambda: len(run.events(schema.ProcessStarted, process="lighthouse")) == 2, "the next lighthouse")
    os.kill(run.pid("g1"), signal.SIGKILL)  # who is lost is decided by a lighthouse
    run.until(lambda: bool(run.events(schema.Rejoined, group="g1")), "the return of g1")
    assert run.ends() == 0, run.said()
    assert (run.folder / "lighthouse.address").read_text() == address
    assert [(e.group, e.whose) for e in run.events(GroupEnded) if e.failure != "finished"] == [("g1", "maybe")]
    assert {e.step for e in run.events(schema.Finished)} == {1500}


def test_a_launcher_may_start_its_group_again_where_it_was(run: Run) -> None:
    run.write(steps=1500, budget="in_place = 2")
    run.start()
    run.until_step(5)
    os.kill(run.pid("g1"), signal.SIGKILL)
    run.until(lambda: bool(run.events(schema.Rejoined, group="g1")), "the return of g1")
    assert run.ends() == 0, run.said()
    assert [e.nodes for e in run.events(GroupStarted, group="g1")] == [("n1",)], "no start of the supervisor's"
    assert {e.failure for e in run.events(GroupEnded)} == {"finished"}
    assert {e.step for e in run.events(schema.Finished)} == {1500}
