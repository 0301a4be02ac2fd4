"""Faults on request: read exactly, striking once, written down before they strike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager.faults import KINDS, Fault, InjectedError, Injector, parse_faults
from lightkeeper.manager.progress import PHASES


def test_faults_are_read_in_order() -> None:
    assert parse_faults("") == ()
    assert parse_faults("kill:g1:reduce:3,freeze-tree:g0:vote:12") == (
        Fault("kill", "g1", "reduce", 3), Fault("freeze-tree", "g0", "vote", 12),
    )  # fmt: skip
    assert parse_faults("kill:g1/2:reduce:3") == (Fault("kill", "g1", "reduce", 3, rank=2),)


@pytest.mark.parametrize("kind", KINDS)
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
]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_faults(f"kill:g0:reduce:3,{text}")
    line = str(raised.value)
    assert f"LIGHTKEEPER_FAULT={text!r}: expected KIND:GROUP[/RANK]:PHASE:STEP" in line and "\n" not in line
    assert "kill-tree" in line and "closing" in line


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
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (f"{kind}\n", code)


def test_kill_tree_ends_the_manager_too() -> None:
    manager = subprocess.Popen(["sleep", "60"])
    try:
        process = struck("kill-tree", manager.pid)
        process.communicate(timeout=30)
        assert manager.wait(timeout=10) == process.returncode == -signal.SIGKILL
    finally:
        manager.kill()
        manager.wait()


def test_freeze_stops_the_rank_until_it_is_thawed() -> None:
    process = struck("freeze")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
        assert out == "freeze\nstill here\n"
    finally:
        process.kill()
        process.wait()
