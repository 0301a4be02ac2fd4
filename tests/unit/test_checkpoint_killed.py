"""Writers that are killed at any moment: the newest committed checkpoint never gets older, and each one is whole."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("checkpoint_killed.py")


def deaths(folder: Path, how: str, most: int, seed: int = 0) -> list[dict[str, Any]]:
    """What each of so many deaths left, in order."""
    words = [sys.executable, str(PROGRAM), str(folder), how, str(most), str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(told: list[dict[str, Any]]) -> None:
    newest, most = -1, 0
    for one in told:
        assert one["torn"] == []
        now = max(one["steps"], default=-1)
        assert now >= max(newest, one["noted"]), one
        newest, most = now, max(most, len(one["steps"]))
        assert len(one["steps"]) >= min(2, most), one


def test_killed_before_each_operation_in_turn(tmp_path: Path) -> None:
    told = deaths(tmp_path / "checkpoints", "each", 1000)
    check(told)
    assert 60 < len(told) < 1000  # then one went through
    assert told[-1]["noted"] > 10
    assert {kind for one in told for kind in one["kinds"]} == {"step", "saving", "dropped"}  # it did die in between


@pytest.mark.parametrize("most", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_killed_at_random_moments(tmp_path: Path, most: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    told = list[dict[str, Any]]()
    while not told or told[-1]["noted"] <= 10:  # how much is done in a life follows how busy the machine is
        told += deaths(tmp_path / "checkpoints", "random", most, seed + len(told))
        assert len(told) % most == 0 and len(told) < 100 * most
    check(told)
