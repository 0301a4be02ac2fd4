"""Histories of groups on several nodes: votes folded and delayed on their way break nothing."""

from __future__ import annotations

import pytest

from lightkeeper.simulator.history import plan_history, run_history, transcript

HISTORIES = 25


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (2, 4), (3, 3)])
def test_groups_on_several_nodes_break_nothing(nodes: int, ranks: int) -> None:
    finished = counted = 0
    for seed in range(HISTORIES):
        plan = plan_history(seed, shape={"nodes": nodes, "ranks": ranks})
        outcome = run_history(plan)
        assert not outcome.invariant, transcript(plan, run_history(plan, traces=True).trace)
        finished += outcome.finished
        counted += outcome.counts
    assert counted > 0.8 * HISTORIES and finished > 0.7 * HISTORIES
