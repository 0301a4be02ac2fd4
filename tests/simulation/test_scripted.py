"""Histories with one kind of trouble, and what it may cost; and a few by script."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from lightkeeper.lighthouse import messages as m
from lightkeeper.simulator.faults import Fault
from lightkeeper.simulator.history import Outcome, Plan, run_history
from lightkeeper.simulator.phases import members
from lightkeeper.simulator.shape import Shape
from lightkeeper.simulator.world import World

widths = pytest.mark.parametrize("ranks", [1, 2])


def shape(groups: int = 3, ranks: int = 1, until: int = 12, slow: bool = False, **more: object) -> Shape:
    pace = (0.5, 0.8) if slow else (0.01, 0.05)
    return Shape(groups=groups, ranks=ranks, until=until, microbatch_s=pace, again=0.0, **more)  # type: ignore[arg-type]


def run(seed: int, of: Shape, *faults: Fault) -> tuple[World, Outcome]:
    """A history to its end, in which nothing is broken and every fault struck."""
    worlds: list[World] = []
    init = World.__init__

    def watched(world: World, *given: object) -> None:
        init(world, *given)  # type: ignore[arg-type]
        worlds.append(world)

    World.__init__ = watched  # type: ignore[assignment]
    try:
        outcome = run_history(Plan(seed, of, faults))
    finally:
        World.__init__ = init  # type: ignore[method-assign]
    assert not outcome.invariant and outcome.finished, f"seed {seed}: {outcome.what or outcome.stopped}"
    assert outcome.faults == len(faults), f"seed {seed}: a fault did not strike"
    return worlds[0], outcome


def restarted(world: World) -> list[str]:
    return [name for name, number in world.incarnations.items() if number > 1]


# ---------------------------------------------------------------- what a fault may cost


@widths
def test_without_faults_there_is_one_epoch(ranks: int) -> None:
    for seed in range(4):
        world, outcome = run(seed, shape(ranks=ranks))
        assert len(world.checkers.lives) == 1 and world.checkers.newest.epoch.number == 1 and not outcome.adopted
        assert outcome.commits == 12 * 3 * ranks


@widths
def test_groups_that_were_resumed_at_different_steps_end_with_one_state(ranks: int) -> None:
    for seed in range(4):
        world, outcome = run(seed, shape(ranks=ranks, until=80, resumed=(5, 7, 7), unlike=1))
        (life,) = world.checkers.lives
        assert sorted(life.final) == list(range(6, 80)) and life.final[6].bits == -7, f"seed {seed}"
        assert world.checkpoints.begun_from == 1 and {g.ranks[0].step for g in world.groups.values()} == {80}
        assert ranks * 2 * 73 < outcome.commits < ranks * 3 * 73, (
            "the third follows from the boundary that it healed at"
        )


def test_a_job_that_broke_off_is_begun_anew_from_the_last_checkpoint_that_anybody_has() -> None:
    """All die at once, twice; each time the one that led has saved every final step."""
    for seed in range(6):
        deaths = [Fault("kill_group", at_s, pick=pick) for at_s in (1.2, 4.5) for pick in (0, 1, 1)]
        world, _ = run(seed, shape(until=80, saves=1, restart_s=(1.0, 1.2)), *deaths)
        lives = world.checkers.lives
        assert len(lives) == 3 and world.checkpoints.begun_from == 2, f"seed {seed}"
        for before, after in pairwise(lives):
            assert min(after.final) == max(before.final), f"seed {seed}: a final step is done anew, or one is left out"
            assert after.final[min(after.final)].bits == before.final[max(before.final)].bits, f"seed {seed}"


@widths
def test_failed_reduces_cost_nobody_its_membership(ranks: int) -> None:
    epochs = adopted = 0
    for seed in range(12):
        world, outcome = run(seed, shape(ranks=ranks), *[Fault("fail_reduces", 0.9 + 0.3 * i) for i in range(2)])
        assert not restarted(world), f"seed {seed}"
        epochs, adopted = epochs + world.checkers.newest.epoch.number - 1, adopted + outcome.adopted
    assert epochs > 6 and adopted > 2, "the faults must have cost epochs, and some must have missed an entry"


def test_broken_streams_cost_nothing_at_all() -> None:
    for seed in range(8):
        faults = [Fault("break_stream", 0.8 + 0.2 * i, pick=i) for i in range(4)]
        world, outcome = run(seed, shape(until=20), *faults)
        assert world.checkers.newest.epoch.number == 1 and not outcome.adopted, f"seed {seed}"


def test_a_cut_control_link_costs_nothing_at_all() -> None:
    """Five leases long: nobody is left out, since nobody waits."""
    for seed in range(4):
        world, _ = run(seed, shape(until=80), Fault("cut_control", 1.0, length_s=10.0, pick=1))
        assert world.checkers.newest.epoch.number == 1, f"seed {seed}"


@pytest.mark.parametrize("kind", ["freeze_lighthouse", "suspend_lighthouse", "restart_lighthouse", "lose_log"])
def test_a_lighthouse_that_is_away_costs_nothing_at_all(kind: str) -> None:
    for seed in range(4):
        world, _ = run(seed, shape(until=40), Fault(kind, 1.0, length_s=3.0))
        assert world.checkers.newest.epoch.number == 1 and not restarted(world), f"seed {seed}"


def test_a_killed_rank_costs_its_group_alone_and_it_comes_back() -> None:
    for seed in range(6):
        world, _ = run(seed, shape(until=200), Fault("kill_rank", 1.5, pick=seed))
        assert len(restarted(world)) == 1, f"seed {seed}"
        assert {g.incarnation for g in world.groups.values()} == {m.incarnation for m in world.checkers.newest.members}


def test_a_group_that_leaves_exits_well_and_the_others_lose_no_step() -> None:
    for seed in range(6):
        world, outcome = run(seed, shape(until=30, groups=4), Fault("leave", 1.5, pick=seed))
        assert len(world.checkers.newest.members) == 3 and world.checkers.newest.epoch.number == 2
        assert not outcome.adopted


def test_by_the_rules_of_a_large_job_a_frozen_member_is_asked_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = []
    ask = m.Ask.__init__
    monkeypatch.setattr(m.Ask, "__init__", lambda message: asks.append(ask(message)))
    lost = 0
    for seed in range(6):
        fault = Fault("freeze_manager", 1.5, length_s=4.0, pick=seed)
        world, _ = run(seed, shape(until=60, times=100), fault, Fault("kill_rank", 2.0, pick=seed + 1))
        lost += len(restarted(world))
    assert len(asks) > 10 and lost >= 6


# ---------------------------------------------------------------- by script


class Script:
    """A job some steps in, driven from here. Slow ones compute for a second, and nobody reduces meanwhile."""

    def __init__(self, slow: bool = True, **more: int) -> None:
        self.world = World(3, shape(slow=slow, **more))
        self.until(lambda: all(r.step == 2 and r.phase == "compute" for r in self.ranks))

    @property
    def ranks(self) -> list:
        return [rank for group in self.world.groups.values() for rank in group.ranks if rank.alive]

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        limit = self.world.clock.now + seconds
        while not condition():
            assert self.world.clock.now < limit and self.world.clock.step(), "it did not happen"

    def to_the_end(self) -> World:
        assert self.world.run(200.0), {name: (g.alive, g.reason) for name, g in self.world.groups.items()}
        assert self.world.done and not self.world.stopped
        return self.world

    def promised(self, number: int) -> bool:
        return all(group.machine.promised >= number for group in members(self.world))


def test_the_lighthouse_dies_in_a_recovery_that_a_death_began() -> None:
    """Both survivors have promised epoch 2 while they computed: nobody reduces, nobody stands, nobody reports."""
    script = Script()
    lighthouse = script.world.lighthouses[0]
    script.world.groups["g2"].ranks[0].die(-9)
    script.until(lambda: not script.world.groups["g2"].alive and script.promised(2))
    assert lighthouse.disk.history.membership.epoch.number == 1, "not activated yet"
    lighthouse.stop()
    lighthouse.start(keep=True)
    assert script.to_the_end().checkers.newest.epoch.number >= 3


def test_the_lighthouse_dies_between_logging_an_activation_and_sending_it() -> None:
    script = Script()
    lighthouse = script.world.lighthouses[0]
    script.world.groups["g2"].ranks[0].die(-9)
    script.until(lambda: lighthouse.disk.history.membership.epoch.number == 2)
    for stream in lighthouse.streams.values():
        stream.down.broken = True
    lighthouse.stop()
    lighthouse.start(keep=True)
    assert script.to_the_end().checkers.newest.epoch.number >= 3


def test_an_empty_disk_prepares_above_what_was_promised() -> None:
    """Epochs 2 to 4 were promised and never in force; a lighthouse that only hears of epoch 1 must not ask for 2."""
    script = Script()
    world, lighthouse = script.world, script.world.lighthouses[0]
    world.groups["g2"].freeze(1.5)  # it promises nothing for a while
    first = world.groups["g0"]
    lighthouse.take(first.stream, m.Failed(first.machine.known.epoch, 2, "injected"))
    others = (world.groups["g0"], world.groups["g1"])
    for number in (2, 3, 4):  # a broken stream and a return: the next numbers
        script.until(lambda n=number: all(g.machine.promised >= n for g in others))
        if number < 4:
            first.stream.break_it()
    assert lighthouse.disk.history.membership.epoch.number == 1
    lighthouse.stop()
    lighthouse.start(keep=False)
    script.until(lambda: all(g.stream is not None and g.stream.at_lighthouse for g in world.groups.values()))
    lighthouse.take(first.stream, m.Failed(first.machine.known.epoch, 2, "injected"))
    newest = script.to_the_end().checkers.newest
    assert newest.epoch.number > 4 and newest.epoch.term.lighthouse == lighthouse.disk.lighthouse


def test_two_lighthouses_cut_apart_do_not_split_a_job() -> None:
    """{A, g0} from {B, g1, g2}: A reigns by its log and goes on with g0; the others wait, and come back as joiners."""
    script = Script(lighthouses=2, until=60)
    world = script.world
    for a in ("lh0", "g0"):
        for b in ("lh1", "g1", "g2"):
            world.network.cut(a, b, 12.0)
            world.network.cut(b, a, 12.0)
    committed: dict[str, set[str]] = {}
    while world.clock.now < 14.0:
        world.clock.step()
        for group in world.groups.values():
            if group.alive and group.ranks[0].step > 5:
                committed.setdefault(group.group, set()).add(group.incarnation)
    assert len(world.checkers.lives) == 1
    script.to_the_end()
    assert len(world.checkers.lives) == 1 and world.checkers.newest.groups
