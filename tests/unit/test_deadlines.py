"""How long a rank may do nothing new: learnt, declared, and never below the floor."""

from __future__ import annotations

import pytest

from lightkeeper.manager.answers import RankView
from lightkeeper.manager.deadlines import Deadlines

LOOK_S = 0.1
FLOOR_S, FIRST_S = 15.0, 600.0


class Ranks:
    """Ranks that are looked at ten times a second."""

    def __init__(self, count: int = 1) -> None:
        self.deadlines, self.now, self.count = Deadlines(FLOOR_S, FIRST_S), 0.0, count

    def does(self, phase: str, step: int, seconds: float, expected_s: float = 0.0, rank: int = 0) -> float | None:
        """One of them does this for so long, the others wait; returns after how long it was overdue, if it was."""
        begin, first = self.now, None
        while self.now < begin + seconds:
            self.now += LOOK_S
            idle_s = self.now - begin
            views = {other: RankView("reduce", step, idle_s, 0.0) for other in range(self.count)}
            views[rank] = RankView(phase, step, 0.0, 0.0, 1000, idle_s=idle_s, expected_s=expected_s)
            if self.deadlines.look(views, self.now) and first is None:
                first = idle_s
        return first

    def step(self, index: int, compute_s: float, apply_s: float = 0.0) -> float | None:
        found = self.does("compute", index, compute_s)
        return self.does("apply", index, apply_s) if apply_s and found is None else found


def test_a_first_step_may_take_ten_budgets() -> None:
    ranks = Ranks()
    assert ranks.does("compute", 0, 599.0) is None
    assert ranks.does("compute", 0, 610.0) is not None


def test_after_a_step_the_floor_is_the_deadline_of_short_ones() -> None:
    ranks = Ranks()
    for step in range(5):
        assert ranks.step(step, 0.5) is None
    assert ranks.step(5, 14.8) is None, "ten seconds of a held interpreter lock are nobody's business"
    for step in range(6, 10):
        assert ranks.step(step, 0.5) is None
    found = ranks.step(10, 60.0)
    assert found is not None and found > FLOOR_S


def test_long_microbatches_may_take_ten_times_as_long() -> None:
    ranks = Ranks()
    for step in range(4):
        ranks.step(step, 5.0)
    assert ranks.step(4, 49.0) is None
    for step in range(5, 8):
        ranks.step(step, 5.0)
    found = ranks.step(8, 300.0)
    assert found is not None and 49.0 * 3 - 1.0 < found < 49.0 * 3 + 1.0, "three times the longest step that was well"


def test_a_slow_first_step_and_undeclared_evaluations_raise_no_alarm_and_a_stall_does() -> None:
    """The first step 20 times slower, every tenth evaluates for 15 times as long, a real stall at step 35."""
    ranks = Ranks()
    for step in range(35):
        assert ranks.step(step, 20.0 if step == 0 else 1.0, 15.0 if step % 10 == 9 else 0.1) is None, f"step {step}"
    found = ranks.step(35, 200.0)
    assert found is not None and found < 100.0


def test_one_long_wait_does_not_raise_the_deadline_of_its_phase_for_ever() -> None:
    ranks = Ranks()
    for step in range(10):
        ranks.step(step, 0.5)
    ranks.step(10, 14.0)
    ranks.step(11, 0.5)
    assert ranks.deadlines.of(0, RankView("compute", 12, 0.0, 0.0)) == 3 * ranks.deadlines.longest_step_s < 45.0


def test_what_is_declared_is_borne_and_teaches_nothing() -> None:
    ranks = Ranks()
    ranks.step(0, 0.5)
    ranks.step(1, 0.5)
    assert ranks.does("evaluation", 2, 99.0, expected_s=100.0) is None
    assert ranks.does("evaluation", 2, 120.0, expected_s=100.0) is not None
    ranks.step(3, 0.5)
    assert ranks.deadlines.longest_step_s < 2.0
    view = RankView("evaluation", 2, 0.0, 0.0, expected_s=2.0)
    assert ranks.deadlines.of(0, view) == FLOOR_S, "who declares too little is not punished below the floor"
    assert ranks.deadlines.how(0, view) == "declared"


def test_a_declared_phase_without_seconds_is_learnt_and_has_the_first_steps_time_before() -> None:
    ranks = Ranks()
    ranks.step(0, 0.5)
    ranks.step(1, 0.5)
    assert ranks.deadlines.of(0, RankView("checkpoint", 2, 0.0, 0.0)) == FIRST_S
    assert ranks.deadlines.how(0, RankView("checkpoint", 2, 0.0, 0.0)) == "nothing is learnt yet"
    ranks.does("checkpoint", 2, 4.0)
    ranks.step(3, 0.5)
    assert 35.0 < ranks.deadlines.of(0, RankView("checkpoint", 3, 0.0, 0.0)) < 45.0
    assert ranks.deadlines.how(0, RankView("checkpoint", 3, 0.0, 0.0)) == "learnt from 3 steps"


def test_who_waits_for_others_or_is_stopped_is_not_overdue() -> None:
    deadlines = Deadlines(FLOOR_S, FIRST_S)
    for step in range(3):
        deadlines.look({0: RankView("compute", step, 0.0, 0.0, 1000, idle_s=0.5)}, step)
    assert not deadlines.look({0: RankView("reduce", 3, 500.0, 0.0)}, 500.0)
    assert not deadlines.look({0: RankView("compute", 3, 0.0, 400.0, idle_s=500.0)}, 501.0), "it is frozen, not stuck"


def test_what_passed_while_the_manager_itself_stood_still_does_not_count() -> None:
    ranks = Ranks()
    for step in range(5):
        ranks.step(step, 0.5)
    ranks.now += 60.0
    for late_s in (60.1, 70.0):
        view = {0: RankView("compute", 5, 0.0, 0.0, idle_s=late_s)}
        assert not ranks.deadlines.look(view, ranks.now + late_s - 60.0)
    for tenth in range(200):
        found = ranks.deadlines.look(
            {0: RankView("compute", 5, 0.0, 0.0, idle_s=70 + tenth / 10)}, ranks.now + 10 + tenth / 10
        )
    assert found and FLOOR_S < found[0].idle_ms / 1000 < 40.0


def test_the_one_that_does_nothing_longest_is_named_first() -> None:
    deadlines = Deadlines(FLOOR_S, FIRST_S)
    for step in range(3):
        deadlines.look({rank: RankView("compute", step, 0.0, 0.0, 1000, idle_s=0.5) for rank in range(3)}, step)
    for second in range(3, 23):
        idle_s = (second - 4.0, second - 3.0, 2.0)
        views = {rank: RankView("compute", 3, 0.0, 0.0, idle_s=idle_s[rank]) for rank in range(3)}
        found = deadlines.look(views, second)
    assert [one.rank for one in found] == [1, 0]


def test_a_group_that_heals_begins_to_learn_anew() -> None:
    ranks = Ranks()
    ranks.step(0, 0.5)
    ranks.step(1, 0.5)
    ranks.does("heal", 1, 0.5)
    assert ranks.deadlines.of(0, RankView("compute", 9, 0.0, 0.0)) == FIRST_S


def test_it_says_that_it_is_armed_and_again_when_much_has_changed() -> None:
    ranks = Ranks()
    assert ranks.deadlines.news() is None, "nothing is learnt yet"
    ranks.step(0, 0.5)
    ranks.step(1, 0.5)
    told = ranks.deadlines.news()
    assert told is not None and told["compute"] == FLOOR_S
    assert ranks.deadlines.news() is None
    for step in range(2, 5):
        ranks.step(step, 10.0)
    told = ranks.deadlines.news()
    assert told is not None and told["compute"] > 2 * FLOOR_S


@pytest.mark.parametrize("phase", ["replay", "compute"])
def test_steps_in_which_nothing_was_computed_teach_nothing(phase: str) -> None:
    """A group that came back by a copy, or follows as a spare, has its first microbatch before it: that may compile."""
    deadlines = Deadlines(FLOOR_S, FIRST_S)
    for tenth in range(100):
        deadlines.look({0: RankView(phase, 100 + tenth, 0.0, 0.0, idle_s=0.1)}, tenth / 10)
    assert deadlines.of(0, RankView("compute", 200, 0.0, 0.0)) == FIRST_S and deadlines.news() is None
