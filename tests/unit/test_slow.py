"""Which group is slow, what it costs, and whether it pays to go on without it."""

from __future__ import annotations

import random

import pytest

from lightkeeper.lighthouse.names import EVEN
from lightkeeper.lighthouse.slow import (
    EVICT_WINDOWS,
    WINDOW_STEPS,
    Pace,
    SlowGroup,
    Slows,
    costs,
    may_leave,
    pays,
)


def paces(*microbatch_us: float, waits: tuple[int, ...] = (), speeds: tuple[int, ...] = ()) -> list[Pace]:
    """A step ends with the slowest: the others wait for it."""
    slowest = max(microbatch_us)
    return [
        Pace(
            f"g{i}",
            round(us),
            i % 2,
            waits[i] if waits else round(4 * (slowest - us)) + 1000,
            speeds[i] if speeds else EVEN,
        )
        for i, us in enumerate(microbatch_us)
    ]


def first_said(slows: Slows, steps: range, groups: list[Pace]) -> SlowGroup | None:
    for step in steps:
        slow, _ = slows.look(step, groups, 12)
        if slow:
            return slow[0]
    return None


@pytest.mark.parametrize("factor", [1.3, 3.0])
def test_the_slow_one_of_three_is_named_within_twenty_steps_and_nobody_else(factor: float) -> None:
    chance, slows, named = random.Random(1), Slows(), []
    for step in range(200):
        noisy = [100_000 * (1 + 0.05 * chance.uniform(-1, 1)) for _ in range(3)]
        slow, ended = slows.look(step, paces(noisy[0], noisy[1], noisy[2] * factor), 12)
        assert not ended
        named += slow
    (only,) = named
    assert (only.group, only.rank) == ("g2", 0) and only.step < 20 and only.steps >= WINDOW_STEPS
    assert factor * 0.85 < only.factor < factor * 1.15
    assert only.wait_s < only.others_wait_s


def test_of_two_groups_it_is_the_slower_one() -> None:
    said = first_said(Slows(), range(20), paces(130, 100))
    assert said is not None and said.group == "g0" and said.factor == pytest.approx(1.3)


def test_noise_and_a_hiccup_are_none() -> None:
    slows = Slows()
    for step in range(100):
        hiccup = 3.0 if step % 10 < WINDOW_STEPS - 1 else 1.0
        assert slows.look(step, paces(100, 100, 100 * hiccup), 12) == ([], [])


def test_who_waits_as_long_as_the_others_is_not_slow() -> None:
    """It takes longer for a microbatch and yet waits for the others: its microbatches are the longer ones."""
    assert first_said(Slows(), range(50), paces(100, 100, 150, waits=(1000, 1000, 9000))) is None


def test_who_is_dealt_less_already_is_slow_though_it_waits() -> None:
    said = first_said(
        Slows(), range(50), paces(100, 100, 150, waits=(1000, 1000, 9000), speeds=(EVEN, EVEN, EVEN // 2))
    )
    assert said is not None and said.group == "g2"


def test_spares_and_those_not_measured_yet_play_no_part() -> None:
    groups = [*paces(100, 100), Pace("spare", 900, speed=0), Pace("new", 0)]
    assert first_said(Slows(), range(50), groups) is None
    assert first_said(Slows(), range(50), [Pace("g0", 900), Pace("g1", 0)]) is None


def test_it_is_said_once_and_again_only_after_it_was_well_for_a_window() -> None:
    slows = Slows()
    assert first_said(slows, range(50), paces(100, 100, 130)) is not None
    assert first_said(slows, range(50, 90), paces(100, 100, 130)) is None
    assert first_said(slows, range(90, 120), paces(100, 100, 115)) is None, "between slow and well it is what it was"
    endings = [slows.look(step, paces(100, 100, 102), 12)[1] for step in range(120, 150)]
    assert [names for names in endings if names] == [["g2"]]
    said = first_said(slows, range(150, 180), paces(100, 100, 130))
    assert said is not None and said.flaps == 1


def test_one_that_flaps_counts_as_slow_for_long() -> None:
    slows, step = Slows(), 0
    for _ in range(3):
        assert first_said(slows, range(step, step + 20), paces(100, 100, 140)) is not None
        for well in range(step + 20, step + 40):
            slows.look(well, paces(100, 100, 100), 12)
        step += 40
    assert slows.slow_for("g2", step) == 0
    said = first_said(slows, range(step, step + 20), paces(100, 100, 140))
    assert said is not None and said.flaps == 3
    assert slows.slow_for("g2", step + 12) == EVICT_WINDOWS * WINDOW_STEPS


def test_what_it_costs_is_what_everybody_would_save() -> None:
    assert costs("g2", paces(100, 100, 150), 12) == pytest.approx(1 - 400 / 600)
    dealt = paces(100, 100, 150, speeds=(EVEN, EVEN, round(EVEN / 1.5)))
    assert 0.0 < costs("g2", dealt, 12) < 0.25, "dealing by speed has taken most of it"
    assert costs("g2", paces(100, 100, 100), 12) == 0.0


def test_it_may_leave_only_if_it_cannot_be_dealt_less() -> None:
    even = paces(100, 100, 400)
    assert not may_leave("g2", even, 12, spare=True, heal_s=10.0)
    one_each = paces(100, 100, 400)
    assert may_leave("g2", one_each, 3, spare=True, heal_s=10.0), "the spare works in its place"
    assert may_leave("g2", one_each, 3, spare=False, heal_s=10.0), "two steps of two for one of four"
    assert not may_leave("g2", paces(100, 100, 150), 3, spare=False, heal_s=10.0), "two would take longer than with it"
    assert not may_leave("g0", paces(400), 1, spare=True, heal_s=1.0)


def test_what_pays_is_a_matter_of_what_is_saved_over_the_horizon() -> None:
    assert pays(400, 200, heal_s=299.0, horizon_s=600.0)
    assert not pays(400, 200, heal_s=301.0, horizon_s=600.0)
    assert not pays(100, 96, heal_s=0.1, horizon_s=600.0), "under a twentieth nobody is left out"
    assert not pays(100, 120, heal_s=0.0)
