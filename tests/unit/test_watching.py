"""When a person is told of a run that is watched: by a fake clock, over all kinds of logs, of processes that stand."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightkeeper.cli import status
from lightkeeper.cli.app import run
from lightkeeper.cli.calls import Said
from lightkeeper.cli.watch import _asking
from lightkeeper.events import EventLog
from lightkeeper.events.of_supervisor import RunEnded, RunFailed
from lightkeeper.events.schema import (
    Committed,
    Finished,
    JobStopped,
    ProcessStarted,
)
from lightkeeper.protos import lighthouse_pb2
from lightkeeper.supervisor.notify.message import Message
from lightkeeper.supervisor.watch import service
from lightkeeper.supervisor.watch.digest import STARTING_S, STEPS_KEPT, Facts, patience_s
from lightkeeper.supervisor.watch.machine import AGAIN_S_MAX, SETBACKS_MAX, Alert, Watch, at_once, going_words
from lightkeeper.supervisor.watch.reading import FIRST_BYTES_MAX, RunReader
from lightkeeper.supervisor.watch.service import look_once, watch

# --- the machine, by a fake clock


class World:
    """A run and a clock: every look is 10 s after the one before."""

    def __init__(self, stalled_after_s: float | None = 100.0) -> None:
        self.now = 1000.0
        self.watch = Watch(stalled_after_s, 10.0, self.now)
        self.facts = Facts(best=5, latest=5, wall=1.0)

    def look(self, times: int = 1, by: float = 10.0, **changed: object) -> list[Alert]:
        self.facts = replace(self.facts, **changed)  # type: ignore[arg-type]
        told = []
        for _ in range(times):
            told += self.watch.look(self.facts, self.now)
            self.now += by
        return told

    def step(self, step: int) -> list[Alert]:
        return self.look(best=max(self.facts.best, step), latest=step)


def kinds(alerts: list[Alert]) -> list[str]:
    return [alert.what for alert in alerts]


def test_a_run_that_stands_is_told_once_and_again_when_it_goes_on() -> None:
    world = World()
    assert world.look(10) == [] and world.step(6) == [] and world.look(9) == []
    (alert,) = world.look(50, waiting="waits for g1", phases={"g1": "compute of step 7", "g0": "reduce of step 7"})
    assert alert == Alert(
        "stalled",
        "no step was committed for 100 s; the last one is 6; waits for g1; g0: reduce of step 7; g1: compute of step 7",
    )
    assert not world.watch.well
    (alert,) = world.step(7)
    assert alert.what == "goes_on" and "the last one is 7" in alert.summary
    assert kinds(world.look(50)) == ["stalled"], "the next time it is told again"


def test_the_pace_of_the_run_says_for_how_long() -> None:
    world = World(None)
    assert world.look(20, patience_s=300.0) == []
    assert kinds(world.look(11)) == ["stalled"]
    assert patience_s(()) == STARTING_S and patience_s((0.1,) * 9) == 60.0
    assert patience_s((10.0,) * 9) == 200.0 and patience_s((10.0,) * 9 + (900.0,)) == 2700.0


def test_a_run_that_never_begins_is_told() -> None:
    world = World()
    world.facts = Facts(problem="no event log in /runs/x")
    (alert,) = world.look(11)
    assert alert.summary == (
        "no step was committed for 100 s; none is known; its folder cannot be read: no event log in /runs/x"
    )


def test_a_folder_that_vanishes_and_comes_back() -> None:
    world = World()
    world.look()
    assert kinds(world.look(11, problem="stale file handle")) == ["stalled"]
    assert kinds(world.look(1, problem="", best=9, latest=9)) == ["goes_on"]


def test_a_clock_that_jumps_and_a_watch_that_slept_tell_nothing() -> None:
    world = World()
    world.look(3)
    world.now += 86400.0  # we were stopped for a day
    assert world.look(3) == []
    world.now -= 86400.0  # no monotonic clock does this
    assert world.look(3) == []
    assert kinds(world.look(20_000, by=10.0)) == ["stalled"], "and it goes on watching"


def test_a_run_that_ends() -> None:
    world = World()
    world.look()
    (alert,) = world.look(3, end="finished after 7 steps")
    assert alert == Alert("finished", "finished after 7 steps")
    assert world.watch.over(world.now) and world.watch.well
    assert world.look(100) == [], "what has ended commits nothing"


def test_a_run_that_failed_may_be_begun_again() -> None:
    world = World()
    world.look()
    assert kinds(world.look(2, end="quorum lost", well=False)) == ["failed"]
    assert not world.watch.over(world.now)
    assert world.look(1, end="", best=6, latest=6) == []
    assert kinds(world.look(2, end="quorum lost", well=False)) == ["failed"]
    assert world.watch.over(world.now + AGAIN_S_MAX) and not world.watch.well


def test_one_that_had_ended_before_is_not_told() -> None:
    world = World()
    assert world.look(2, end="finished after 7 steps") == [] and world.watch.over(world.now)


def test_one_that_had_failed_before_is_told() -> None:
    assert World().look(2, end="quorum lost", well=False) == [Alert("failed", "quorum lost")]


def test_one_that_is_begun_again_has_its_time() -> None:
    world = World()
    world.look(100, end="finished after 7 steps")
    assert world.look(10, end="") == [] and not world.watch.over(world.now)
    assert kinds(world.look(1)) == ["stalled"]


def test_late_lines_of_a_run_that_ended_tell_nothing_twice() -> None:
    world = World()
    world.look()
    assert kinds(world.look(1, end="finished after 7 steps")) == ["finished"]
    assert world.look(2, best=6, latest=6) == []


def test_going_back_to_a_checkpoint_is_progress_but_a_crash_loop_is_none() -> None:
    world = World()
    world.step(50)
    told = []
    for _ in range(SETBACKS_MAX + 20):
        for step in (40, 41, 42, 43):
            told += world.step(step)
    assert kinds(told) == ["stalled"], "it never comes further than step 50"
    assert kinds(world.step(51)) == ["goes_on"]


def test_the_lighthouses_step_is_progress_too() -> None:
    world = World()
    world.look(problem="stale file handle")
    for step in range(30):
        assert world.look(lighthouse_step=step) == []
    assert "the last one is 29" in world.look(11)[0].summary


def test_one_look_alone() -> None:
    facts = Facts(best=5, latest=5, wall=1000.0, patience_s=60.0)
    assert at_once(facts, 1059.0, None) is None
    found = at_once(facts, 1061.0, None)
    assert found is not None and found.summary.startswith("no step was committed for 61 s; the last one is 5")
    assert at_once(facts, 1061.0, 100.0) is None
    assert at_once(facts, 10.0, 100.0) is None, "its clock is ahead of ours"
    assert at_once(replace(facts, end="x", well=False), 1001.0, None) == Alert("failed", "x")
    assert at_once(replace(facts, end="x"), 9999.0, None) == Alert("finished", "x")


def test_how_far_a_run_is() -> None:
    assert going_words(Facts(best=9, latest=5, wall=1000.0), 1003.0) == "the last step is 5, 3 s ago"
    assert going_words(Facts(best=5, latest=5, wall=1000.0, again_wall=1060.0), 1063.0) == (
        "the last step is 5, 63 s ago; it was started again 3 s ago"
    )
    assert going_words(Facts(begun_wall=1000.0), 1007.0) == "no step was committed yet; it was started 7 s ago"
    assert going_words(Facts(lighthouse_step=7), 1e9) == "no step was committed yet; the lighthouse says step 7"


def test_a_run_without_a_step_is_as_old_as_its_first_line() -> None:
    facts = Facts(begun_wall=1000.0, patience_s=60.0)
    assert at_once(facts, 1059.0, None) is None
    assert at_once(replace(facts, again_wall=5000.0, latest=3, wall=1000.0), 5059.0, None) is None
    found = at_once(Facts(), 1.8e9, None)
    assert found == Alert("stalled", "no step was committed yet, and nothing says since when it runs")


# --- reading


def commits(log: EventLog, steps: range) -> None:
    for step in steps:
        log.write(Committed(step=step, epoch=1, seconds=1.0))


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    reader = RunReader(tmp_path / "run")
    assert "no event log" in reader.look()
    log = EventLog(tmp_path / "run", "rank g0/0", job="j")
    assert reader.look() == f"{tmp_path / 'run'}: no event log" or reader.look() == ""
    commits(log, range(3))
    assert reader.look() == "" and reader.digest.facts().best == 2 and reader.digest.jobs == {"j"}
    with log.path.open("ab") as file:
        file.write(b'{"kind":"committed","step":')
    assert reader.look() == "" and reader.digest.facts().best == 2
    with log.path.open("ab") as file:
        file.write(b'9,"epoch":1}\n{"kind":"committed","st\n')
    assert reader.look() == "" and reader.digest.facts().best == 9, "the torn line is passed over"
    shutil.rmtree(tmp_path / "run")
    assert "no event log" in reader.look() and reader.digest.facts().best == 9
    again = EventLog(tmp_path / "run", "rank g0/0", job="j")
    commits(again, range(10, 12))
    assert reader.look() == "" and reader.digest.facts().best == 11, "a new file of the old name"


def test_of_a_large_log_the_end_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/0")
    log.write(Committed(step=10**6, epoch=1))  # beyond the end that is read
    while log.path.stat().st_size < FIRST_BYTES_MAX + 100_000:
        log.path.open("ab").write(b'{"kind":"overlap","note":"' + b"x" * 50_000 + b'"}\n')
    commits(log, range(STEPS_KEPT))
    reader = RunReader(tmp_path)
    assert reader.look() == "" and reader.digest.facts().best == STEPS_KEPT - 1


def test_a_file_that_cannot_be_read_is_a_fact(tmp_path: Path) -> None:
    commits(EventLog(tmp_path, "rank g0/0"), range(2))
    (tmp_path / "events" / "a.jsonl").mkdir()
    reader = RunReader(tmp_path)
    assert "a.jsonl: Is a directory" in reader.look()
    assert reader.digest.facts().best == 1, "the others are read"


def test_a_storage_that_hangs_holds_up_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, real = threading.Event(), RunReader.look

    def look(self: RunReader) -> str:
        if self.run.name == "bad":
            held.wait(60)
        return real(self)

    monkeypatch.setattr(RunReader, "look", look)
    monkeypatch.setattr(service, "LOOK_S_MAX", 3.0)
    commits(EventLog(tmp_path / "good", "rank g0/0"), range(3))
    found = {run.name: (facts, alert) for run, facts, alert in look_once([tmp_path / "bad", tmp_path / "good"], None)}
    assert found["good"][1] is None and found["good"][0].best == 2
    alert = found["bad"][1]
    assert alert is not None and "it does not answer for" in alert.summary
    held.set()


def test_a_lighthouse_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_S_MAX", 3.0)
    commits(EventLog(tmp_path, "rank g0/0", job="j"), range(3))
    held, asked = threading.Event(), list[str]()

    def ask(job: str) -> tuple[int, str]:
        asked.append(job)
        held.wait(60)
        return 9, "the lighthouse waits for g1"

    ((_, facts, alert),) = look_once([tmp_path], None, ask)
    assert (facts.best, facts.problem, alert, asked) == (2, "", None, ["j"])
    held.set()
    ((_, facts, _),) = look_once([tmp_path], None, ask)
    assert (facts.lighthouse_step, facts.lighthouse) == (9, "the lighthouse waits for g1")


# --- processes

WRITES = """
import os, sys, time
from lightkeeper.events import EventLog
from lightkeeper.events.schema import Committed, Finished, Waiting
log, end, i = EventLog(sys.argv[1], "rank g0/0", job="j"), sys.argv[2], 0
while not os.path.exists(end) and i < 2400:
    log.write(Committed(step=i, epoch=1, seconds=0.05))
    print(i, flush=True)
    i += 1
    time.sleep(0.05)
log.write(Finished(step=i))
"""


def writing(run: Path, end: Path) -> subprocess.Popen[str]:
    """A process that commits steps until that file is there, and then finishes."""
    words = [sys.executable, "-c", WRITES, str(run), str(end)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "0\n"
    return process


def test_processes_that_stand_are_told_and_those_of_another_run_are_not(tmp_path: Path) -> None:
    end = tmp_path / "end"
    standing, going = writing(tmp_path / "stands", end), writing(tmp_path / "goes", end)
    told: list[Message] = []
    arrived = threading.Condition()

    def tell(message: Message) -> None:
        with arrived:
            told.append(message)
            arrived.notify_all()

    ended: list[list[str]] = []
    runs = [tmp_path / "stands", tmp_path / "goes"]

    def watching() -> None:
        ended.append([alert.what for _, _, alert in watch(runs, 10.0, tell, interval_s=0.1) if alert is not None])

    watcher = threading.Thread(target=watching, daemon=True)
    standing.send_signal(signal.SIGSTOP)
    watcher.start()
    with arrived:
        assert arrived.wait_for(lambda: told, 120)
        assert (told[0].what, told[0].job) == ("stalled", "stands")
    standing.send_signal(signal.SIGCONT)
    with arrived:
        assert arrived.wait_for(lambda: len(told) > 1, 120)
    end.touch()
    for process in (standing, going):
        process.communicate(timeout=120)
    watcher.join(120)
    assert ended == [["finished", "finished"]]
    of = {job: [one.what for one in told if one.job == job] for job in ("stands", "goes")}
    assert of == {"stands": ["stalled", "goes_on", "finished"], "goes": ["finished"]}


def test_the_command_for_cron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / "a", "rank g0/0")
    commits(log, range(3))
    assert run(["watch", "--once", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'a'}: goes on: the last step is 2, ")
    log.write(JobStopped(reason="quorum lost: g1 is gone", ok=False))
    words = ["watch", "--once", "--json", str(tmp_path / "a"), str(tmp_path / "none"), "--log", str(tmp_path / "told")]
    assert run([*words, "--command", f"cp /dev/stdin {tmp_path / 'got'}"]) == 1
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["state"], first["said"]) == ("failed", "quorum lost: g1 is gone")
    assert second["state"] == "stalled" and "no event log" in second["said"]
    assert json.loads((tmp_path / "got").read_text())["job"] == "none"
    assert [json.loads(line)["kind"] for line in next((tmp_path / "told/events").iterdir()).open()] == ["notified"] * 2


def test_the_command_ends_with_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / "a", "rank g0/0")
    commits(log, range(3))
    log.write(Finished(step=3))
    assert run(["watch", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a'}: finished: finished after 3 steps\n", "nobody else is told"
    assert run(["watch", "--json", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_a_run_that_its_supervisor_ended_with_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, name = EventLog(tmp_path / "a", "supervisor", job="a"), str(tmp_path / "a")
    log.write(ProcessStarted())
    assert run(["watch", "--once", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: goes on: no step was committed yet; it was started ")
    log.write(RunFailed(failure="crash_loop", reason="g0 fails again and again"))
    log.write(RunEnded(code=1, reason="g0 fails again and again"))
    assert run(["watch", "--once", name]) == 1
    assert capsys.readouterr().out == f"{name}: failed: g0 fails again and again\n"
    monkeypatch.setattr("lightkeeper.supervisor.watch.machine.AGAIN_S_MAX", 0.0)
    assert run(["watch", name]) == 1
    alert, end = capsys.readouterr().out.splitlines()
    assert "g0 fails again and again" in alert and end == f"{name}: failed: g0 fails again and again"
    log.write(ProcessStarted())
    assert run(["watch", "--once", name]) == 0
    assert "goes on: no step was committed yet; it was started " in capsys.readouterr().out


def test_a_run_that_is_begun_again_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, real, looks = EventLog(tmp_path, "supervisor", job="a"), RunReader.look, list[str]()
    for event in (ProcessStarted(), RunEnded(code=0, reason="stopped as asked"), ProcessStarted()):
        log.write(event)

    def look(self: RunReader) -> str:
        looks.append(real(self))
        if len(looks) == 3:
            log.write(RunEnded(code=0, reason="the run is finished"))
        return looks[-1]

    monkeypatch.setattr(RunReader, "look", look)
    ((_, facts, alert),) = watch([tmp_path], 600.0, lambda message: None, interval_s=0.05)
    assert len(looks) > 3 and alert == Alert("finished", "the run is finished") and facts.well


def test_a_lighthouse_that_does_not_answer_is_said_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "secret")
    log = EventLog(tmp_path / "a", "rank g0/0")
    log.write(Committed(step=1, epoch=1))
    words = ["watch", "--once", "--stalled-after", "1", "--lighthouse", "127.0.0.1:1", str(tmp_path / "a")]
    until_s = time.monotonic() + 60
    while run(words) == 0 and time.monotonic() < until_s:
        capsys.readouterr()
    assert "no lighthouse answers" in capsys.readouterr().out


def test_what_a_lighthouse_says(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [lighthouse_pb2.GroupStatus(group=f"g{i}", step=7 + i) for i in range(2)]
    reply = lighthouse_pb2.StatusReply(job="j", groups=groups, waiting="g1: it is silent", reigns=True)
    asked: list[str] = []

    def ask(addresses: tuple[str, ...], job: str, token: str) -> list[Said]:
        asked.append(job)
        return [Said(addresses[0], reply)]

    monkeypatch.setattr(status, "ask", ask)
    assert _asking(("h:1",), "t")("j") == (8, "the lighthouse waits for g1: it is silent")
    reply.stopped = "quorum lost"
    assert _asking(("h:1",), "t")("j") == (8, "the lighthouse says: stopped: quorum lost") and asked == ["j", "j"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stalled-after", "0"], "--stalled-after must be within"),
        (["--interval-s", "1", "--once"], "--once looks once"),
        (["--job", "j"], "--job is of no use without --lighthouse"),
        (["--lighthouse", "nonsense"], "--lighthouse: "),
        (["--webhook", "nonsense"], "--webhook: url must be"),
    ],
)
def test_wrong_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["watch", *words, str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
