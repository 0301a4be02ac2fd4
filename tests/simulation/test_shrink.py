"""A history that breaks is made small, and stays one that breaks."""

from __future__ import annotations

import pytest

from lightkeeper.simulator.checkers import Violation
from lightkeeper.simulator.faults import Fault, Faults
from lightkeeper.simulator.history import Plan, plan_history, run_history
from lightkeeper.simulator.shape import Shape
from lightkeeper.simulator.shrink import shrink


@pytest.fixture
def two_cuts_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a bug: whenever a second stream has been broken, an invariant is."""
    strike = Faults.break_stream
    struck: dict[int, int] = {}

    def breaks(faults: Faults, fault: Fault) -> bool:
        did = strike(faults, fault)
        struck[id(faults)] = struck.get(id(faults), 0) + did
        if struck[id(faults)] >= 2:
            raise Violation("I2", "two streams")
        return did

    monkeypatch.setattr(Faults, "break_stream", breaks)


@pytest.mark.usefixtures("two_cuts_break")
def test_only_the_faults_that_matter_stay() -> None:
    shape = Shape(groups=3, ranks=2, lighthouses=2, until=40)
    others = [Fault("fail_reduces", 1.0 + i / 10) for i in range(6)]
    plan = Plan(1, shape, (*others, Fault("break_stream", 1.2), Fault("break_stream", 1.3, "vote")))
    assert run_history(plan).invariant == "I2"
    small, outcome = shrink(plan, "I2")
    assert [fault.kind for fault in small.faults] == ["break_stream", "break_stream"]
    assert (small.shape.ranks, small.shape.lighthouses, outcome.invariant) == (1, 1, "I2")


@pytest.mark.usefixtures("two_cuts_break")
def test_the_tries_are_bounded() -> None:
    plan = Plan(1, Shape(groups=3), tuple(Fault("break_stream", 1 + i / 10) for i in range(8)))
    small, _ = shrink(plan, "I2", tries_max=1)
    assert len(small.faults) >= 4


def test_a_plan_is_a_function_of_its_seed_and_its_size() -> None:
    assert plan_history(3) == plan_history(3) != plan_history(4)
    assert plan_history(3, groups=4).shape.groups == 4
    few, many = (sum(len(plan_history(s, faults=n).faults) for s in range(30)) for n in (4, 20))
    assert many > 3 * few
    assert all(fault.at_s <= 5.0 for s in range(20) for fault in plan_history(s, window_s=5.0).faults)
