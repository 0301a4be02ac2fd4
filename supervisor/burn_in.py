"""Burn-in: a command again and again on a node, for so many rounds and so long, until it fails or has passed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightkeeper.words import shown

SAID_BYTES_MAX = 4096


@dataclass(frozen=True)
class Result:
    """What came of it: `why` is empty if every round went well."""

    rounds: int
    seconds: float
    why: str


def burn_in(
    argv: Sequence[str],
    rounds: int,
    for_s: float,
    round_s_max: float,
    told: Callable[[int, float], None] = lambda number, seconds: None,
) -> Result:
    """Runs it at least `rounds` times and for at least `for_s` seconds.

    Args:
        argv: the command, with what brings it to the node.
        rounds: at least so many.
        for_s: and for at least so long.
        round_s_max: one that takes longer is killed, with all that it started here, and has failed.
        told: gets the number of every round that went well, and its seconds.
    """
    begun_s, number = time.monotonic(), 0
    while number < rounds or time.monotonic() - begun_s < for_s:
        number += 1
        round_s = time.monotonic()
        why = one_round(argv, round_s_max)
        if why:
            return Result(number, time.monotonic() - begun_s, f"round {number}: {why}")
        told(number, time.monotonic() - round_s)
    return Result(number, time.monotonic() - begun_s, "")


def one_round(argv: Sequence[str], round_s_max: float) -> str:
    """Why one round failed; "" if it went well."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            return f"{argv[0]}: {error.strerror or error}"
        try:
            code = process.wait(round_s_max)
        except subprocess.TimeoutExpired:
            return f"did not end within {round_s_max:g} s"
        finally:
            if process.poll() is None:  # also when we are interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == 0:
            return ""
        output.seek(max(0, output.seek(0, os.SEEK_END) - SAID_BYTES_MAX))
        said = output.read(SAID_BYTES_MAX).decode("utf-8", "replace").strip().splitlines()
        return (f"exited {code}" if code > 0 else f"was killed by signal {-code}") + (
            f": {shown(said[-1])}" if said else ""
        )
