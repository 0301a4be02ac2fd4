"""A rank that lives and makes no progress: found by its manager, left out once others stand, named with its phase."""

from __future__ import annotations

import pytest
from facts import Facts
from harness import Job

from lightkeeper.events import schema
from lightkeeper.events.of_progress import Armed, Quarantined, Slow, Stuck
from lightkeeper.events.reader import seconds_between
from lightkeeper.events.summary import samples_exactly_once

STEPS, AT, FLOOR_S = 12, 6, 4.0
LIVE = {"g0", "g1"}


def stuck(facts: Facts, fault: schema.FaultInjected) -> Stuck:
    """What must be so whoever is stuck: said, left out for it, named, and nobody else."""
    (said,) = facts.all(Stuck)
    assert (said.group, said.rank, said.phase, said.step) == ("g2", 0, fault.phase, AT)
    assert said.since_s > said.deadline_s >= FLOOR_S and said.how.startswith("learnt from ")
    lost = facts.lost["g2"]
    assert facts.lost.keys() == {"g2"} and (lost.detected_by, lost.rank, lost.phase) == ("progress", 0, fault.phase)
    assert "lives and has made no progress" in lost.cause
    assert seconds_between(fault, lost) >= FLOOR_S - 0.2, "so long is borne"
    assert "ends with exit code 104: left out of the job: rank 0 lives and has made no progress" in facts.said["g2"]
    first = facts.all(schema.Evidence, group="g2")[0]
    assert first.folder.endswith(f"-g2-step{AT}-stuck") and {"stacks-rank0", "recorder-rank0"} <= first.taken.keys()
    return said


@pytest.mark.parametrize(("kind", "phase"), [("stall", "compute"), ("stall", "reduce"), ("hold", "compute")])
def test_a_rank_that_makes_no_progress_is_left_out_and_named(job: Job, kind: str, phase: str) -> None:
    """Asleep in its step, asleep before it puts its part in, and in a C call that keeps the interpreter lock."""
    job.settings["stall_floor_s"] = FLOOR_S
    job.start_all(3, fault=f"{kind}:g2:{phase}:{AT}", steps=STEPS)
    facts = job.finish()
    facts.check(STEPS, LIVE, {"g2": -9})
    stuck(facts, facts.fault(kind, phase, "g2", AT))
    armed = facts.all(Armed)
    assert "g2" in {event.group for event in armed} and all(event.learnt for event in armed)
    waits = [event for event in facts.all(schema.Waiting) if "g2" in event.whom]
    assert waits and f"{phase} of step {AT}" in waits[-1].why
    (phases,) = [event for event in facts.all(schema.LastPhases) if event.epoch > 1]
    assert f"{phase} of step {AT} for " in phases.phases["g2"] and "reduce of step" in phases.phases["g0"]


def test_a_rank_that_put_its_part_in_and_does_not_vote_is_left_out(job: Job) -> None:
    """The others have committed the step and stand in the next one."""
    job.settings["stall_floor_s"] = FLOOR_S
    job.start_all(3, fault=f"stall:g2:vote:{AT}", steps=STEPS)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g2": -9} and samples_exactly_once(facts.events, STEPS).holds
    fault, lost = facts.fault("stall", "vote", "g2", AT), facts.lost["g2"]
    assert facts.lost.keys() == {"g2"} and lost.detected_by == "progress"
    assert f"has not committed step {AT}, which the others have" in lost.cause or "no progress in vote" in lost.cause
    assert seconds_between(fault, lost) >= FLOOR_S - 0.2, "so long is borne"


def test_a_held_interpreter_lock_evicts_nobody_while_it_is_borne(job: Job) -> None:
    job.settings["stall_floor_s"] = 2 * FLOOR_S
    job.start_all(3, fault=f"hold=2:g2:compute:{AT}", steps=STEPS)
    facts = job.finish()
    fault = facts.fault("hold", "compute", "g2", AT)
    facts.check(STEPS, {"g0", "g1", "g2"})
    assert not facts.lost and len(facts.epochs) == 1 and not facts.all(Stuck)
    assert max(c.seconds for c in facts.all(schema.Committed, step=AT)) > 1.9, fault


@pytest.mark.long
def test_ten_seconds_of_a_held_interpreter_lock_are_borne_by_default(job: Job) -> None:
    job.settings["outage_budget_s"] = 60
    job.start_all(3, fault=f"hold=10:g2:compute:{AT}", steps=STEPS)
    facts = job.finish()
    facts.fault("hold", "compute", "g2", AT)
    facts.check(STEPS, {"g0", "g1", "g2"})
    assert not facts.lost and not facts.all(Stuck)


def test_if_all_groups_wait_for_one_thing_nobody_is_left_out(job: Job) -> None:
    """As for a storage that hangs, and then answers one of them shortly before the other."""
    job.settings["stall_floor_s"] = FLOOR_S
    job.start_all(2, fault=f"stall=9:g0:compute:{AT},stall=9.2:g1:compute:{AT}", steps=STEPS)
    facts = job.finish()
    assert {event.group for event in facts.all(schema.FaultInjected)} == LIVE
    assert facts.codes == dict.fromkeys(LIVE, 0) and samples_exactly_once(facts.events, STEPS).holds
    assert {event.group for event in facts.all(Stuck)} == LIVE, "both have said so"
    assert not facts.lost and len(facts.epochs) == 1


def test_slow_first_steps_and_undeclared_evaluations_raise_no_alarm_and_a_stall_does(job: Job) -> None:
    """The first step is 20 times slower, every tenth one evaluates for 15 times as long, and step 35 stalls."""
    job.settings["stall_floor_s"] = FLOOR_S
    evaluations = ",".join(f"stall=1.5:g0:apply:{step}" for step in range(9, 40, 10))
    first = ",".join(f"stall=2:g{i}:compute:0" for i in range(3))
    job.start_all(3, fault=f"{first},{evaluations},stall:g2:compute:35", steps=40, delay=0.02)
    facts = job.finish(within_s=60)
    assert facts.codes == {"g0": 0, "g1": 0, "g2": -9} and samples_exactly_once(facts.events, 40).holds
    assert len(facts.all(schema.FaultInjected)) == 3 + 4 + 1
    (said,) = facts.all(Stuck)
    assert (said.group, said.step) == ("g2", 35)
    assert facts.lost.keys() == {"g2"} and facts.lost["g2"].detected_by == "progress"


def test_the_slow_one_is_named_with_what_it_costs_and_nobody_is_left_out(job: Job) -> None:
    job.settings["deal"] = "even"
    job.start_all(3, fault="slow=60:g2:compute:5", steps=60, delay=0.08)
    facts = job.finish(within_s=90)
    facts.check(60, {"g0", "g1", "g2"})
    facts.fault("slow", "compute", "g2", 5)
    assert not facts.lost and len(facts.epochs) == 1
    slow = facts.all(Slow)
    assert slow and {event.group for event in slow} == {"g2"}
    assert slow[0].factor > 1.25 and slow[0].costs > 0.1 and slow[0].done == "reported" and slow[0].rank == 0


def test_a_slow_group_is_asked_to_leave_where_that_is_wanted_and_a_spare_is_there(job: Job) -> None:
    job.settings |= {"spares": 1, "slow": "evict", "groups": 3}
    job.start_all(3, fault="slow=200:g1:compute:5", steps=120, delay=0.05, microbatches=2)
    facts = job.finish(within_s=90)
    assert facts.codes == {"g0": 0, "g1": 0, "g2": 0} and not facts.lost
    (quarantined,) = facts.all(Quarantined)
    assert quarantined.group == "g1" and "times what the others take" in quarantined.reason
    assert [event.done for event in facts.all(Slow)] == ["reported", "asked to leave"]
    assert facts.all(schema.Left, group="g1") and facts.members[-1] == ("g0", "g2")


def test_a_group_that_came_back_may_take_as_long_over_its_first_microbatch_as_at_the_start(job: Job) -> None:
    """It compiles, allocates and warms up once more; how long steps take elsewhere says nothing of that."""
    job.settings["stall_floor_s"] = FLOOR_S
    job.start_healing(3, fault="kill:g2:compute:5", steps=200)
    job.return_of("g2", fault="stall=8:g2:compute:any")
    job.await_rejoin("g2", within_s=60)
    facts = job.finish(within_s=90)
    stalls = [fault for fault in facts.all(schema.FaultInjected) if fault.fault == "stall"]
    assert len(stalls) == 1 and facts.codes == {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}
    assert [event.group for event in facts.all(schema.GroupLost)] == ["g2"], "only the one that was killed"
    assert not facts.all(Stuck)
