"""Spares take over in the step in which a group is lost; groups beyond that are parked, and end well with the job."""

from __future__ import annotations

from collections import Counter

from facts import Facts
from harness import Job

from lightkeeper.events import schema

AT = 5
STEPS = 150
LATE = 130


def shares(facts: Facts, group: str) -> dict[int, tuple[int, ...]]:
    """Step to the microbatches that the group put in."""
    return {step: commit.microbatches for step, commit in facts.commits(group).items()}


def led_once(facts: Facts, *survivors: str) -> None:
    """One group leads each step; the one that was lost may have led those before."""
    led = Counter(step for name in facts.traces for (step,) in facts.traces[name].all("leads"))
    assert set(led) == set(range(STEPS)) and max(led.values()) == 1
    assert {name for name in facts.traces if facts.traces[name].all("leads")} == set(survivors)


def test_a_spare_takes_over_in_that_step_and_who_returns_is_the_spare(job: Job, gold) -> None:
    """With gradients folded in the order of the microbatches, the bits are those of one process that lost nobody."""
    job.settings.update(groups=5, spares=1, deal="even")
    job.variables["LIGHTKEEPER_REDUCTION"] = "fold"
    job.start_healing(5, fault=f"kill:g0:reduce:{AT}", microbatches=8, delay=0.2)
    job.return_of("g0")
    job.await_rejoin("g0")
    facts = job.finish()
    codes = {"g0": -9, "g0-again": 0, **{f"g{i}": 0 for i in range(1, 5)}}
    facts.check_healed(STEPS, codes, {"g0"}, ("g0", "g1", "g2", "g3", "g4"))
    facts.fault("kill", "reduce", "g0", AT)
    first, recovery, back = facts.epochs
    assert (first.spares, recovery.spares, back.spares) == (("g4",), (), ("g0",))
    promoted = facts.one(schema.Promoted)
    assert (promoted.group, promoted.step) == ("g4", AT)
    worked = shares(facts, "g4")
    assert all(worked[step] == () for step in range(AT)) and all(worked[step] for step in range(AT, STEPS))
    assert worked[AT] == recovery.shares["g4"] == (0, 1), "the orphans of that step, and nothing of the others"
    assert not facts.all(schema.Healed, group="g4") and not facts.all(schema.Adopted, group="g4"), "nothing was moved"
    assert not facts.traces["g0-again"].forward and all(live for _, live, *_ in facts.traces["g4"].all("begins"))
    led_once(facts, "g0", "g1")
    plain = gold(steps=STEPS, warm_up=12, microbatches=8).digests
    for name in ("g1", "g4", "g0-again"):
        digests = facts.traces[name].digests
        assert digests == {step: plain[step] for step in digests} and max(digests) == STEPS - 1, name


def test_a_lone_spare_does_all_of_the_step(job: Job, gold) -> None:
    job.settings.update(groups=3, spares=1, deal="even")
    job.start_all(3, fault=f"kill:g0:reduce:{AT},kill:g1:reduce:{AT}", steps=12)
    facts = job.finish()
    facts.check(12, {"g2"}, {"g0": -9, "g1": -9})
    assert len(facts.all(schema.FaultInjected)) == 2 and facts.lost.keys() == {"g0", "g1"}
    assert facts.epochs[-1].members == ("g2",) and not facts.epochs[-1].spares
    assert sorted(shares(facts, "g2")[AT]) == list(range(6)), "all of its microbatches"
    facts.near(gold(steps=12), "g2")


def test_a_parked_group_costs_nothing_and_ends_well_with_the_job(job: Job, gold) -> None:
    job.settings.update(groups=3, spares=1, deal="even")
    job.start_healing(3, delay=0.2)
    job.wait_for(schema.Activated, process="lighthouse")
    job.start("g3", **job.heal_options)
    job.wait_for(schema.Parked, group="g3", within_s=60)
    shown = job.command("status", "--lighthouse", job.lighthouse).stdout
    assert "parked" in shown and "spare" in shown
    job.hurry()
    facts = job.finish()
    assert facts.codes == dict.fromkeys(("g0", "g1", "g2", "g3"), 0), facts.said["g3"]
    facts.check_whole(STEPS, {"g0", "g1", "g2"})
    assert facts.members == [("g0", "g1", "g2")] and not facts.lost
    assert "parked: 3 groups are here, the job has 2 + 1; joins when one is lost" in facts.said["g3"]
    assert not facts.all(schema.Healing) and not facts.all(schema.Copied)
    assert not facts.traces["g3"].digests and len(facts.traces["g3"].all("done")) == 1, "a loop of no steps"
    facts.near(gold(steps=STEPS, warm_up=12), "g2")


def test_a_parked_group_becomes_the_spare_after_a_loss_and_works_after_another(job: Job) -> None:
    job.settings.update(groups=3, spares=1, deal="even")
    steps = STEPS + 100  # slow ones: all come long before `LATE`, and g1 once more after it
    job.start_healing(3, fault=f"kill:g1:reduce:{AT},kill:g0:reduce:{LATE}", delay=0.1, steps=steps)
    job.wait_for(schema.Activated, 60, process="lighthouse")
    job.start("g3", **job.heal_options)
    job.wait_for(schema.Rejoined, group="g3", within_s=60)
    job.return_of("g1")
    job.wait_for(schema.Parked, 60, group="g1")
    job.await_rejoin("g1", within_s=120)  # g3 works now, and g1 takes the place of g0
    facts = job.finish()
    codes = {"g0": -9, "g1": -9, "g2": 0, "g3": 0, "g1-again": 0}
    facts.check_healed(steps, codes, {"g0", "g1"}, ("g1", "g2", "g3"))
    assert {(f.group, f.phase, f.step) for f in facts.all(schema.FaultInjected)} == {
        ("g1", "reduce", AT),
        ("g0", "reduce", LATE),
    }
    assert [(e.group, e.step) for e in facts.all(schema.Promoted)] == [("g2", AT), ("g3", LATE)]
    assert [e.spares for e in facts.epochs] == [("g2",), (), ("g3",), (), ("g1",)]
    worked = shares(facts, "g3")
    assert not any(worked[step] for step in worked if step < LATE) and all(worked[s] for s in range(LATE, steps))
