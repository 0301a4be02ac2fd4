"""torchtitan with torchft, run by programs in a folder of their own; what they print is read, as they print it.

The folder has `killtest.py`: it starts torchft's lighthouse and two groups, kills one with SIGKILL at a step, starts it
again, and says when (`KILL t=...`, `RESTART t=...`, seconds since the Unix epoch). Each group's log, `r0.log`, has a
line a step: `ZZ rid=0 rank=0 t=END dt=SECONDS ... mstep=BEFORE->AFTER ...`, where `mstep` counts committed steps.
"""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightkeeper.errors import ToldError, UsageError

CONFIGS = ("llama3_torchft_fixed", "llama3_ext_ft")
PROGRAM = "killtest.py"
STEPS, KILL_AT, RESTART_AFTER_S = 60, 12, 1.0
BEFORE = 10
RUN_S_MAX = 900.0
_TOLD = re.compile(r"^(KILL|RESTART) t=([\d.]+)", re.MULTILINE)
_STEP = re.compile(r"ZZ rid=\d+ rank=0 t=([\d.]+) dt=([\d.]+) .*?mstep=(-?\d+)->(-?\d+)")


@dataclass(frozen=True)
class Row:
    """One step of a group: when it ended, how long it took, committed steps before and after it."""

    at: float
    seconds: float
    before: int
    after: int


def check(folder: Path) -> None:
    """Whether the programs are there.

    Raises:
        UsageError: they are not.
    """
    if not (folder / PROGRAM).is_file():
        raise UsageError(f"--peer {folder}: it has no {PROGRAM}, which runs torchtitan with torchft")


def run(folder: Path, out: Path, config: str) -> dict[str, Any]:
    """One kill and one return with torchft.

    Args:
        folder: of the programs.
        out: where their output goes; made.
        config: which of their configs.

    Raises:
        ToldError: the run did not end well.
    """
    out.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(folder / PROGRAM), str(out), "--venv", sys.prefix, "--config", config]
    words += ["--groups", "2", "--nproc", "1", "--steps", str(STEPS), "--kill-at", str(KILL_AT)]
    words += ["--restart-after", str(RESTART_AFTER_S), "--port", str(port), "--limit", str(RUN_S_MAX)]
    try:
        done = subprocess.run(words, cwd=out, capture_output=True, text=True, timeout=RUN_S_MAX + 60, check=False)
    except subprocess.TimeoutExpired:
        raise ToldError(f"{PROGRAM} --config {config} did not end within {RUN_S_MAX + 60:g} s") from None
    if done.returncode != 0 or "LIMIT" in done.stdout:
        last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise ToldError(f"{PROGRAM} --config {config} ended with {done.returncode}: {last}")
    return figures(done.stdout, *((out / f"r{group}.log").read_text(errors="replace") for group in (0, 1)))


def figures(told: str, survivor: str, victim: str) -> dict[str, Any]:
    """What the bench names, from what the programs printed.

    Args:
        told: by `killtest.py`.
        survivor: log of the group that lives.
        victim: log of the other, both of its starts.

    Raises:
        ToldError: something that must be there is not.
    """
    at = {name: float(when) for name, when in _TOLD.findall(told)}
    if at.keys() != {"KILL", "RESTART"}:
        raise ToldError(f"{PROGRAM} did not say when it killed and started again")
    rows, back = rows_of(survivor), [row for row in rows_of(victim) if row.at > at["RESTART"]]
    before = [row for row in rows if row.at <= at["KILL"]][-BEFORE:]
    after = [row for row in rows if row.at > at["KILL"]]
    commits = [row for row in after if row.after > row.before]
    if not (before and commits and back):
        raise ToldError(f"{PROGRAM}: the survivor did not go on, or the other group did not come back")
    first = back[0]
    window = [row for row in rows if first.at - first.seconds < row.at <= back[min(1, len(back) - 1)].at]
    alone = [row for row in after if row.at <= first.at - first.seconds][-BEFORE:]
    if not (window and alone):
        raise ToldError(f"{PROGRAM}: the survivor made no step before, or while, the other group came back")
    usual_s, longest_s = statistics.median(row.seconds for row in alone), max(row.seconds for row in window)
    return {
        "kill_to_commit_s": round(commits[0].at - at["KILL"], 3),
        "step_s": round(statistics.median(row.seconds for row in before), 3),
        "steps_thrown_away": sum(row.after == row.before for row in after),
        "rejoin_longest_step_s": round(longest_s, 3),
        "rejoin_over_usual": round(longest_s / usual_s, 2),
        "restart_to_commit_s": round(first.at - at["RESTART"], 2),
    }


def rows_of(log: str) -> list[Row]:
    """The steps in a group's log, in order."""
    return [Row(float(t), float(dt), int(a), int(b)) for t, dt, a, b in _STEP.findall(log)]
