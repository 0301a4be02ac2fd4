"""SIGKILL, and exit, of one group of three in every phase of a step."""

from __future__ import annotations

import pytest
from harness import Job, names

from lightkeeper.events import schema
from lightkeeper.events.lineage import lineage

STEPS, AT = 10, 5
LIVE = {"g0", "g1"}
KILLS = [("kill", phase) for phase in ("compute", "reduce", "vote", "apply")]
OTHERS = [(kind, phase) for kind in ("kill-tree", "exit") for phase in ("compute", "reduce")]


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse("--lease-s", "5")


@pytest.mark.parametrize(("kind", "phase"), KILLS + OTHERS)  # what differs by kind is who notices
def test_one_of_three_dies(job: Job, gold, kind: str, phase: str) -> None:
    job.start_all(3, fault=f"{kind}:g2:{phase}:{AT}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": 1 if kind == "exit" else -9})
    fault = facts.fault(kind, phase, "g2", AT)

    assert facts.lost.keys() == {"g2"}
    lost = facts.lost["g2"]
    assert lost.incarnation == fault.incarnation
    if kind == "kill-tree":
        assert lost.detected_by == "stream"
    else:
        assert lost.detected_by == "manager" and lost.phase == phase and lost.step == AT
        assert {"kill": "SIGKILL", "exit": "exited 1"}[kind] in lost.cause

    # A survivor may report the failed reduce before the death is known: then an epoch with all three is begun in vain.
    assert facts.members[0] == ("g0", "g1", "g2") and facts.members[-1] == ("g0", "g1")
    assert len(facts.epochs) == 2 or (len(facts.epochs) == 3 and facts.members[1] == facts.members[0])
    first_step = facts.epochs[-1].first_step
    committed_in = lineage(facts.events).epoch_of
    assert committed_in[first_step][0] == facts.epochs[-1].epoch and committed_in[first_step - 1][0] == 1
    if phase in ("compute", "reduce"):  # the step itself was saved: its orphans were computed by the others
        assert first_step == AT
        further = [k for r in facts.all(schema.Recovered, step=AT) for k in r.further]
        assert sorted(further) == [4, 5] and max(facts.commits("g2")) == AT - 1
    else:  # g2's part was in the entry: whoever has the entry keeps it
        assert first_step in (AT, AT + 1)
    facts.near(gold(steps=STEPS), "g0")


@pytest.mark.parametrize("first", ["g0", "g1"])
def test_the_group_of_any_slot_may_die(job: Job, first: str) -> None:
    """Slot 0 holds the rendezvous keys and leads; slot 1 is in the middle of every ring."""
    job.start_all(3, fault=f"kill:{first}:reduce:{AT}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, set(names(3)) - {first}, {first: -9})
    facts.fault("kill", "reduce", first, AT)
    assert facts.lost.keys() == {first}
    assert facts.members[-1] == tuple(g for g in names(3) if g != first)


def test_two_die_one_after_the_other_and_one_is_left(job: Job, gold) -> None:
    job.start_all(3, fault=f"kill:g2:reduce:3,kill:g0:reduce:{AT}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, {"g1"}, {"g0": -9, "g2": -9})
    assert list(dict.fromkeys(facts.members)) == [("g0", "g1", "g2"), ("g0", "g1"), ("g1",)]
    assert len(facts.all(schema.FaultInjected)) == 2
    assert facts.lost.keys() == {"g0", "g2"}
    facts.near(gold(steps=STEPS), "g1")


def test_two_die_in_the_same_step(job: Job, gold) -> None:
    job.start_all(4, fault=f"kill:g2:reduce:{AT},kill:g3:compute:{AT}", steps=STEPS, microbatches=8)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9, "g3": -9})
    assert facts.lost.keys() == {"g2", "g3"} and facts.members[-1] == ("g0", "g1")
    facts.near(gold(steps=STEPS, microbatches=8), "g1")


def test_one_dies_while_the_others_recover(job: Job, gold) -> None:
    """The recovery is begun anew with a higher number; what was dealt for the one that never ran is dealt again."""
    job.start_all(4, fault=f"kill:g2:reduce:{AT},kill:g3:recover:{AT}", steps=STEPS, microbatches=8)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9, "g3": -9})
    assert {(f.group, f.phase) for f in facts.all(schema.FaultInjected)} == {("g2", "reduce"), ("g3", "recover")}
    assert list(dict.fromkeys(facts.members)) == [("g0", "g1", "g2", "g3"), ("g0", "g1", "g3"), ("g0", "g1")]
    facts.near(gold(steps=STEPS, microbatches=8), "g0")


@pytest.mark.parametrize("phase", ["compute", "reduce", "vote", "closing"])
def test_one_dies_in_the_last_step(job: Job, phase: str) -> None:
    at = STEPS if phase == "closing" else STEPS - 1
    job.start_all(3, fault=f"kill:g2:{phase}:{at}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9})
    facts.fault("kill", phase, "g2", at)


@pytest.mark.parametrize("phase", ["compute", "reduce", "vote"])
def test_one_dies_in_the_first_step(job: Job, phase: str) -> None:
    job.start_all(3, fault=f"kill:g2:{phase}:0", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9})
    facts.fault("kill", phase, "g2", 0)


def test_one_of_two_dies(job: Job, gold) -> None:
    job.start_all(2, fault=f"kill:g0:reduce:{AT}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, {"g1"}, {"g0": -9})
    facts.fault("kill", "reduce", "g0", AT)
    facts.near(gold(steps=STEPS), "g1")


def test_the_loop_without_generators_survives_too(job: Job, gold) -> None:
    job.start_all(3, fault=f"kill:g2:reduce:{AT}", steps=STEPS, loop="plain_calls")
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9})
    facts.fault("kill", "reduce", "g2", AT)
    facts.near(gold(steps=STEPS), "g0")


def test_extras_stay_whole_over_a_death(job: Job) -> None:
    job.start_all(3, fault="kill:g2:reduce:2", steps=4, loop="with_extras", microbatches=7)
    facts = job.finish()
    facts.check(4, LIVE, {"g2": -9})
    told = [facts.traces[group].all("extras") for group in sorted(LIVE)]
    assert told[0] == told[1] and len(told[0]) == 4
    for _, reduced, _ in told[0]:
        assert reduced["load"] == [21.0 + 7 * i for i in range(5)] and reduced["tokens"] == 7 * 2**40 + 21
