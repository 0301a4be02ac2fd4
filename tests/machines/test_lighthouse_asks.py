"""A large job: members beat seldom, so those for whom somebody waits are asked for a sign of life, and only they."""

from __future__ import annotations

from collections import Counter

import pytest
from world import BEAT_S, World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.machine import STRANGERS_KEPT_MAX
from lightkeeper.lighthouse.silence import ASKED_MAX, OFTEN_MAX, Patience

GROUPS = 2 * OFTEN_MAX
ALL = [f"g{i}" for i in range(GROUPS)]


def large(groups: int = GROUPS) -> World:
    """A job of many groups in its first epoch, each of which has shown it by a beat at step 5."""
    world = World(groups)
    world.start()
    for group in world.newest.groups:
        world.beat(group, 5)
    world.tick()
    world.forget_sent()
    return world


def asked(world: World, *speakers: str) -> list[str]:
    """Who was asked since the last call."""
    names = [name for name in speakers or world.newest.groups if world.told(name, m.Ask)]
    world.forget_sent()
    return sorted(names)


def stand(world: World, *speakers: str, waiting_ms: int = 250, step: int = 5) -> None:
    for speaker in speakers:
        world.beat(speaker, step, "reduce", waiting_ms)


def wait_for(
    world: World, slow: str, seconds: float, began: float | None = None, answers: bool = False
) -> Counter[str]:
    """All others stand (since `began`), say so in their beats and when asked. Returns how often who was asked."""
    seen: Counter[str] = Counter()
    began = world.now if began is None else began
    for i in range(round(seconds / BEAT_S)):
        world.now += BEAT_S
        world.tick()
        names = asked(world)
        seen.update(names)
        others = [
            name for name in (ALL if i % 2 else names) if name != slow
        ]  # a beat is two ticks in a job of this size
        stand(world, *others, waiting_ms=round(1000 * (world.now - began)) + 250)
        if answers and slow in names:
            world.beat(slow, 5)
    return seen


def test_the_beat_grows_with_the_groups_and_the_lease_of_who_is_asked_does_not() -> None:
    small, edge, large = (Patience.of(groups, 2.0, 0.2) for groups in (3, OFTEN_MAX, 1024))
    assert small == edge == Patience(beat_s=0.2, asks=False, ask_s=0.2, lease_s=2.0, away_s=2.0)
    assert large.beat_s == pytest.approx(3.2) and (large.asks, large.ask_s, large.lease_s) == (
        True,
        0.2,
        pytest.approx(1.3),
    )
    assert large.away_s == pytest.approx(6.8)


def test_a_manager_is_told_the_beat_of_its_jobs_size() -> None:
    world = World(GROUPS)
    world.hello("g0")
    (welcome,) = world.told("g0", m.Welcome)
    assert (welcome.beat_ms, welcome.lease_ms) == (500, 1300)


def test_silence_alone_is_asked_nothing() -> None:
    world = large()
    world.pass_s(60.0, {"g0": 9})
    assert not asked(world) and not world.noted("group_lost")


def test_the_one_who_does_not_stand_is_asked_every_beat_and_left_out() -> None:
    world = large()
    world.now += 0.5
    stand(world, *ALL[:-1])
    silent, began = ALL[-1], world.now
    seen = wait_for(world, silent, 1.5)
    assert not world.noted("group_lost"), "it has a lease to answer"
    assert seen[silent] == 6 and len(seen) <= 2, "it, every beat; and perhaps one witness that the others still stand"
    wait_for(world, silent, 0.25, began)
    (lost,) = world.noted("group_lost")
    assert (lost["group"], lost["detected_by"]) == (silent, "lease")
    assert world.is_asked("g0") or world.machine.recovery is not None


def test_who_answers_stays() -> None:
    """A slow member: it computes, and all others stand for it."""
    world = large()
    stand(world, *ALL[:-1])
    seen = wait_for(world, ALL[-1], 10.0, answers=True)
    assert seen[ALL[-1]] > 10 and not world.noted("group_lost")


def test_when_the_witness_stands_no_longer_nobody_is_asked_and_nobody_lost() -> None:
    world = large()
    world.now += 0.5
    stand(world, *ALL[:-1])
    wait_for(world, ALL[-1], 1.0)
    for _ in range(80):  # the reduce is through; those who are asked say so, the last of them does not
        world.now += BEAT_S
        world.tick()
        for name in asked(world):
            if name != ALL[-1]:
                world.beat(name, 6)
    assert not world.noted("group_lost") and not asked(world)


def test_with_many_silent_few_are_asked_at_a_time_the_longest_silent_first() -> None:
    world = large()
    for name in ALL[: GROUPS // 2]:
        world.now += 0.001
        world.beat(name, 5)
    world.now += 1.0
    stand(world, "g0", waiting_ms=1000)
    world.tick()
    names = asked(world)
    assert len(names) == ASKED_MAX and set(names) <= set(ALL[GROUPS // 2 :])


def test_in_a_recovery_those_who_have_not_promised_are_asked() -> None:
    world = large()
    world.die("g0")
    for name in ALL[1:-1]:
        world.promise(name, 4)
    world.forget_sent()
    world.pass_s(0.5)
    assert asked(world) == [ALL[-1]]
    world.pass_s(2.0)
    lost = {note["group"] for note in world.noted("group_lost")}
    assert lost == {"g0", ALL[-1]}


def test_a_second_incarnation_waits_until_the_first_was_asked() -> None:
    world = large()
    world.pass_s(4.0)  # less than the lease of a large job, more than that of a small one
    world.hello("g0/i2")
    assert "is asked for a sign of life" in world.reason("g0/i2") and asked(world, "g0") == ["g0"]
    world.pass_s(1.0)
    world.beat("g0", 6)
    world.hello("g0/i2")
    assert "which still beats" in world.reason("g0/i2")


def test_a_second_incarnation_comes_in_if_the_first_does_not_answer() -> None:
    world = large()
    world.pass_s(4.0)
    world.hello("g0/i2")
    world.pass_s(1.75)
    world.hello("g0/i2")
    assert world.told("g0/i2", m.Welcome)


def test_in_a_small_job_nobody_is_asked() -> None:
    world = large(3)
    world.pass_s(5.0, {"g0": 5}, waiting_ms=5000)
    assert not asked(world, "g0", "g1", "g2")


def test_a_standstill_of_the_lighthouse_itself_proves_nothing() -> None:
    world = large()
    world.now += 0.5
    stand(world, *ALL[:-1])
    wait_for(world, ALL[-1], 1.0)
    world.now += 5.0
    world.tick()
    assert not world.noted("group_lost")


def test_a_beat_that_changes_nothing_costs_no_look_at_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    world = large()
    looks = []
    real = world.machine._members
    monkeypatch.setattr(world.machine, "_members", lambda: looks.append(world.now) or real())
    for step in range(6, 10):
        for name in ALL:
            world.beat(name, step)
        world.now += BEAT_S
        world.tick()
    assert len(looks) <= 3, "once a second: must an activation be said again, does anybody stand; and who is slow"
    stand(world, "g0")
    looks.clear()
    world.tick()
    assert looks, "somebody stands: the next tick looks"


def test_for_whom_it_waits_is_said_with_a_few_names() -> None:
    world = large()
    world.die("g0")
    world.pass_s(1.25)
    waiting = world.told("g1", m.Waiting)[-1]
    assert len(waiting.whom) == 9 and waiting.whom[-1] == f"{GROUPS - 9} more"


def test_groups_that_come_and_go_are_not_kept_without_end() -> None:
    world = World(STRANGERS_KEPT_MAX * 3)
    for i in range(STRANGERS_KEPT_MAX * 2):
        world.hello(f"g{i}")
        world.cut(f"g{i}")
    assert STRANGERS_KEPT_MAX // 2 <= len(world.machine.groups) <= STRANGERS_KEPT_MAX
    assert f"g{2 * STRANGERS_KEPT_MAX - 1}" in world.machine.groups, "the newest are"
