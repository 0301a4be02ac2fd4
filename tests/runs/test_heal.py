"""A killed group comes back: it heals from the members, follows their entries, and nobody stands for it."""

from __future__ import annotations

import os
import signal

import pytest
from harness import OUTAGE_BUDGET_S, Job
from healed import ALL, AT, KILL_G2, PATIENT, STEPS, recoveries, rejoined

from lightkeeper.events import schema
from lightkeeper.manager import exits

WIDE = {"width": 1024}  # 13 MB of state: several ranges


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def test_a_killed_group_comes_back_with_the_same_bits(job: Job, gold) -> None:
    job.start_healing(3, fault=f"kill:g2:reduce:{AT}", delay=0.4)  # who was told of a boundary too late copies nothing
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)
    facts.fault("kill", "reduce", "g2", AT)
    assert facts.lost["g2"].detected_by == "manager"
    rejoined(facts, "g2-again")
    healed = facts.one(schema.Healed)
    parameters = 8 * 16 + 16 + 16 * 16 + 16 + 16 + 1
    assert healed.bytes >= 12 * parameters and healed.seconds < OUTAGE_BUDGET_S / 2, "no time-out was waited for"
    assert len(facts.all(schema.Healing)) == 1 and not facts.all(schema.HealFailed)
    assert {e.group for e in facts.all(schema.Copied)} == {"g0", "g1"}
    assert facts.epochs[-1].cause == "planned" and "g2" in facts.epochs[-1].members
    assert all("g2" in e.cause for e in recoveries(facts)), "no recovery but the one after the kill"
    facts.near(gold(steps=STEPS, warm_up=12), "g0")
    facts.near_from(gold(steps=STEPS, warm_up=12), "g2-again")


def test_four_groups_down_to_two_and_back_give_the_bits_of_one_process(job: Job, gold) -> None:
    """With gradients folded in the order of the microbatches nothing shows who computed what, or that anybody fell."""
    job.variables["LIGHTKEEPER_REDUCTION"] = "fold"
    job.start_healing(4, fault="kill:g2:reduce:8,kill:g3:apply:12", dropout=0.5)
    job.return_of("g2")
    job.return_of("g3")
    job.await_rejoin("g2", "g3")
    facts = job.finish()
    codes = {"g0": 0, "g1": 0, "g2": -9, "g3": -9, "g2-again": 0, "g3-again": 0}
    facts.check_healed(STEPS, codes, {"g2", "g3"}, ("g0", "g1", "g2", "g3"))
    assert {(f.group, f.phase) for f in facts.all(schema.FaultInjected)} == {("g2", "reduce"), ("g3", "apply")}
    assert {2, 4} <= {len(members) for members in facts.members}
    plain = gold(steps=STEPS, warm_up=12, dropout=0.5).digests
    for name in ("g0", "g1", "g2-again", "g3-again"):
        digests = facts.traces[name].digests
        assert digests == {step: plain[step] for step in digests} and max(digests) == STEPS - 1, name


def test_learning_rate_and_optimizer_are_those_of_the_step_and_not_of_the_start(job: Job, gold) -> None:
    """S29, S30: two groups come back one after the other, during the warm-up; every state is read anew."""
    job.start_healing(3, fault="kill:g2:compute:3", warm_up=100, delay=0.2)
    job.return_of("g2", fault="kill:g2:compute:30")
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": -9, "g2-again-again": 0}, {"g2"}, ALL)
    assert {(f.phase, f.step) for f in facts.all(schema.FaultInjected)} == {("compute", 3), ("compute", 30)}
    first, second = facts.all(schema.Healed)
    assert first.step < 30 < second.step < 100 and first.fingerprint != second.fingerprint
    facts.near_from(gold(steps=STEPS, warm_up=100), "g2-again-again")


def test_dropout_masks_are_those_of_the_microbatch_whoever_computes_it(job: Job, gold) -> None:
    """S44: half of the activations are dropped; a mask from another stream would show in the loss at once."""
    job.start_healing(3, fault=KILL_G2, dropout=0.5)
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)
    rejoined(facts, "g2-again")
    facts.near_from(gold(steps=STEPS, warm_up=12, dropout=0.5), "g2-again")


def test_two_groups_come_back_at_once(job: Job, gold) -> None:
    job.start_healing(4, fault=f"kill:g2:compute:{AT},kill:g3:reduce:{AT}", microbatches=8)
    job.return_of("g2")
    job.return_of("g3")
    job.await_rejoin("g2", "g3")
    facts = job.finish()
    codes = {"g0": 0, "g1": 0, "g2": -9, "g3": -9, "g2-again": 0, "g3-again": 0}
    facts.check_healed(STEPS, codes, {"g2", "g3"}, (*ALL, "g3"))
    assert len(facts.all(schema.Healed)) == 2
    for name in ("g2-again", "g3-again"):
        rejoined(facts, name)
    facts.near(gold(steps=STEPS, warm_up=12, microbatches=8), "g1")


def test_four_groups_down_to_two_and_back_to_four(job: Job, gold) -> None:
    faults = "kill:g3:reduce:4,kill:g1:compute:8"
    job.start_healing(4, fault=faults, microbatches=24, delay=0.012)
    job.return_of("g3")
    job.return_of("g1")
    job.await_rejoin("g1", "g3")
    facts = job.finish()
    codes = {"g0": 0, "g2": 0, "g1": -9, "g3": -9, "g1-again": 0, "g3-again": 0}
    facts.check_healed(STEPS, codes, {"g1", "g3"}, (*ALL, "g3"))
    assert len(facts.all(schema.FaultInjected)) == 2
    assert min(len(members) for members in facts.members) == 2 and len(facts.members[-1]) == 4
    for name in ("g1-again", "g3-again"):
        facts.near_from(gold(steps=STEPS, warm_up=12, microbatches=24), name)
    facts.near(gold(steps=STEPS, warm_up=12, microbatches=24), "g0")


# ---------------------------------------------------------------- somebody dies meanwhile


@pytest.mark.parametrize("how", ["die-sending", "in-compute"])
def test_a_donor_dies_while_it_sends(job: Job, how: str) -> None:
    """Another donor gives the rest, or there is a fresh boundary; the two that are left go on."""
    donor = {"behave": "die-sending"} if how == "die-sending" else {}
    job.start_healing(4, fault="kill:g3:compute:5", microbatches=8, only={"g0": donor}, **WIDE)
    joiner = job.return_of("g3")
    if how == "in-compute":
        job.wait_for(schema.Copied, group="g0")
        os.kill(job.trainers["g0"].pid, signal.SIGKILL)
    job.await_rejoin("g3")
    assert joiner.is_alive()
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": -9, "g1": 0, "g2": 0, "g3": -9, "g3-again": 0}, {"g0", "g3"}, ("g1", "g2", "g3"))
    if how == "die-sending":
        assert facts.one(schema.FaultInjected, group="g0").phase == "compute"
    assert "SIGKILL" in facts.lost["g0"].cause
    rejoined(facts, "g3-again")


def test_donors_that_cannot_be_reached_are_asked_again_with_a_breath_between(job: Job) -> None:
    deaf = {group: {"behave": f"deaf:{AT + 1}"} for group in ("g0", "g1")}
    job.start_healing(3, fault=KILL_G2, steps=60, only=deaf, delay=0.2)
    job.return_of("g2")
    job.wait_for(schema.HealFailed, group="g2")
    job.hurry()
    facts = job.finish()
    assert (facts.codes["g0"], facts.codes["g1"], facts.codes["g2-again"]) == (0, 0, 0)
    assert len(facts.all(schema.HealFailed)) < 30


def test_half_a_state_is_never_trained_on(job: Job) -> None:
    """The only donor dies in mid-copy and both start again: who holds a mix of old and new tensors ends, saying why."""
    large = {"width": 2400}  # 69 MB of state: five ranges
    job.start_healing(2, fault="kill:g1:compute:5", only={"g0": {"behave": "slow-sending:1500"}}, **large)
    job.return_of("g1")
    donor = job.folder / "trace-g0"
    job.until(lambda: donor.read_text().count('"sends"') >= 3, "half of the state is sent")
    os.kill(job.trainers["g0"].pid or 0, signal.SIGKILL)
    job.return_of("g0")
    assert job.wait("g1-again")["g1-again"] == -9
    job.wait_for(schema.ProcessEnded, process="manager g1", exit_code=exits.GAVE_UP)
    assert "broke off half-way" in job.said("g1-again")
    job.return_of("g1")
    job.hurry()
    facts = job.finish()
    assert {facts.codes[name] for name in ("g0-again", "g1-again-again")} == {0}
    ends = [facts.traces[name].all("done")[0][0] for name in ("g0-again", "g1-again-again")]
    assert ends[0] == ends[1] and {"g0", "g1"} <= set(facts.lost)


def test_the_only_donor_of_two_dies_while_it_sends(job: Job) -> None:
    """Then there is nobody left: the job is over, and the joiner starts it anew from step 0 or waits; it says so."""
    job.settings.update(outage_budget_s=10, start_budget_s=20)
    job.start_healing(2, fault="kill:g1:compute:5", only={"g0": {"behave": "die-sending"}}, **WIDE)
    job.return_of("g1")
    assert job.wait("g1-again")["g1-again"] != 0, "its donors are gone for good, and the job with them"
    events = job.events()
    stopped = [e for e in events if isinstance(e, schema.JobStopped) and e.process == "lighthouse"]
    assert stopped and "no group is left" in stopped[-1].reason


@pytest.mark.parametrize("phase", ["heal", "receiving", "follow"])
def test_a_joiner_dies_and_is_started_a_third_time(job: Job, phase: str) -> None:
    """It costs the members nothing; it died twice within ten minutes, so it is held back for five seconds."""
    dies = {"behave": "die-receiving"} if phase == "receiving" else {"die_in": phase}
    job.start_healing(3, fault=KILL_G2, delay=0.12, steps=200)
    job.return_of("g2", **dies)
    job.return_of("g2", **({"behave": ""} if phase == "receiving" else {"die_in": ""}))
    job.await_rejoin("g2")
    facts = job.finish()
    codes = {"g0": 0, "g1": 0, "g2": -9, "g2-again": -9, "g2-again-again": 0}
    facts.check_healed(200, codes, {"g2"}, ALL)
    second = [e for e in facts.all(schema.FaultInjected) if e.pid == facts.pids["g2-again"]]
    assert [e.phase for e in second] == ["heal" if phase == "receiving" else phase]
    rejoined(facts, "g2-again-again")
    assert len(recoveries(facts)) <= 2 and all("g2" in e.cause for e in recoveries(facts)), "of the first death only"
    joined = [e for e in facts.all(schema.Joined) if e.group == "g2"][-1]
    healing = [e for e in facts.all(schema.Healing) if e.group == "g2"][-1]
    assert (healing.mono_ns - joined.mono_ns) / 1e9 > 2.0


@pytest.mark.parametrize("when", ["copied", "healed", "follow"])
def test_a_survivor_dies_while_a_group_heals(job: Job, when: str) -> None:
    slow = {"behave": "slow-entries:40"} if when == "healed" else {}
    job.start_healing(4, fault="kill:g3:compute:5", microbatches=8)
    job.return_of("g3", **slow)
    if when == "copied":
        job.wait_for(schema.Healing, group="g3")
    elif when == "healed":
        job.wait_for(schema.Healed, group="g3")
    else:
        job.until(lambda: any(e.why == "g3 joins" for e in job.events() if isinstance(e, schema.Prepared)),
                  "the change is prepared")  # fmt: skip
    os.kill(job.trainers["g1"].pid, signal.SIGKILL)
    job.await_rejoin("g3")
    facts = job.finish()
    codes = {"g0": 0, "g1": -9, "g2": 0, "g3": -9, "g3-again": 0}
    facts.check_healed(STEPS, codes, {"g1", "g3"}, ("g0", "g2", "g3"))
    assert "SIGKILL" in facts.lost["g1"].cause


# ---------------------------------------------------------------- too slow


def test_a_joiner_slower_than_training_falls_back_and_says_so(job: Job) -> None:
    """Entries are kept for three steps only, and it needs longer for one than the members do."""
    job.settings.update(history_mb=0.006)
    job.start_healing(3, fault=KILL_G2, delay=0.04, steps=400)
    job.return_of("g2", behave="slow-entries:1400")
    job.wait_for(schema.HealFailed, group="g2")
    job.until(lambda: len([e for e in job.events() if isinstance(e, schema.Healed)]) >= 2, "a second state")
    healed = [e for e in job.events() if isinstance(e, schema.Healed)]
    assert healed[1].step > healed[0].step, "from a fresh boundary"
    failed = [e for e in job.events() if isinstance(e, schema.HealFailed)]
    assert "no longer kept" in failed[0].reason and len(failed) < 10
    job.hurry()
    codes = job.wait()
    assert (codes["g0"], codes["g1"], codes["g2"]) == (0, 0, -9), "nobody stood for it"


def test_a_joiner_whose_entries_fit_catches_up_although_each_step_takes_it_a_while(job: Job) -> None:
    job.start_healing(3, fault=KILL_G2, delay=0.1)
    job.return_of("g2", replay_delay=0.05)
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)


def test_members_switch_while_the_joiner_still_applies_the_entry(job: Job) -> None:
    """The lighthouse hears of the switch before the joiner has the entry that makes it a member."""
    job.start_healing(3, fault=KILL_G2, delay=0.06)
    job.return_of("g2", replay_delay=0.5)
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)


# ---------------------------------------------------------------- the end, the minimum, the lighthouse


@pytest.mark.parametrize("slow", ["slow-entries:400", "slow-sending:1500"])
def test_the_run_ends_while_a_joiner_still_follows(job: Job, slow: str) -> None:
    donors = {g: {"behave": slow} for g in ("g0", "g1") if "sending" in slow}
    job.start_healing(3, fault=KILL_G2, steps=60, only=donors)
    job.return_of("g2", **({} if donors else {"behave": slow}))
    if donors:
        traces = [job.folder / f"trace-{group}" for group in ("g0", "g1")]
        job.until(lambda: any('"sends"' in trace.read_text() for trace in traces), "a donor sends")
    else:
        job.wait_for(schema.Healed, group="g2")
    job.hurry()
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}
    assert set(facts.lost) == {"g2"} and not facts.torn
    assert len(facts.traces["g0"].digests) == 60
    ends = [facts.traces[g].other[-1][1] for g in ("g0", "g1")]
    assert max(ends) - min(ends) < OUTAGE_BUDGET_S / 2, "no time-out was waited for"


def test_below_the_minimum_the_survivor_stands_and_the_other_comes_back(job: Job, gold) -> None:
    job.settings.update(minimum=2)
    job.start_healing(2, fault=f"kill:g1:compute:{AT}", steps=40, delay=0.005)
    job.return_of("g1")
    facts = job.finish()
    facts.check_healed(40, {"g0": 0, "g1": -9, "g1-again": 0}, {"g1"}, ("g0", "g1"))
    assert facts.one(schema.Healed).step == AT == facts.epochs[-1].first_step
    assert set(facts.members) == {("g0", "g1")} and "planned" not in {e.cause for e in facts.epochs}
    assert sorted(facts.commits("g0")) == list(range(40)), "no step is lost"
    facts.near(gold(steps=40, warm_up=12), "g0")
    facts.near_from(gold(steps=40, warm_up=12), "g1-again")


def test_below_the_minimum_the_rejoin_is_in_the_log(job: Job) -> None:
    job.settings.update(minimum=2)
    job.start_healing(2, fault=f"kill:g1:compute:{AT}", steps=20, delay=0.005)
    job.return_of("g1")
    facts = job.finish()
    assert facts.codes["g1-again"] == 0
    assert facts.one(schema.Rejoined).step == AT


def test_the_job_falls_below_the_minimum_while_a_group_heals(job: Job) -> None:
    """The survivor still computes when it is told to copy where it stands; it does once it has come to stand."""
    job.settings.update(minimum=2)
    job.start_healing(3, fault=KILL_G2, delay=0.3)
    job.return_of("g2")
    job.wait_for(schema.Healing, group="g2")
    os.kill(job.trainers["g1"].pid, signal.SIGKILL)
    job.until(lambda: job.events() and any(isinstance(e, schema.Activated) and tuple(e.members) == ("g0", "g2")
                                           for e in job.events()), "g0 and g2 go on")  # fmt: skip
    job.hurry()
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": -9, "g2": -9, "g2-again": 0}, {"g1", "g2"}, ("g0", "g2"))


@pytest.mark.parametrize("behave", ["slow-follow:300", "slow-entries:300"])
def test_the_job_falls_below_the_minimum_while_a_joiner_follows(job: Job, behave: str) -> None:
    """The joiner lags by an entry: it is named in the recovery all the same, adopts what it lacks, and goes on."""
    job.settings.update(minimum=2)
    job.start_healing(3, fault=KILL_G2, delay=0.06)
    job.return_of("g2", behave=behave)
    job.wait_for(schema.Healed, group="g2")
    os.kill(job.trainers["g1"].pid, signal.SIGKILL)
    job.until(lambda: any(isinstance(e, schema.Activated) and set(e.members) == {"g0", "g2"} for e in job.events()),
              "g0 and g2 go on")  # fmt: skip
    job.hurry()
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": -9, "g2": -9, "g2-again": 0}, {"g1", "g2"}, ("g0", "g2"))


def test_a_joiner_named_in_a_recovery_one_entry_behind_adopts_it(job: Job) -> None:
    job.settings.update(minimum=2)
    job.start_healing(3, fault=KILL_G2, delay=0.6, steps=60)  # g1 is to be killed within the next step
    job.return_of("g2", behave="blind")
    boundary = job.wait_for(schema.Healing, group="g2").step
    job.wait_for(schema.Committed, group="g0", step=boundary)
    os.kill(job.trainers["g1"].pid, signal.SIGKILL)
    job.until(lambda: any(set(e.members) == {"g0", "g2"} for e in job.events() if isinstance(e, schema.Activated)),
              "g0 and g2 go on")  # fmt: skip
    job.hurry()
    facts = job.finish()
    adopted = facts.one(schema.Adopted)
    assert (adopted.group, adopted.step, adopted.donor) == ("g2", boundary, "g0")
    facts.check_healed(60, {"g0": 0, "g1": -9, "g2": -9, "g2-again": 0}, {"g1", "g2"}, ("g0", "g2"))


@pytest.mark.parametrize(
    "when",
    ["healing", "healed", "prepared"],
)
def test_the_lighthouse_restarts_while_a_group_heals(job: Job, when: str) -> None:
    slow = {"behave": "slow-entries:700"} if when == "healed" else {}
    job.start_healing(3, fault=KILL_G2, delay=0.5 if slow else 0.3)  # none of it may be over before the restart
    job.return_of("g2", **slow)
    if when == "prepared":
        job.until(lambda: any(e.why == "g2 joins" for e in job.events() if isinstance(e, schema.Prepared)),
                  "the change is prepared")  # fmt: skip
    else:
        job.wait_for(schema.Healing if when == "healing" else schema.Healed, group="g2")
    job.lighthouses[-1].kill()
    job.lighthouses[-1].wait()
    job.start_lighthouse(*PATIENT, port=int(job.lighthouse.rpartition(":")[2]))
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)
    terms = [e.term for e in facts.epochs]
    assert when == "prepared" or terms[-1] > terms[0]  # the first lighthouse's planned epoch may come into force


@pytest.mark.parametrize("who", ["g1", "g0"])
def test_a_member_misses_the_very_entry_that_takes_the_joiner_in(job: Job, who: str) -> None:
    await_other = {"g0": 1, "g1": 0}[who]
    job.start_healing(3, fault=KILL_G2, delay=0.1, only={who: {"behave": f"miss-activating await:{await_other}"}})
    job.return_of("g2", behave="slow-follow:150")
    missed = job.folder / f"trace-{who}"
    job.until(lambda: '"missed"' in missed.read_text(), "the entry is missed")
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)
    ((step,),) = facts.traces[who].all("missed")
    assert facts.all(schema.Adopted, group=who, step=step)
