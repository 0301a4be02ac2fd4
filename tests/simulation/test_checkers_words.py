"""Every checker of words, blame and waiting can fail: shown what it must not let pass, and something that it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from checkerbench import E1, E2, SHAPE, Bench, breaks, membership

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Note
from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.names import Membership, Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import Tell, ToRanks
from lightkeeper.simulator.history import Plan, run_history
from lightkeeper.simulator.shape import Shape
from lightkeeper.simulator.state import START

# ---------------------------------------------------------------- names


def obeys(promised: int = 0, known: Membership | None = None, acknowledged: Term | None = None) -> Any:
    machine = SimpleNamespace(promised=promised, known=known, acknowledged=acknowledged)
    return SimpleNamespace(incarnation="g0-i1", machine=machine)


def test_i3_promises_epochs_and_terms_only_rise(bench: Bench) -> None:
    later = membership(E2, "g0", base=E1)
    bench.checkers.obeyed(obeys(5, later, Term(3, "lh")))
    for lower in (obeys(4, later, Term(3, "lh")), obeys(5, later, Term(2, "lh")), obeys(5, later, None)):
        with breaks("I3"):
            bench.checkers.obeyed(lower)
    with breaks("I3"):
        bench.checkers.obeyed(obeys(5, membership(E1, "g0"), Term(3, "lh")))


def test_i3_an_epoch_means_one_membership_and_a_term_one_reign(bench: Bench) -> None:
    bench.checkers.obeyed(obeys(5, membership(E2, "g0", base=E1)))
    with breaks("I3"):
        bench.checkers.obeyed(
            SimpleNamespace(incarnation="g1-i1", machine=obeys(5, membership(E2, "g1", base=E1)).machine)
        )
    with breaks("I3"):
        bench.checkers.reigns(bench.lighthouse.machine.term)


@pytest.mark.parametrize("message", [m.Prepare(E1), m.Prepare(E2), m.Activate(membership(E2, "g0"), 0, 2, ())])
def test_i3_what_is_lower_or_repeated_has_no_effect(bench: Bench, message: m.ToManager) -> None:
    bench.checkers.obeyed(obeys(2, membership(E2, "g0", base=E1)))
    process: Any = SimpleNamespace(incarnation="g0-i1")
    bench.checkers.received(process, message, [Tell(m.Query(E2))])
    for effect in (ToRanks(local.Abort(below=2, reason="over")), Tell(m.Promise(E2, None, (), None, (), 2))):
        with breaks("I3"):
            bench.checkers.received(process, message, [effect])


def test_i3_what_is_higher_has_an_effect_and_what_an_old_term_says_has_none(bench: Bench) -> None:
    process: Any = SimpleNamespace(incarnation="g0-i1")
    known = membership(E1, "g0", "g1")
    bench.checkers.obeyed(obeys(1, known))
    effect = [ToRanks(local.Abort(below=2, reason="over"))]
    bench.checkers.received(process, m.Prepare(E2), effect)
    bench.checkers.obeyed(obeys(1, known, Term(2, "lh")))
    with breaks("I3"):
        bench.checkers.received(process, m.Prepare(E2), effect)


def test_i3_nobody_reduces_in_an_epoch_that_was_never_activated(bench: Bench) -> None:
    with breaks("I3"):
        bench.reduces(E2, 0, START, START)


# ---------------------------------------------------------------- the lighthouse


@pytest.mark.parametrize(
    "message",
    [m.Prepare(E2), m.Activate(membership(E2, "g0"), 0, 2, ()), m.Welcome(Term(9, "lh0.1"), 2000, 200)],
    ids=lambda message: type(message).__name__,
)
def test_what_is_spoken_of_is_logged(bench: Bench, message: m.ToManager) -> None:
    bench.lighthouse.disk.history = JobHistory(1, membership(E1, "g0", "g1"))
    with breaks("log"):
        bench.checkers.spoken(bench.lighthouse, message)
    bench.lighthouse.disk.history = JobHistory(2, membership(E2, "g0"))
    bench.lighthouse.disk.number = 9
    bench.checkers.spoken(bench.lighthouse, message)


def lost(detected_by: str) -> Note:
    return Note("group_lost", {"group": "g0", "incarnation": "g0-i1", "detected_by": detected_by})


def test_nobody_is_blamed_for_what_is_not_so(bench: Bench) -> None:
    world, lighthouse = bench.world, bench.lighthouse
    world.clock.now = 50.0
    lighthouse.heard["g0-i1"] = 49.0
    with breaks("blame"):
        bench.checkers.noted(lighthouse, lost("lease"))
    with breaks("blame"):
        bench.checkers.noted(lighthouse, lost("frozen"))
    lighthouse.heard["g0-i1"] = 40.0
    bench.checkers.noted(lighthouse, lost("lease"))  # of an epoch that this lighthouse does not know
    world.groups["g0"].ranks[0].freeze(5.0)
    bench.checkers.noted(lighthouse, lost("frozen"))


def test_nobody_is_left_out_for_silence_for_whom_nobody_waits(bench: Bench) -> None:
    world, lighthouse = bench.world, bench.lighthouse
    machine = lighthouse.machine
    machine.newest = membership(E1, "g0", "g1")
    machine.groups = {name: Group(name, f"{name}-i1", 0.0) for name in ("g0", "g1")}
    world.clock.now = 50.0
    bench.checkers.looks(lighthouse)
    with breaks("blame"):
        bench.checkers.noted(lighthouse, lost("lease"))
    stream: Any = SimpleNamespace(process=SimpleNamespace(incarnation="g1-i1"))
    for waiting_ms, lease in ((100, False), (2000, True)):
        bench.checkers.hears(lighthouse, stream, m.Beat(1, 3, "reduce", waiting_ms, 0))
        if lease:
            bench.checkers.noted(lighthouse, lost("lease"))
        else:
            with breaks("blame"):
                bench.checkers.noted(lighthouse, lost("lease"))
    bench.checkers.hears(lighthouse, stream, m.Beat(1, 3, "compute", 0, 0))
    machine.groups["g1"].failed = m.Failed(E1, 3, "connection closed by peer")
    bench.checkers.looks(lighthouse)
    bench.checkers.noted(lighthouse, lost("lease"))  # the epoch is over


def test_nobody_is_left_out_for_lagging_who_does_not(bench: Bench) -> None:
    machine = bench.world.groups["g0"].machine
    bench.lighthouse.machine.activation = m.Activate(membership(E2, "g1", base=E1), 5, 2, ())
    fenced = Note("fenced", {"group": "g0", "incarnation": "g0-i1", "reason": "it lags by more than one entry"})
    machine.step = 3
    bench.checkers.noted(bench.lighthouse, fenced)
    machine.step = 4
    with breaks("blame"):
        bench.checkers.noted(bench.lighthouse, fenced)


def test_a_contradiction_breaks_the_history(bench: Bench) -> None:
    with breaks("I1"):
        bench.checkers.noted(
            bench.lighthouse, Note("job_stopped", {"reason": "the job contradicts itself and must not go on: two"})
        )


# ---------------------------------------------------------------- time


def test_i2_who_was_left_out_ends_once_it_can_know(bench: Bench) -> None:
    world = bench.world
    while world.groups["g0"].stream is None or not world.groups["g0"].stream.at_lighthouse:
        world.clock.step()
    bench.checkers.noted(bench.lighthouse, Note("fenced", {"incarnation": "g0-i1"}))
    bench.checkers.waits()
    world.clock.now += 60.0
    with breaks("I2"):
        bench.checkers.waits()


def test_i6_nothing_waits_without_a_bound(bench: Bench) -> None:
    world = bench.world
    bench.checkers.waits()
    world.clock.now += 10 * SHAPE.budget_s + 10
    with breaks("I6"):
        bench.checkers.waits()


def test_liveness_a_job_in_which_nothing_is_wrong_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compute for ever, and say nothing of it: what stands is not excused."""
    quiet = Plan(1, Shape(groups=2, until=200, microbatch_s=(0.1, 0.2)), ())
    assert not run_history(quiet).invariant

    def computes(rank: Any) -> None:
        rank.enter("compute")
        rank.later(5.0, computes, rank)

    monkeypatch.setattr("lightkeeper.simulator.followers.Follower.begin", computes)
    outcome = run_history(quiet)
    assert outcome.invariant == "liveness" and "nothing is wrong" in outcome.what


def test_what_a_machine_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(machine: Any, now: float) -> list[Any]:
        raise KeyError("g7")

    monkeypatch.setattr("lightkeeper.lighthouse.machine.JobMachine.tick", raises)
    outcome = run_history(Plan(1, SHAPE, ()))
    assert outcome.invariant == "crash" and "KeyError" in outcome.what
