"""The demo's view and report, from events written by hand; and its processes, with stand-ins."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from lightkeeper.demo import job as job_module
from lightkeeper.demo import runner
from lightkeeper.demo.job import LocalJob
from lightkeeper.demo.options import DemoOptions
from lightkeeper.demo.report import Line, Outcome, Report, build, plain_lines, table
from lightkeeper.demo.view import RunState, View, render
from lightkeeper.errors import RunFolderError, ToldError
from lightkeeper.events import EventLog, schema
from lightkeeper.events.schema import Activated, Committed, Event, FaultInjected, GroupLost, Recovered

STEPS, FAULT_STEP, BACK_STEP = 12, 4, 8
BEFORE = {"g0": (0, 3), "g1": (1, 4), "g2": (2, 5)}
AFTER = {"g0": (0, 3, 1), "g2": (2, 5, 4)}
BACK = {"g0": (0, 3, 1), "g1": (), "g2": (2, 5, 4)}
OPTIONS = DemoOptions(groups=3, steps=STEPS, microbatches=6)


def commits(
    step: int, shares: dict[str, tuple[int, ...]], epoch: int, start: int = 1, live: bool = True
) -> list[Event]:
    return [
        Committed(
            step=step,
            epoch=epoch,
            group=group,
            incarnation=f"{group}-{start if group == 'g1' else 1}",
            live=live,
            process=f"rank {group}/0",
            host="h",
            mono_ns=(step + 1) * 10**9,
            total=6,
            microbatches=share,
            computed=len(share),
            counted=6,
            seconds=1.0,
            wait_s=0.1,
            loss=4.0 - step / 10,
            tokens=512.0,
            fingerprint=f"f{step}",
        )
        for group, share in shares.items()
    ]


def reference_run() -> list[Event]:
    members = ("g0", "g1", "g2")
    events: list[Event] = [schema.Joined(group=group) for group in members]
    events.append(Activated(epoch=1, first_step=0, members=members, shares=BEFORE))
    for step in range(STEPS):
        events += commits(step, BEFORE, 1)
    return events


def faulty_run() -> list[Event]:
    events = [
        event for event in reference_run() if not isinstance(event, Committed) or event.step < FAULT_STEP
    ]
    at = FAULT_STEP * 10**9
    hit = {"group": "g1", "incarnation": "g1-1", "host": "h"}
    events += [
        FaultInjected(
            fault="kill", phase="reduce", step=FAULT_STEP, target="rank g1/0", mono_ns=at + 10**8, **hit
        ),
        GroupLost(cause="signal 9", detected_by="stream", mono_ns=at + 2 * 10**8, **hit),
        Activated(epoch=2, first_step=FAULT_STEP, members=("g0", "g2"), shares=AFTER, cause="g1 lost"),
    ]
    events += [Recovered(step=FAULT_STEP, epoch=2, group=group, further=AFTER[group][2:]) for group in AFTER]
    for step in range(FAULT_STEP, STEPS):
        events += commits(step, AFTER, 2)
    return events


def healed_run() -> list[Event]:
    """g1 is started again at 5.2 s and is a member from step 8 on."""
    events = [e for e in faulty_run() if not isinstance(e, Committed) or e.step < BACK_STEP]
    second = {"group": "g1", "incarnation": "g1-2", "host": "h"}
    at = 10**9
    events += [
        schema.ProcessStarted(command="launch", child=7, group="g1", host="h", mono_ns=int(5.2 * at)),
        schema.Joined(mono_ns=6 * at, **second),
        schema.Healing(step=7, mono_ns=6 * at, **second),
        *(schema.Copied(step=7, pause_s=0.002, group=g, host="h", mono_ns=7 * at) for g in AFTER),
        schema.Healed(step=7, bytes=1 << 20, seconds=0.25, mono_ns=7 * at, **second),
        *commits(7, {"g1": ()}, 2, start=2, live=False),
        schema.Rejoined(step=BACK_STEP, mono_ns=8 * at, **second),
        Activated(epoch=3, first_step=BACK_STEP, members=("g0", "g2", "g1"), shares=BACK),
    ]
    for step in range(BACK_STEP, STEPS):
        events += commits(step, BACK, 3, start=2)
    return events


def outcome(events: list[Event], victim: str = "g1", **over: object) -> Outcome:
    values: dict[str, object] = {
        "events": events,
        "exit_codes": {"lighthouse": 0, "g0": 0, "g1": 0, "g2": 0},
        "earlier_codes": {"g1": 137} if victim else {},
        "leftovers": (),
        "folder": Path("/run"),
    }
    return Outcome(**{**values, "victim": victim, **over})  # type: ignore[arg-type]


def failed(report: Report) -> set[str]:
    return {line.name for line in report.lines if line.holds is False}


# --- report


def test_good_run_passes() -> None:
    report = build(OPTIONS, outcome(healed_run()), outcome(reference_run(), victim=""))
    assert failed(report) == set()
    assert report.ok
    said = {line.name: line.text for line in report.lines}
    assert said["fault"] == "SIGKILL of rank g1/0 inside reduce of step 4"
    assert said["detected after"] == "0.100 s"
    assert said["rejoined after"] == "2.8 s from its new start, as a member from step 8 on"
    assert said["state fetched"] == "1.00 MiB in 0.250 s, 4 MiB/s"
    assert said["snapshot pause"] == "2.0 ms of a member's training thread, at most"
    assert said["fingerprints equal"] == "yes: g0, g1, g2 (3 of 3)"
    assert said["exit codes"] == "0 of g0, g1, g2, lighthouse; 137 of g1 when it was broken"
    assert said["event log"] == "/run/events"
    figures = report.as_dict()
    assert figures["ok"] is True
    assert figures["failed"] == {}
    assert figures["detected_after_s"] == pytest.approx(0.1)
    assert figures["survivors_stood_s"] == 0.0
    assert figures["rejoined_after_s"] == pytest.approx(2.8)
    assert (figures["heal_bytes"], figures["heal_bytes_per_s"]) == (1 << 20, 4 << 20)
    assert (figures["entries_replayed"], figures["snapshot_pause_s"], figures["rejoin_stood_s"]) == (1, 0.002, 0.0)
    assert (figures["steps_lost"], figures["microbatches_recomputed"]) == (0, 0)
    assert (figures["samples_exactly_once"], figures["fingerprints_equal"]) == (True, True)
    assert figures["loss_difference"] == 0.0
    json.loads(msgspec.json.encode(figures))


def swap(events: list[Event], group: str, step: int, **over: object) -> list[Event]:
    return [
        msgspec.structs.replace(event, **over)
        if isinstance(event, Committed) and (event.group, event.step) == (group, step)
        else event
        for event in events
    ]


LAST = STEPS - 1
START_AGAIN = schema.ProcessStarted(command="launch", child=7, group="g1", host="h", mono_ns=int(9.5e9))


@pytest.mark.parametrize(
    ("events", "over", "fails"),
    [
        ([e for e in healed_run() if not isinstance(e, FaultInjected)], {}, "fault"),
        ([e for e in healed_run() if not isinstance(e, GroupLost)], {}, "detected after"),
        ([e for e in healed_run() if not isinstance(e, Recovered)], {}, "recovery ran"),
        ([*healed_run(), GroupLost(group="g0", cause="x", detected_by="lease")], {}, "blamed"),
        ([e for e in healed_run() if getattr(e, "step", 0) != LAST], {}, "steps lost"),
        ([*healed_run(), *commits(2, {"g0": (0, 3)}, 1)], {}, "steps lost"),
        (swap(healed_run(), "g0", 5, computed=4), {}, "microbatches recomputed"),
        (swap(healed_run(), "g0", 5, microbatches=(0,)), {}, "samples consumed exactly once"),
        (swap(healed_run(), "g0", LAST, fingerprint="x"), {}, "fingerprints equal"),
        (swap(swap(healed_run(), "g0", LAST, loss=9.0), "g2", LAST, loss=9.0), {}, "final loss"),
        (healed_run(), {"exit_codes": {"lighthouse": 0, "g0": 1, "g1": 0, "g2": 0}}, "exit codes"),
        (healed_run(), {"exit_codes": {"lighthouse": None, "g0": 0, "g1": 0, "g2": 0}}, "exit codes"),
        (healed_run(), {"exit_codes": {"lighthouse": 0, "g0": 0, "g1": 1, "g2": 0}}, "exit codes"),
        ([e for e in healed_run() if not isinstance(e, schema.Copied)], {}, "snapshot pause"),
        ([e for e in healed_run() if not isinstance(e, schema.Healed)], {}, "state fetched"),
        ([e for e in healed_run() if e.group != "g1" or getattr(e, "step", 0) != LAST], {}, "fingerprints equal"),
        (healed_run(), {"leftovers": ("71 python",)}, "processes left over"),
        (healed_run(), {"trouble": "nothing happened for 60 s"}, "the run"),
        ([], {}, "samples consumed exactly once"),
    ],
    ids=range(19),
)
def test_every_check_can_fail(events: list[Event], over: dict[str, object], fails: str) -> None:
    report = build(OPTIONS, outcome(events, **over), outcome(reference_run(), victim=""))  # type: ignore[arg-type]
    assert fails in failed(report)
    assert not report.ok
    assert fails in report.as_dict()["failed"]


def test_too_few_steps_to_come_back_are_told_and_are_no_failure() -> None:
    """Whatever became of the second start, it had no time."""
    codes = {"lighthouse": 0, "g0": 0, "g1": None, "g2": 0}
    for events in (faulty_run(), [*faulty_run(), START_AGAIN]):
        report = build(OPTIONS, outcome(events, exit_codes=codes), outcome(reference_run(), victim=""))
        assert report.ok
        said = {line.name: line.text for line in report.lines}
        assert said["fingerprints equal"] == "yes: g0, g2 (2 of 3)"
    assert said["rejoined after"] == (
        "not shown: --steps 12 is too few; the run ended 2.5 s after the new start of g1"
    )
    assert report.as_dict()["rejoined_after_s"] is None


def test_a_group_that_had_time_and_did_not_come_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkeeper.demo.report.REJOIN_S_MAX", 2.0)
    report = build(OPTIONS, outcome([*faulty_run(), START_AGAIN]), outcome(reference_run(), victim=""))
    assert failed(report) == {"rejoined after"}


def test_missing_reference_loss_fails() -> None:
    report = build(OPTIONS, outcome(healed_run()), outcome([], victim="", trouble="g0 ended with 1"))
    assert failed(report) == {"final loss without the fault"}


def test_without_fault_nothing_is_asked_about_one() -> None:
    options = DemoOptions(groups=3, steps=STEPS, microbatches=6, fault="none")
    report = build(options, outcome(reference_run(), victim=""), None)
    assert report.ok
    assert "survivors stood for" not in {line.name for line in report.lines}
    lost = [*reference_run(), GroupLost(group="g2", cause="silent", detected_by="lease")]
    assert failed(build(options, outcome(lost, victim=""), None)) == {"fault"}


def test_wrong_phase_is_not_the_fault_asked_for() -> None:
    events = [
        msgspec.structs.replace(event, phase="vote") if isinstance(event, FaultInjected) else event
        for event in healed_run()
    ]
    assert failed(build(OPTIONS, outcome(events), outcome(reference_run(), victim=""))) == {"fault"}


def test_table_and_lines_say_the_same() -> None:
    report = Report([Line("a", "b", True), Line("c", "d", False), Line("e", "f", None)])
    assert plain_lines(report)[1].split() == ["FAILED", "c", "d"]
    drawn = io.StringIO()
    Console(file=drawn, width=80).print(table(report))
    assert "FAILED" in drawn.getvalue()


# --- view


def test_state_follows_the_events() -> None:
    state = RunState(steps=STEPS)
    notes = [note for event in faulty_run() if (note := state.update(event))]
    assert state.step == LAST
    assert state.loss == pytest.approx(2.9)
    assert state.tokens_per_s == pytest.approx(512)
    assert state.epoch == 2
    assert state.groups["g0"].state == "training"
    assert state.groups["g1"].state == "lost (signal 9)"
    assert "fault: kill of rank g1/0, phase reduce, step 4" in notes
    assert "g1 is lost: signal 9, seen by stream" in notes
    assert "epoch 2 from step 4 on: g0, g2 (g1 lost)" in notes
    assert state.line().startswith("step 12/12  loss 2.9000  512 tokens/s  epoch 2  g0:training")
    state.update(schema.Finished(step=12, group="g0"))
    assert state.groups["g0"].state == "finished"


def test_state_shows_the_way_back() -> None:
    state, seen = RunState(steps=STEPS), list[str]()
    notes = []
    for event in healed_run():
        notes.append(state.update(event))
        if state.groups.get("g1") and state.groups["g1"].state not in seen[-1:]:
            seen.append(state.groups["g1"].state)
    at = seen.index("lost (signal 9)")
    assert seen[at + 1 :] == ["starting", "joined", "healing", "replaying", "rejoined", "training"]
    assert "g1 is started again" in notes
    assert "g1 has the state before step 7: 1.0 MiB in 0.25 s" in notes
    assert "g1 is a member again, from step 8 on" in notes
    late = GroupLost(group="g1", incarnation="g1-1", cause="silent", detected_by="lease")
    state.update(late)
    assert state.groups["g1"].state == "training", "what is told of the first start no longer counts"


def test_state_says_what_is_waited_for_until_it_goes_on() -> None:
    state = RunState(steps=STEPS)
    assert state.update(schema.Waiting(whom="g2", since_s=3.25, why="to join")) == (
        "waiting for g2 since 3.2 s (to join)"
    )
    assert "waiting for g2" in state.line()
    state.update(commits(0, BEFORE, 1)[0])
    assert "waiting" not in state.line()


@pytest.mark.parametrize("kind", schema.KINDS, ids=lambda kind: kind.__name__)
def test_state_takes_every_kind(kind: type[Event]) -> None:
    values = {"str": "x", "int": 1, "float": 1.0, "bool": True}
    needed = {f.name: values[f.type.__name__] for f in msgspec.structs.fields(kind) if f.required}
    state = RunState(steps=STEPS)
    state.update(kind(group="g0", **needed))
    state.line()


def test_table_is_drawn() -> None:
    state = RunState(steps=STEPS)
    for event in faulty_run():
        state.update(event)
    drawn = io.StringIO()
    Console(file=drawn, width=100).print(render(state, "title"))
    text = drawn.getvalue()
    assert "step 12/12" in text
    assert "lost (signal 9)" in text


def test_plain_view_has_no_control_characters() -> None:
    stream = io.StringIO()
    with View("three groups", STEPS, stream) as view:
        for event in faulty_run():
            view.update(event)
            view.draw()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "three groups"
    assert "fault: kill of rank g1/0, phase reduce, step 4" in lines
    assert lines[-1].startswith("step 12/12")
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) < STEPS, "progress is told now and then, not at every step"


def test_live_view_draws_in_a_terminal() -> None:
    stream = io.StringIO()
    with View("three groups", STEPS, stream, live=True) as view:
        view.update(faulty_run()[0])
        view.draw()
    assert "three groups" in stream.getvalue()


# --- runner and job


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
    monkeypatch.setattr(job_module, "ASKED_S_MAX", 0.5)
    monkeypatch.setattr(runner, "GONE_S_MAX", 0.1)


def wait_for(condition: object, seconds: float = 20.0) -> None:
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
    monkeypatch.setattr(runner, "SILENCE_S_MAX", 0.5)
    options = DemoOptions(groups=2, steps=STEPS, microbatches=6)
    out = runner.train(options, tmp_path / "run", "", "without fault", io.StringIO())
    assert "nothing went on for 0.5 s at step 0: nobody said for whom it waits" in out.trouble


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


RETURNS = """
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
if "LIGHTKEEPER_FAULT" in os.environ:
    log.write(schema.FaultInjected(fault="kill", phase="reduce", step=3, target=name))
    sys.exit(9)
log.write(schema.Left(reason="done"))
done = os.path.join(folder, "second")
if name == "g1":
    open(done, "w").close()
    time.sleep(60 if os.environ.get("CODE") == "-15" else 0)
    sys.exit(int(os.environ.get("CODE", "0")))
while not os.path.exists(done) or os.environ.get("CODE") == "5":
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("fake_commands")
@pytest.mark.parametrize("code", ["0", "5", "-15"])
def test_the_broken_group_is_started_again_without_its_fault(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake" / "lightkeeper" / "__main__.py").write_text(RETURNS)
    monkeypatch.setenv("REAL", str(Path(__file__).parents[2]))
    """With code 5 it fails while the others go on; with -15 it is too late, waits, and is asked to end."""
    monkeypatch.setattr(runner, "FAILED_S_MAX", 0.1)
    monkeypatch.setattr(runner, "LATE_S_MAX", 0.3)
    if code != "0":
        monkeypatch.setenv("CODE", code)
    out = runner.train(OPTIONS, tmp_path / "run", "g1", "with fault", io.StringIO())
    (started,) = [event for event in out.events if isinstance(event, schema.ProcessStarted)]
    assert started.group == "g1"
    assert out.exit_codes["g1"] == int(code)
    assert out.earlier_codes == {"g1": 9}
    assert out.leftovers == []
    assert out.trouble.startswith("g1 ended with 5") if code == "5" else out.trouble == ""


def test_waiting_is_told_now_and_then_and_does_not_count_as_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RunState()
    told = [state.update(schema.Waiting(whom="g2", since_s=float(second))) for second in range(25)]
    assert [line for line in told if line] == [f"waiting for g2 since {second}.0 s" for second in (0, 10, 20)]
    assert state.update(schema.Waiting(whom="g1", since_s=1.0)) == "waiting for g1 since 1.0 s"

    monkeypatch.setattr(runner, "SILENCE_S_MAX", 0.3)
    log = EventLog(tmp_path, "lighthouse")

    class Waits(LocalJob):
        def running(self) -> list[str]:
            log.write(schema.Waiting(whom="g2", since_s=1.0))
            return ["g0"]

    with View("", STEPS, io.StringIO()) as view:
        trouble = runner.watch(Waits(tmp_path, ("g0",)), view, "")
    assert trouble == "nothing went on for 0.3 s at step 0: g2 since 1.0 s"
