"""One seed is one history: event by event, in any process, whether or not somebody watches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightkeeper.simulator.history import plan_history, run_history

ROOT = Path(__file__).resolve().parents[2]
HASHED = """
import hashlib, sys
from lightkeeper.simulator.history import plan_history, run_history
outcome = run_history(plan_history(int(sys.argv[1])), traces=True)
print(outcome.events, hashlib.sha256(chr(10).join(outcome.trace).encode()).hexdigest())
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_repeats_its_history(seed: int) -> None:
    first, second = (run_history(plan_history(seed), traces=True) for _ in range(2))
    assert first.trace == second.trace and len(first.trace) > 30
    watched, alone = first, run_history(plan_history(seed))
    assert not alone.trace
    assert (watched.events, watched.messages, watched.commits) == (alone.events, alone.messages, alone.commits)


def test_a_seed_repeats_its_history_in_another_process_with_other_hashes() -> None:
    said = set()
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        done = subprocess.run(
            [sys.executable, "-c", HASHED, "5"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1


def test_other_seeds_are_other_histories() -> None:
    assert run_history(plan_history(1)).events != run_history(plan_history(2)).events


def test_the_simulator_loads_no_torch_and_no_network() -> None:
    code = (
        "import sys, lightkeeper.simulator.run, lightkeeper.simulator.shrink\n"
        "bad = [name for name in ('torch', 'grpc', 'simulator') if name in sys.modules]\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
