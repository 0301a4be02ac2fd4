"""What tests of a group that comes back have in common: the job, and what must hold of its return."""

from __future__ import annotations

from facts import Facts

from lightkeeper.events import schema

AT = 5
STEPS = 150
ALL = ("g0", "g1", "g2")
KILL_G2 = f"kill:g2:compute:{AT}"
PATIENT = ("--lease-s", "5")


def rejoined(facts: Facts, name: str) -> int:
    """The step from which this trainer's group was a member; what it did before is what a joiner does."""
    pid = facts.pids[name]
    step = facts.one(schema.Rejoined, pid=pid).step
    trace = facts.traces[name]
    begun = {index: live for index, live, _, _ in trace.all("begins")}
    healed = facts.all(schema.Healed, pid=pid)[-1].step
    assert healed == min(trace.digests) and step > healed
    assert all(live == (index >= step) for index, live in begun.items()), "live from the rejoin on, and only then"
    assert not [k for s, k in trace.forward if s <= step], "no share before, nor in the first step"
    assert [k for s, k in trace.forward if s == step + 1], "a share from the second step on"
    assert step < facts.one_lineage_end() - 5
    return step


def recoveries(facts: Facts) -> list[schema.Activated]:
    return [e for e in facts.epochs if e.cause != "planned"][1:]
