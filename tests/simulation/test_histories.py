"""Random histories of the whole protocol: nothing that must hold is broken.

``LIGHTKEEPER_SEED=N`` runs that history alone, with its transcript; ``LIGHTKEEPER_HISTORIES=N`` runs so many.
"""

from __future__ import annotations

import os

import pytest

from lightkeeper.simulator.faults import KINDS
from lightkeeper.simulator.history import plan_history, run_history, transcript
from lightkeeper.simulator.run import Runs, run_all

HISTORIES = 2000
WORKERS = 2
STALLED = 120


@pytest.mark.timeout(1800)
def test_histories_with_faults_break_nothing() -> None:
    """Every kind of fault must have struck, and what is shown as a sum must be one."""
    if (chosen := os.environ.get("LIGHTKEEPER_SEED")) is not None:
        plan = plan_history(int(chosen))
        outcome = run_history(plan, traces=True)
        assert not outcome.invariant, transcript(plan, outcome.trace)
        return
    count = int(os.environ.get("LIGHTKEEPER_HISTORIES", HISTORIES))
    seen: list[int] = []
    report = run_all(Runs(count=count), WORKERS, lambda _, done: seen.append(done))
    broken = [f"seed {seed}: {what}" for seed, _, what in sorted(report.violations)]
    assert not broken, "\n".join([*broken[:10], "repeat one with LIGHTKEEPER_SEED=N"])
    assert report.histories + report.idle == count == seen[-1]
    assert report.histories > 0.9 * count, "in nearly all of them enough must happen for it to count"
    assert report.finished > 0.8 * count, "most jobs come to their end in spite of everything"
    assert not report.never and set(report.kinds) == set(KINDS)
    assert report.faults == sum(report.kinds.values()) > 6 * count
    assert report.adopted > 0.05 * count, "some must have fetched an entry that they missed"


def test_ranks_that_stall_break_nothing_and_nobody_else_is_called_stuck() -> None:
    """With one lighthouse; docs/simulator.md says what is known to break with two."""
    struck = left_out = 0
    for seed in range(STALLED):
        plan = plan_history(seed, stalls=True, shape={"lighthouses": 1})
        outcome = run_history(plan, traces=True)
        assert not outcome.invariant, transcript(plan, outcome.trace, 60)
        struck += outcome.kinds.get("stall_rank", 0)
        left_out += sum("has made no progress" in line for line in outcome.trace)
    assert struck > STALLED / 5 and left_out > STALLED / 20


def test_who_waits_to_form_with_a_rank_that_stalls_is_not_called_stuck() -> None:
    """A rank of one group stalls in the closing reduce; another group, one step behind, waits for it to form."""
    plan = plan_history(585, stalls=True, shape={"lighthouses": 2})
    outcome = run_history(plan, traces=True)
    assert not outcome.invariant, transcript(plan, outcome.trace, 60)
    assert any("no progress in closing of step 118" in line for line in outcome.trace)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_cell_of_fault_and_phase_is_empty_in_a_long_run() -> None:
    report = run_all(Runs(first=1_000_000, count=12_000), WORKERS, lambda _report, _done: None)
    assert not report.violations
    assert not report.empty, f"faults that never struck in a phase: {report.empty}"


def test_the_same_seeds_give_the_same_sums_whoever_runs_them() -> None:
    runs = Runs(first=40, count=40)
    one = run_all(runs, 1, lambda _report, _done: None)
    two = run_all(runs, 2, lambda _report, _done: None)
    assert one.to_dict() == two.to_dict()


def test_a_history_in_which_too_little_happens_does_not_count() -> None:
    report = run_all(Runs(count=5, window_s=1.0, faults=1.0), 1, lambda _report, _done: None)
    assert report.histories + report.idle == 5 and report.idle > 0
