"""Faults on request: read exactly, striking once, written down before they strike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager import faults
from lightkeeper.manager.faults import (
    ANY_STEP,
    FOR_A_TIME,
    PLAIN,
    Fault,
    InjectedError,
    Injector,
    parse_faults,
)
from lightkeeper.manager.progress import PHASES


def test_faults_are_read_in_order() -> None:
    assert parse_faults("") == ()
    assert parse_faults("kill:g1:reduce:3,freeze-tree:g0:vote:12") == (
        Fault("kill", "g1", "reduce", 3), Fault("freeze-tree", "g0", "vote", 12),
    )  # fmt: skip
    assert parse_faults("kill:g1/2:reduce:3") == (Fault("kill", "g1", "reduce", 3, rank=2),)


def test_a_value_and_any_step_are_read() -> None:
    assert parse_faults("stall=1.5:g1/2:reduce:3,hold=10:g1:vote:any,slow=30:g1:compute:3,clock=-60:g0:apply:1") == (
        Fault("stall", "g1", "reduce", 3, rank=2, value=1.5), Fault("hold", "g1", "vote", ANY_STEP, value=10),
        Fault("slow", "g1", "compute", 3, value=30), Fault("clock", "g0", "apply", 1, value=-60),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [*PLAIN, *FOR_A_TIME])
@pytest.mark.parametrize("phase", PHASES)
def test_every_kind_in_every_phase(kind: str, phase: str) -> None:
    assert parse_faults(f"{kind}:g0:{phase}:0") == (Fault(kind, "g0", phase, 0),)


BAD = [
    "kill",
    "kill:g0:reduce",
    "stab:g0:reduce:3",
    "kill:g0:sleep:3",
    "kill:g0:reduce:x",
    "kill:g0:reduce:-1",
    "a:b:c:d:e",
    "kill:g0/x:reduce:3",
    "kill:/1:reduce:3",
    "kill:g0:reduce:all",
    "meteor=3:g0:reduce:3",
]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_faults(f"kill:g0:reduce:3,{text}")
    line = str(raised.value)
    assert f"LIGHTKEEPER_FAULT={text!r}: expected KIND:GROUP[/RANK]:PHASE:STEP" in line and "\n" not in line
    assert "kill-tree" in line and "stall[=SECONDS]" in line and "slow=PERCENT" in line and "closing" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill=3:g0:reduce:3", "kill takes no value"),
        ("slow:g0:compute:3", "give slow a percentage, as in slow=30"),
        ("slow=x:g0:compute:3", "give slow a percentage"),
        ("slow=30:g0:reduce:3", "the phase is compute"),
        ("stall=:g0:compute:3", "give stall a number of seconds, as in stall=30"),
        ("stall=0:g0:compute:3", "give stall a number of seconds"),
        ("hold=-1:g0:compute:3", "give hold a number of seconds"),
        ("hold=nan:g0:compute:3", "give hold a number of seconds"),
        ("clock=inf:g0:compute:3", "give clock a number of seconds"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_faults(text)
    assert str(raised.value).startswith(f"LIGHTKEEPER_FAULT={text!r}: ") and says in str(raised.value)


@pytest.mark.parametrize("text", ["kill:g0:reduce:²", "kill::reduce:3"])
def test_what_could_never_strike_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_faults(text)


def test_a_fault_strikes_once_where_it_says_and_is_written_before() -> None:
    written: list = []
    injector = Injector((Fault("raise", "g0", "reduce", 3),), "rank g0/0", 1, written.append)
    injector.reached("compute", 3)
    injector.reached("reduce", 2)
    assert not written
    with pytest.raises(InjectedError, match="injected in reduce of step 3"):
        injector.reached("reduce", 3)
    assert [(e.fault, e.phase, e.step, e.target) for e in written] == [("raise", "reduce", 3, "rank g0/0")]
    injector.reached("reduce", 3)
    assert len(written) == 1


def test_any_step_is_the_first_time_that_the_phase_is_entered() -> None:
    written: list = []
    injector = Injector(parse_faults("clock=0:g0:heal:any"), "rank g0/0", 1, written.append)
    for phase, step in (("compute", 3), ("heal", 7), ("heal", 9)):
        injector.reached(phase, step)
    assert [(e.fault, e.step) for e in written] == [("clock", 7)]


def test_a_slow_rank_takes_a_share_longer_from_its_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(faults.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(faults.time, "sleep", sleep)
    injector = Injector(parse_faults("slow=50:g0:compute:1"), "rank g0/0", 1, lambda event: None)
    took = []
    for step in range(3):
        injector.reached("compute", step)
        for microbatch in (1, 2):
            began = now[0]
            injector.reached("compute", step, microbatch)
            now[0] += 2.0
            took.append(round(now[0] - began, 6))
        injector.reached("reduce", step)
        now[0] += 10.0  # waiting is not made longer
    assert took == [2.0, 2.0, 3.0, 3.0, 3.0, 3.0], slept


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)  # put back at the end
    wall, mono = time.time(), time.monotonic()
    Injector(parse_faults("clock=-3600:g0:vote:1"), "rank g0/0", 1, lambda event: None).reached("vote", 1)
    assert wall - 3600 <= time.time() < wall - 3500 and time.monotonic() - mono < 100


SCRIPT = """
import sys
from lightkeeper.manager.faults import Injector, parse_faults
injector = Injector(parse_faults(sys.argv[1]), "rank g0/0", int(sys.argv[2]), lambda e: print(e.fault, flush=True))
injector.reached("vote", 1)
print("still here", flush=True)
"""


def struck(kind: str, manager_pid: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, f"{kind}:g0:vote:1", str(manager_pid)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_kill_and_exit_end_the_rank_there(kind: str, code: int) -> None:
    process = struck(kind)
    out, _ = process.communicate(timeout=120)
    assert (out, process.returncode) == (f"{kind}\n", code)


def test_kill_tree_ends_the_manager_too() -> None:
    manager = subprocess.Popen(["sleep", "600"])
    try:
        process = struck("kill-tree", manager.pid)
        process.communicate(timeout=120)
        assert manager.wait(timeout=60) == process.returncode == -signal.SIGKILL
    finally:
        manager.kill()
        manager.wait()


def test_freeze_stops_the_rank_until_it_is_thawed() -> None:
    process = struck("freeze")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=120)
        assert out == "freeze\nstill here\n"
    finally:
        process.kill()
        process.wait()


BESIDE = """
import sys, threading, time
from lightkeeper.manager.faults import Injector, parse_faults
began = time.monotonic()
def beside():
    time.sleep(0.5)
    waited.append(time.monotonic() - began)
def write(event):
    thread.start()
waited, thread = [], threading.Thread(target=beside)
Injector(parse_faults(sys.argv[1]), "rank g0/0", 0, write).reached("vote", 1)
struck = time.monotonic() - began
thread.join()
print(waited[0] < struck - 0.5)
"""


@pytest.mark.parametrize(("kind", "others_run"), [("stall=6", True), ("hold=2", False)])
def test_while_it_stalls_other_threads_run_and_while_it_holds_the_lock_none_does(kind: str, others_run: bool) -> None:
    """A thread that sleeps for half a second runs in the middle of it or not before its end."""
    command = [sys.executable, "-c", BESIDE, f"{kind}:g0:vote:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(others_run)


def test_a_manager_is_killed_alone() -> None:
    manager = subprocess.Popen(["sleep", "600"])
    try:
        process = struck("manager-kill", manager.pid)
        out, _ = process.communicate(timeout=120)
        assert manager.wait(timeout=60) == -signal.SIGKILL
        assert process.returncode == 0 and "still here" in out
    finally:
        manager.kill()
        manager.wait()
