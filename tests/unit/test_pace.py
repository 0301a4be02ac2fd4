"""How long a microbatch takes, as a rank measures it."""

from __future__ import annotations

from lightkeeper.manager.pace import ENOUGH, KEPT, Pace


def steps(pace: Pace, first: int, count: int, seconds: float, each: int = 4, wait_s: float = 1.0) -> None:
    now = 1000.0 * first
    for step in range(first, first + count):
        for _ in range(each):
            pace.begins(step, now)
            now += seconds
        pace.ends(now)
        now += wait_s


def test_the_first_step_does_not_count_and_a_few_microbatches_are_not_enough() -> None:
    pace = Pace()
    steps(pace, 7, 1, 5.0, each=100)
    assert pace.microbatch_us == 0
    steps(pace, 8, 1, 0.25, each=ENOUGH - 1)
    assert pace.microbatch_us == 0
    steps(pace, 9, 1, 0.25, each=1)
    assert pace.microbatch_us == 250_000


def test_waiting_for_others_does_not_count_and_one_slow_microbatch_is_none() -> None:
    pace = Pace()
    steps(pace, 0, 4, 0.25, wait_s=60.0)
    steps(pace, 4, 1, 90.0, each=1)
    assert pace.microbatch_us == 250_000


def test_it_follows_within_half_of_what_it_keeps() -> None:
    pace = Pace()
    steps(pace, 0, 20, 0.25)
    steps(pace, 20, 1, 0.5, each=KEPT // 2 + 1)
    assert pace.microbatch_us == 500_000
