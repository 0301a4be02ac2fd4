"""Every checker of entries and shares can fail: shown what it must not let pass, and something that it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from checkerbench import E1, E2, Bench, breaks, membership

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated, Note
from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.names import Entry, Epoch, Term, origin
from lightkeeper.lighthouse.recovery import Recovery
from lightkeeper.simulator.collectives import Net
from lightkeeper.simulator.history import Plan, run_history
from lightkeeper.simulator.shape import Shape
from lightkeeper.simulator.state import START, Part, State
from lightkeeper.simulator.world import World

# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("steps", [19, 20])
def test_shares_change_seldom(bench: Bench, steps: int) -> None:
    e3 = Epoch(3, Term(1, "lh"))
    bench.checkers._in_force(membership(E2, "g0", "g1", base=E1, speeds=(1000, 500)))
    bench.checkers._in_force(membership(e3, "g0", "g1", base=E2))
    life = bench.checkers.lives[-1]
    names = {0: E1, 1: E2, 1 + steps: e3}
    epoch, state = E1, START
    for step in range(steps + 1):
        epoch = names.get(step, epoch)
        state = bench.sums.apply(state, bench.entry(step, epoch, base=state))
        bench.checkers._final(life, state)
    state = bench.sums.apply(state, bench.entry(steps + 1, e3, base=state))
    if steps < 20:
        with breaks("shares"):
            bench.checkers._final(life, state)
    else:
        bench.checkers._final(life, state)
    assert bench.checkers.dealt_anew == 2


@pytest.mark.parametrize("speeds", [(1000, 0), (0, 0)])
def test_as_many_work_as_are_to(bench: Bench, speeds: tuple[int, ...]) -> None:
    with breaks("A1"):
        bench.checkers._in_force(membership(E2, "g0", "g1", base=E1, speeds=speeds))


@pytest.mark.parametrize(("speeds", "breaks_it"), [((1000, 0), False), ((0, 1000), True)])
def test_who_works_goes_on_working(speeds: tuple[int, ...], breaks_it: bool) -> None:
    bench = Bench(Shape(groups=2, spares=1, microbatches=2, until=4), speeds=(1000, 0))
    after = membership(E2, "g0", "g1", base=E1, speeds=speeds)
    if breaks_it:
        with breaks("A2"):
            bench.checkers._in_force(after)
    else:
        bench.checkers._in_force(after)


def test_a_group_that_was_set_up_as_a_spare_may_make_way() -> None:
    bench = Bench(Shape(groups=2, spares=1, last_to_work=1, microbatches=2, until=4), speeds=(1000, 0))
    bench.checkers._in_force(membership(E2, "g0", "g1", base=E1, speeds=(0, 1000)))


def test_who_comes_or_goes_is_no_change_of_shares(bench: Bench) -> None:
    bench.checkers._in_force(membership(E2, "g0", base=E1))
    life = bench.checkers.lives[-1]
    first = bench.state(bench.entry(0))
    bench.checkers._final(life, first)
    bench.checkers._final(life, bench.sums.apply(first, bench.entry(1, E2, base=first)))
    assert not bench.checkers.dealt_anew


# ---------------------------------------------------------------- entries


def test_i1_a_step_is_final_with_one_entry(bench: Bench) -> None:
    one, other = bench.state(bench.entry(0)), bench.state(bench.entry(0, serial=77))
    bench.reduces(E1, 1, one, one)
    bench.reduces(E1, 1, one, one)
    with breaks("I1"):
        bench.reduces(E1, 1, other, other)


def test_i1_later_entries_follow_the_final_ones(bench: Bench) -> None:
    bench.reduces(E1, 1, *[bench.state(bench.entry(0))] * 2)
    strange = bench.state(bench.entry(0, serial=77), bench.entry(1))
    with breaks("I1"):
        bench.reduces(E1, 2, strange, strange)


def test_i1_members_of_an_epoch_commit_one_entry(bench: Bench) -> None:
    bench.checkers.committed(bench.rank("g0", 0, START), bench.entry(0), START)
    with breaks("I1"):
        bench.checkers.committed(bench.rank("g1", 0, START), bench.entry(0, E2, serial=2), START)


def test_i1_a_run_ends_only_with_a_final_step(bench: Bench) -> None:
    states = [bench.entry(step) for step in range(4)]
    end = bench.state(*states)
    with breaks("I1"):
        bench.checkers.finished(bench.rank("g0", 4, end))
    bench.reduces(E1, 4, end, end)
    bench.checkers.finished(bench.rank("g0", 4, end))
    with breaks("I4"):
        bench.checkers.finished(bench.rank("g0", 4, bench.state(*states[:3], bench.entry(3, serial=88))))


def test_i1_a_job_that_started_anew_is_the_only_one(bench: Bench) -> None:
    bench.reduces(E1, 0, START, START)
    bench.checkers._in_force(membership(E2, "g0", "g1"))
    bench.reduces(E2, 0, START, START)
    with breaks("I1"):
        bench.reduces(E1, 0, START, START)


def test_i1_a_job_begins_anew_only_when_no_member_of_the_one_before_lives(bench: Bench) -> None:
    bench.reduces(E1, 0, START, START)
    process = bench.world.groups["g0"]
    process.machine.known = bench.checkers.newest
    with breaks("I1"):
        bench.checkers._in_force(membership(E2, "g0", "g1"))
    process.machine.died = m.Died("rank 0 was killed by SIGKILL", 0, "reduce", 0)
    bench.checkers._in_force(membership(E2, "g0", "g1"))


def saves(bench: Bench, group: str, state: State) -> None:
    """A rank of a group saves its state as the job ends."""
    machine = SimpleNamespace(known=bench.checkers._in_epoch[E1])
    process = SimpleNamespace(incarnation=f"{group}-i1", machine=machine)
    rank: Any = SimpleNamespace(name=f"{group}/0", state=state, group=process)
    bench.checkers.kept(rank)


def given_up(bench: Bench, **steps: int) -> None:
    """A lighthouse ends the job below its minimum, after promises of these steps."""
    machine = bench.lighthouse.machine
    machine.newest = bench.checkers.newest
    machine.recovery = Recovery(E2, "g1 was lost", 0.0, frozenset(steps))
    machine.recovery.promises.update(
        {g: m.Promise(E2, last=Entry(E1, s) if s >= 0 else None) for g, s in steps.items()}
    )
    note = Note("job_stopped", {"reason": "quorum lost: g1 lost", "ok": False, "keep": "g0"})
    bench.checkers.noted(bench.lighthouse, note)


def test_e1_what_is_kept_has_every_final_step(bench: Bench) -> None:
    first, second = bench.entry(0), bench.entry(1)
    bench.reduces(E1, 0, START, START)
    bench.reduces(E1, 1, bench.state(first), bench.state(first))
    with breaks("E1"):
        saves(bench, "g0", START)
    with breaks("E1"):
        saves(bench, "g0", bench.state(bench.entry(0, serial=7)))
    saves(bench, "g0", bench.state(first, second))
    saves(bench, "g0", bench.state(first, second))  # another rank of it
    with breaks("E1"):
        saves(bench, "g1", bench.state(first, second))


def test_e1_a_job_that_was_ended_goes_on_nowhere_and_the_newest_step_that_was_promised_is_kept(bench: Bench) -> None:
    first = bench.entry(0)
    bench.reduces(E1, 0, START, START)
    given_up(bench, g0=0, g1=-1)
    with breaks("E1"):
        saves(bench, "g1", START)
    saves(bench, "g0", bench.state(first))
    bench.reduces(E1, 1, bench.state(first), bench.state(first))
    both = bench.state(first, bench.entry(1))
    with breaks("E1"):
        bench.reduces(E1, 2, both, both)


def test_e1_a_job_is_not_ended_before_a_step_that_is_final_nor_kept_once_another_has_begun(bench: Bench) -> None:
    first = bench.entry(0)
    bench.reduces(E1, 0, START, START)
    bench.reduces(E1, 1, bench.state(first), bench.state(first))
    with breaks("E1"):
        given_up(bench, g0=-1)
    given_up(bench, g0=0)
    bench.world.groups["g0"].machine.known = bench.checkers.newest
    bench.checkers._in_force(membership(E2, "g0", "g1"))  # though g0 lives: all that promised are in no epoch any more
    with breaks("E1"):
        saves(bench, "g0", bench.state(first))


def begins(bench: Bench, *members: str, **held: Entry | None) -> None:
    """A lighthouse logs a first epoch, after these groups have promised with this newest entry."""
    for name, last in held.items():
        bench.world.start_group(name)
        process = bench.world.groups[name]
        group = bench.lighthouse.machine.groups[name] = Group(name, process.incarnation, 0.0, connection=1)
        group.join = m.Join(())
        stream: Any = SimpleNamespace(process=process)
        bench.checkers.hears(bench.lighthouse, stream, m.Promise(E2, last=last))
    bench.checkers.logged(bench.lighthouse, Activated(membership(E2, *members)))


@pytest.mark.parametrize(
    ("g0", "g1", "right"),
    [
        (origin(7), None, "g0"),
        (origin(5), origin(7), "g1"),
        (Entry(E1, 7), origin(8), "g0"),
        (Entry(E1, 7), origin(9), "g1"),
        (Entry(E1, 7), Entry(E1, 6), "g0"),
    ],
)
def test_w11_those_begin_that_are_furthest_on(bench: Bench, g0: Entry, g1: Entry | None, right: str) -> None:
    for wrong in (("g0", "g1"), ("g1",) if right == "g0" else ("g0",)):
        with breaks("W11"):
            begins(Bench(), *wrong, g0=g0, g1=g1)
    begins(bench, right, g0=g0, g1=g1)


def test_w11_who_was_not_asked_may_be_furthest_on(bench: Bench) -> None:
    """Its join says less than its manager knows."""
    bench.world.start_group("g1")
    process = bench.world.groups["g1"]
    group = bench.lighthouse.machine.groups["g1"] = Group("g1", process.incarnation, 0.0, connection=1)
    group.join, process.machine.last = m.Join(()), origin(7)
    with breaks("W11"):
        begins(bench, "g0", g0=origin(5))


def test_i4_members_reduce_on_the_same_bits(bench: Bench) -> None:
    with breaks("I4"):
        bench.reduces(E1, 1, bench.state(bench.entry(0)), bench.state(bench.entry(0, serial=77)))


@pytest.mark.parametrize("shares", [((0, 1), (1,)), ((0,), ()), ((0, 1), (2,))])
def test_i5_every_microbatch_exactly_once(bench: Bench, shares: tuple[tuple[int, ...], ...]) -> None:
    with breaks("I5"):
        bench.reduces(E1, 0, START, START, shares)


def test_i5_an_incomplete_sum_is_not_committed(bench: Bench) -> None:
    with breaks("I5"):
        bench.checkers.committed(bench.rank("g0", 0, START), bench.entry(0, again=True), START)


def test_i8_an_entry_is_applied_on_the_state_that_it_follows(bench: Bench) -> None:
    before = bench.state(bench.entry(0))
    with breaks("I8"):
        bench.checkers.committed(bench.rank("g0", 1, before), bench.entry(1, base=START), before)


def test_i8_a_name_stands_for_one_sum(bench: Bench) -> None:
    bench.checkers.committed(bench.rank("g0", 0, START), bench.entry(0), START)
    with breaks("I8"):
        bench.checkers.committed(bench.rank("g1", 0, START), bench.entry(0, serial=2), START)


def test_i8_a_member_does_not_take_a_state(bench: Bench) -> None:
    with breaks("I8"):
        bench.checkers.overwrites(bench.rank("g0", 0, START))


def test_s7_all_compute_with_the_before_extras_that_the_entry_holds(bench: Bench) -> None:
    net = Net(bench.world, E1, ("g0", "g1"))
    net.formed = True
    net.put("g0", (0, 0, 0), Part((0,), 0, False, START, before=5, used=frozenset({5})), lambda total, who: None)
    with breaks("S7"):
        net.put("g1", (0, 0, 0), Part((1,), 0, False, START, before=5, used=frozenset({4})), lambda total, who: None)


def test_p1_no_reduce_in_a_group_that_is_not_formed(bench: Bench) -> None:
    net = Net(bench.world, E1, ("g0", "g1"))
    with breaks("P1"):
        net.put("g0", (0, 0, 0), Part((0,), 0, False, START), lambda total, who: None)


def test_i7_one_group_without_faults_sums_every_step_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[World] = []
    monkeypatch.setattr("lightkeeper.simulator.history.Liveness", lambda world, faults: worlds.append(world))
    outcome = run_history(Plan(1, Shape(groups=1, microbatches=3, until=20, again=0.0), ()))
    assert outcome.finished and not outcome.invariant
    (life,) = worlds[0].checkers.lives
    assert list(life.final) == [-1, *range(20)] and [state.bits for state in life.final.values()] == list(range(21))
