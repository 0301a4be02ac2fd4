"""Who comes back or begins is made alike, or refused by name: settings, registered objects, the first weights."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from harness import Job
from healed import ALL, KILL_G2, PATIENT, STEPS, recoveries, rejoined

from lightkeeper.events import schema


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


@pytest.mark.parametrize(
    ("differs", "named"),
    [({"width": 24}, "0.weight"), ({"optimizer": "sgd"}, "AdamW"), ({"lr": 2e-2}, "0.02"), ({"seed": 9}, "seed")],
)
def test_who_comes_back_with_another_setting_is_refused_with_its_name(job: Job, differs: dict, named: str) -> None:
    job.start_healing(3, fault=KILL_G2, steps=60)
    job.return_of("g2", **differs)
    assert job.wait("g2-again")["g2-again"] != 0
    assert named in job.said("g2-again") and "differs from" in job.said("g2-again")
    job.hurry()
    facts = job.finish()
    assert (facts.codes["g0"], facts.codes["g1"]) == (0, 0) and facts.one(schema.Refused).group == "g2"
    assert not facts.all(schema.Healed) and set(facts.lost) == {"g2"}
    assert len(recoveries(facts)) <= 2


def test_a_scheduler_that_was_forgotten_shows_in_the_first_step_after_the_rejoin(job: Job) -> None:
    job.start_healing(3, fault=KILL_G2, warm_up=1000, behave="forget-schedule")
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    assert {facts.codes[name] for name in ("g0", "g1", "g2-again")} == {0}
    first = facts.one(schema.Rejoined).step
    told = facts.all(schema.SettingsDiffer)
    assert {e.group for e in told} == set(ALL) and {e.step for e in told} == {first}
    assert "learning rate" in facts.said["g2-again"] and "manager.register()" in facts.said["g0"]


def test_a_state_that_does_not_fit_is_refused_and_named(job: Job) -> None:
    """The members registered one more object than the one that comes back."""
    job.start_healing(3, fault=KILL_G2, steps=80, register="tally")
    job.return_of("g2", register="")
    assert job.wait("g2-again")["g2-again"] != 0
    assert "tally" in job.said("g2-again") and "differs from" in job.said("g2-again")
    assert "Traceback" not in job.said("g2-again")
    job.hurry()
    facts = job.finish()
    assert (facts.codes["g0"], facts.codes["g1"]) == (0, 0)
    assert not facts.all(schema.Rejoined) and len(recoveries(facts)) <= 2


def test_an_object_of_the_users_own_comes_back_too_and_is_read_on_the_training_thread_only(job: Job, gold) -> None:
    """S32, S34."""
    job.start_healing(3, fault=KILL_G2, register="tally")
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    for name in ("g0", "g1", "g2-again"):
        bad = facts.traces[name].all("read-at-a-bad-time")
        assert not bad, f"{name}: state_dict() ran on thread {bad[0][0]}, in a forward pass: {bad[0][1]}"
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ALL)
    assert facts.traces["g2-again"].all("tally-loaded") == [[facts.one(schema.Healed).step]]
    assert facts.traces["g2-again"].all("tally")[-1][1] == STEPS


@pytest.mark.timeout(900)
def test_a_hundred_joins_at_random_moments(job: Job) -> None:
    """S32: whenever a joiner comes, the state is read between two steps, and whoever was healed has the same bits.

    Every joiner has a name of its own: one that falls again and again is made to wait.
    """
    moments, joins, steps = random.Random(32), 100, 6000
    job.settings.update(groups=3, minimum=2, start_window_s=0.5)
    job.start_healing(2, register="tally", steps=steps, delay=0.04)
    job.wait_for(schema.Committed)
    for i in range(joins):
        process = job.start(f"j{i}", **job.heal_options)
        job.wait_for(schema.Rejoined, group=f"j{i}", pid=process.pid)
        time.sleep(moments.uniform(0.0, 0.3))  # the moment of the kill, which is what is random here
        os.kill(process.pid or 0, signal.SIGKILL)
    job.start("last", **job.heal_options)
    job.await_rejoin("last")
    facts = job.finish(within_s=240)
    killed = {f"j{i}" for i in range(joins)}
    codes = {**dict.fromkeys(killed, -9), "g0": 0, "g1": 0, "last": 0}
    facts.check_healed(steps, codes, killed, ("g0", "g1", "last"))
    assert len(facts.all(schema.Rejoined)) == joins + 1
    assert not [name for name, trace in facts.traces.items() if trace.all("read-at-a-bad-time")]


def test_register_refuses_what_cannot_be_copied_with_its_path(job: Job) -> None:
    job.settings.update(groups=1)
    job.start("g0", loop="healing", register="unknown")
    assert job.wait("g0")["g0"] not in (0, -9)
    assert "tally.mean" in job.said("g0") and "object" in job.said("g0")


@pytest.mark.parametrize("name", ["a name", "model"])
def test_register_refuses_a_bad_name(job: Job, name: str) -> None:
    job.settings.update(groups=1)
    job.start("g0", loop="healing", register=name)
    assert job.wait("g0")["g0"] not in (0, -9)
    assert repr(name) in job.said("g0")


def test_statistics_of_the_forward_pass_do_not_keep_a_group_out(job: Job) -> None:
    """BatchNorm's running statistics differ between groups; the protocol keeps them out of snapshot and fingerprint."""
    job.start_healing(3, fault=KILL_G2, batch_norm=True, steps=300)
    job.return_of("g2")
    job.await_rejoin("g2")
    job.hurry()
    facts = job.finish()
    assert not facts.all(schema.Diverged)
    assert len({e.fingerprint for e in facts.all(schema.Finished) if e.fingerprint}) == 1


# ---------------------------------------------------------------- the first step


def test_equal_starts_send_nothing(job: Job) -> None:
    job.start_healing(3, steps=12, delay=0.0)
    facts = job.finish()
    facts.check(12, set(ALL))
    assert not facts.all(schema.Healing) and not facts.all(schema.Healed) and not facts.all(schema.Copied)
    assert len(facts.epochs) == 1


@pytest.mark.parametrize(("group", "scale"), [("g1", 1e6), ("g2", 0.5)])
def test_who_starts_with_other_weights_joins_from_the_lowest_slot(job: Job, gold, group: str, scale: float) -> None:
    """S35: weights of 1e6 contribute to nothing, and no forward pass runs on them."""
    job.start_healing(3, only={group: {"scale": scale}})
    job.await_rejoin(group)
    facts = job.finish()
    facts.check_healed(STEPS, dict.fromkeys(ALL, 0), set(), ALL)
    assert facts.members[0] == tuple(g for g in ALL if g != group), "the others begin"
    assert facts.one(schema.Healing).group == group
    step = rejoined(facts, group)
    largest = max(size for index, _, _, size in facts.traces[group].all("begins") if index <= step)
    assert largest < 10, "its first step already runs on the members' weights"
    facts.near(gold(steps=STEPS, warm_up=12), "g0")
    facts.near_from(gold(steps=STEPS, warm_up=12), group)


def test_it_is_said_that_a_group_starts_with_other_weights(job: Job) -> None:
    job.start_healing(3, only={"g1": {"scale": 2.0}}, steps=60)
    job.await_rejoin("g1")
    facts = job.finish()
    said = [line for line in facts.said["g1"].splitlines() if "g0" in line and "state" in line]
    assert len(said) == 1, "one line says whose state it takes, and why"


def test_groups_that_start_unequal_begin_although_all_are_needed(job: Job) -> None:
    """With a minimum of all groups there is none to leave out, and somebody must still take the other's state."""
    job.settings.update(minimum=2)
    job.start_healing(2, only={"g1": {"scale": 2.0}}, steps=60)
    job.until(lambda: any(isinstance(e, schema.Committed) for e in job.events()), "the first step")
    job.hurry()
    facts = job.finish()
    facts.check_healed(60, {"g0": 0, "g1": 0}, set(), ("g0", "g1"))
