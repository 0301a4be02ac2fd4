"""When a save is due, and what a tier makes of its outcomes: with a saver that is told what happens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoint_made import published

from lightkeeper.checkpoint.cadence import FIRST_S, SHORTEST_S, Cadence, Cost, interval_s
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.saver import Outcome
from lightkeeper.checkpoint.tier import SHARED, Tier, Told
from lightkeeper.events.of_checkpoints import CheckpointFailed, CheckpointSaved
from lightkeeper.lighthouse.names import Entry, Epoch, Term

# ------------------------------------------------------------ cadence


def due_at(cadence: Cadence, steps: range, now: float = 0.0) -> list[int]:
    """The steps at which it is due, if each save is committed at once."""
    found = []
    for step in steps:
        if cadence.due(step, now):
            found.append(step)
            cadence.begins(step, now)
            cadence.saved(step, 0.0, now)
    return found


def test_by_steps_it_is_due_at_multiples_and_once_each() -> None:
    assert due_at(Cadence(every=10), range(1, 45)) == [10, 20, 30, 40]
    assert due_at(Cadence(every=10, saved_step=13), range(14, 45)) == [20, 30, 40]


def test_a_multiple_that_nobody_saved_is_made_up_for_at_once() -> None:
    """As by who takes over from a group that was killed while it saved."""
    cadence = Cadence(every=10, saved_step=10)
    assert due_at(cadence, range(23, 45)) == [23, 30, 40]


def test_by_seconds_it_counts_from_the_copy_of_the_newest() -> None:
    cadence = Cadence(every_s=30.0)
    assert not cadence.due(5, 29.0) and cadence.due(5, 30.0)
    cadence.begins(5, 30.0)
    assert not cadence.due(9, 59.0)
    cadence.saved(5, write_s=12.0, now=50.0)
    assert not cadence.due(9, 67.0) and cadence.due(9, 68.0)


def test_with_neither_it_is_as_often_as_it_pays_by_youngs_formula() -> None:
    assert interval_s(cost_s=2.0, failures=0, trained_s=0.0, mtbf_s=3600.0) == math.sqrt(2 * 2.0 * 3600.0)
    assert interval_s(2.0, failures=3, trained_s=3600.0, mtbf_s=3600.0) == math.sqrt(2 * 2.0 * 1800.0)
    cadence = Cadence(mtbf_s=3600.0)
    assert cadence.interval_s(0.0) == FIRST_S, "before it is known what one costs"
    for _ in range(5):
        cadence.cost.step(1.0, beside=False)
    cadence.cost.step(2.5, beside=True)
    cadence.cost.step(1.5, beside=True)
    cadence.cost.step(0.9, beside=True)
    cadence.saved(7, write_s=3.0, now=10.0)
    assert cadence.cost.seconds == 2.0 and cadence.interval_s(0.0) == math.sqrt(2 * 2.0 * 3600.0)
    cadence.failures, cadence.trained_s = 1, 3600.0
    assert cadence.interval_s(0.0) == math.sqrt(2 * 2.0 * 3600.0), "one failure an hour, seen and held"


def test_what_costs_nothing_is_not_saved_all_the_time() -> None:
    cadence = Cadence(mtbf_s=60.0)
    cadence.cost.step(1.0, beside=False)
    cadence.saved(1, write_s=1.0, now=0.0)
    assert cadence.cost.seconds == 0.0 and cadence.interval_s(0.0) == SHORTEST_S
    cadence.saved(2, write_s=40.0, now=0.0)
    assert cadence.interval_s(0.0) == 80.0, "a save is under way for half of the time at most"


def test_what_failed_is_tried_again_later_and_later_and_not_an_interval_later() -> None:
    cadence = Cadence(every=10)
    assert cadence.due(10, 0.0)
    waits = []
    for now in (0.0, 100.0, 200.0):
        cadence.begins(10, now)
        assert not cadence.due(11, now + 50.0)
        waits.append(cadence.fails(now))
        assert not cadence.due(11, now + waits[-1] - 0.1) and cadence.due(11, now + waits[-1])
    assert waits == [1.0, 2.0, 4.0]
    for _ in range(10_000):
        assert cadence.fails(0.0) <= 300.0, "however long it lasts"
    cadence.saved(11, 0.0, 1e6)
    assert cadence.failed == 0 and cadence.fails(0.0) == 1.0


def test_a_cost_without_a_usual_step_is_none() -> None:
    cost = Cost()
    cost.step(99.0, beside=True)
    cost.saved()
    assert cost.seconds == 0.0


# ------------------------------------------------------------ tier


class FakeSaver:
    """Busy as it is told; ends as it is told."""

    def __init__(self) -> None:
        self.busy, self.busy_s = False, 0.0
        self.ended: list[Outcome] = []

    def outcomes(self) -> list[Outcome]:
        ended, self.ended = self.ended, []
        return ended


class World:
    """A tier and whom it tells."""

    def __init__(self, tmp_path: Path, rank: int = 0, **cadence: Any) -> None:
        self.saver, self.events = FakeSaver(), []
        self.folder = Folder(tmp_path / "checkpoints", "g0-1")
        saver: Any = self.saver
        self.tier = Tier(
            SHARED, self.folder, saver, Cadence(**{"every": 10, **cadence}), Told(self.events.append, rank), 3, 20.0
        )

    def begin(self, step: int, now: float) -> None:
        assert self.tier.due(step, now)
        self.tier.cadence.begins(step, now)
        self.saver.busy = True

    def end(self, step: int, now: float, problem: str = "") -> None:
        manifest = None
        if not problem:
            manifest = (
                self.folder.look(step).manifest or self.folder.look(published(self.folder, step) and step).manifest
            )
        self.saver.ended.append(Outcome(named(step), problem=problem, manifest=manifest, path=Path("there")))
        self.saver.busy, self.saver.busy_s = False, 0.0
        self.tier.heed(now)

    def failed(self) -> list[CheckpointFailed]:
        return [e for e in self.events if isinstance(e, CheckpointFailed)]


def named(step: int) -> Entry:
    """The name of the state with so many steps behind it."""
    return Entry(Epoch(4, Term(2, "lh")), step - 1)


def test_a_failure_is_told_and_the_alarm_comes_with_the_third(tmp_path: Path, capsys: Any) -> None:
    world, now = World(tmp_path), 0.0
    for number in range(1, 4):
        world.begin(10 + number, now)
        world.end(10 + number, now, "No space left on device")
        event = world.failed()[-1]
        assert (event.failures, event.alarm, event.pending, event.step) == (number, number == 3, False, 10 + number)
        assert event.again_s == 2.0 ** (number - 1)
        now += event.again_s
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all("No space left on device; training goes on" in line for line in lines)
    assert "ALARM: 3 saves in a row came to nothing" in lines[2] and "ALARM" not in lines[1]
    world.begin(15, now)
    world.end(15, now)
    (saved,) = [e for e in world.events if isinstance(e, CheckpointSaved)]
    assert (saved.step, saved.epoch, saved.term, saved.tier) == (15, 4, 2, "shared") and world.tier.committed == 15
    assert "after 3 that failed" in capsys.readouterr().err
    assert not world.tier.due(19, now) and world.tier.due(20, now)


def test_every_one_that_is_missed_behind_a_slow_one_is_told_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.begin(10, 0.0)
    for step in range(11, 45):
        world.saver.busy_s = float(step - 10)
        assert not world.tier.due(step, float(step - 10))
    assert [(e.step, e.failures, e.alarm, e.pending) for e in world.failed()] == [
        (20, 1, False, True), (30, 2, False, True), (40, 3, True, True),
    ]  # fmt: skip
    world.end(10, 35.0)
    assert world.tier.due(45, 35.0), "and made up for at once"
    assert world.tier.cadence.failed == 0


def test_one_that_hangs_is_told_also_if_none_is_due_less_and_less_often(tmp_path: Path) -> None:
    world = World(tmp_path, every=10_000, saved_step=-1)
    world.saver.busy = True
    told = []
    for second in range(1000):
        world.saver.busy_s = float(second)
        world.tier.heed(float(second))
        told.append(len(world.failed()))
    assert [told.index(count) for count in sorted(set(told))[1:]] == [21, 41, 81, 161, 321, 641]
    assert all(e.pending and "is the storage there?" in e.reason for e in world.failed())


def test_who_takes_over_looks_at_what_is_there_first(tmp_path: Path) -> None:
    world = World(tmp_path)
    published(world.folder, 20)
    world.tier.look(30)
    while world.tier._looking:
        assert not world.tier.due(23, 0.0)
    assert not world.tier.due(23, 0.0) and world.tier.due(30, 0.0)


def test_another_rank_than_the_first_says_nothing_and_counts_the_same(tmp_path: Path, capsys: Any) -> None:
    world = World(tmp_path, rank=1)
    world.begin(10, 0.0)
    world.saver.ended.append(Outcome(named(10), problem="No space left on device"))
    world.tier.heed(0.0)
    world.saver.ended.append(Outcome(named(12)))
    world.tier.heed(3.0)
    assert not world.events and not capsys.readouterr().err
    assert world.tier.cadence.saved_step == 12


@pytest.mark.parametrize("every", [0, 10])
def test_nothing_is_due_twice_for_one_state(tmp_path: Path, every: int) -> None:
    world = World(tmp_path, every=every)
    world.begin(10, 100.0)
    world.end(10, 100.0)
    assert not world.tier.due(10, 1e6)
