"""What `bench chaos` makes of the steps and the kills."""

from __future__ import annotations

import pytest

from lightkeeper.bench.chaos import MICROBATCHES, Kill, Step, figures

QUIET = [Step("g0", at, 1.0, index, MICROBATCHES) for index, at in enumerate((-3.0, -2.0, -1.0))]


def test_late_and_thrown_away_steps_are_not_in_time_and_a_step_counts_once() -> None:
    steps = [
        *QUIET,
        Step("g0", 1.0, 1.0, 3, MICROBATCHES),
        Step("g1", 1.0, 1.0, 3, MICROBATCHES),
        Step("g0", 2.0, 1.0, 4, 0.0),  # thrown away, and done again too late
        Step("g0", 4.5, 2.5, 4, MICROBATCHES / 2),
        Step("g2", 5.0, 9.0, 4, MICROBATCHES / 2),  # the first one of the group that came back
        Step("g2", 6.0, 1.0, 5, MICROBATCHES),
    ]
    found = figures(steps, [Kill(0.0, "g2")], ended=10.0)
    assert found["steps_in_time"] == pytest.approx(3 / 5)
    assert found["goodput"] == pytest.approx(2.5 / 10)
    assert (found["normal_s"], found["longest_s"], found["kills"]) == (1.0, 2.5, 1)


def test_what_ends_after_the_end_does_not_count() -> None:
    steps = [*QUIET, Step("g0", 1.0, 1.0, 3, MICROBATCHES), Step("g0", 11.0, 1.0, 4, MICROBATCHES)]
    assert figures(steps, [Kill(0.0, "g2")], ended=10.0)["goodput"] == pytest.approx(0.1)
