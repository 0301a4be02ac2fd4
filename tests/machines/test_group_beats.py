"""When a manager of a large job beats: seldom, and at once if others wait for what it says."""

from __future__ import annotations

from groupworld import TERM, GroupWorld

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager.machine import RankView

BEAT_MS = 3200


def large() -> GroupWorld:
    world = GroupWorld()
    world.start()
    world.hears(m.Welcome(TERM, 1500, BEAT_MS))
    look(world)
    world.forget()
    return world


def look(world: GroupWorld, phase: str = "compute", waiting_s: float = 0.0, stopped_s: float = 0.0) -> list[m.Beat]:
    """A tenth of a second passes; returns the beats that it gave."""
    world.told.clear()
    world.now += 0.1
    world._carry_out(world.machine.tick({0: RankView(phase, 0, waiting_s, stopped_s)}, world.now))
    return world.said(m.Beat)


def commit(world: GroupWorld, step: int) -> None:
    world.vote(0, "reduced", step, 1)


def test_it_beats_at_its_interval() -> None:
    world = large()
    beats = [beat for _ in range(100) for beat in look(world)]
    assert len(beats) == 3


def test_what_it_does_beside_its_steps_is_said_as_any_phase() -> None:
    world = GroupWorld()
    world.start()
    assert {
        beat.phase for beat in [*look(world, "evaluation"), *look(world, "evaluation"), *look(world, "evaluation")]
    } == {"evaluation"}


def test_that_it_stands_is_said_at_once_and_once_a_step() -> None:
    world = large()
    assert not look(world, "reduce", 0.1)
    (beat,) = look(world, "reduce", 0.2)
    assert beat.waiting_ms == 200
    assert not [b for i in range(10) for b in look(world, "reduce", 0.3 + i / 10)]
    commit(world, 0)
    (beat,) = look(world, "reduce", 1.9)
    assert beat.step == 1, "longer than in the step before"


def test_what_is_usual_is_not_said() -> None:
    world = large()
    for step in range(5):
        said = look(world, "reduce", 0.5)
        assert bool(said) == (step == 0)
        commit(world, step)
        look(world)
    assert look(world, "reduce", 0.8)


def test_a_standing_that_a_recovery_ended_is_not_usual() -> None:
    world = large()
    assert look(world, "reduce", 5.0)
    world.prepare(2)
    world.activate(2, "g0", "g1")
    (beat,) = look(world)
    assert beat.epoch == 2, "that the epoch was taken up is said at once"
    world.vote(0, "reduced", 0, 2)
    assert look(world, "reduce", 0.2)


def test_a_stopped_rank_is_said_at_once_and_that_it_goes_on() -> None:
    world = large()
    assert look(world, stopped_s=0.6)[0].stopped_ms == 600
    assert not look(world, stopped_s=0.7)
    assert look(world)[0].stopped_ms == 0


def test_it_answers_an_ask_with_what_its_ranks_do_now() -> None:
    world = large()
    look(world, "reduce", 0.1)
    world.forget()
    world.hears(m.Ask())
    (beat,) = world.said(m.Beat)
    assert (beat.phase, beat.waiting_ms, beat.epoch) == ("reduce", 100, 1)


def test_another_stream_hears_a_beat_at_once() -> None:
    world = large()
    world.disconnect()
    world.connect()
    assert look(world)
