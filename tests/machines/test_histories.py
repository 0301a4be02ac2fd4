"""Random histories of one lighthouse machine and several group machines against each other, and a few scripted ones.

A failure prints its seed and the trace. ``LIGHTKEEPER_SEED=N`` repeats that history alone; ``LIGHTKEEPER_HISTORIES=N``
runs more of them.
"""

from __future__ import annotations

import os

import pytest
from sim_faults import Faults, restart_lighthouse
from sim_job import Job

from lightkeeper.lighthouse import messages as m

SETTLE_S = 150.0
HARMLESS = ("cut", "reduce")
DEADLY = ("kill", "kill_tree")


def history(
    seed: int, kinds: tuple[str, ...], groups: int = 3, width: int = 1, count: int = 3
) -> tuple[Job, Faults, list[str]]:
    """One history to its end; returns the job, its faults and the groups that reached the end of the run."""
    job = Job(seed, groups, width)
    faults = Faults(job, kinds, count)
    try:
        reached = to_the_end(job)
    except Exception as error:
        shown = "\n".join(job.trace[-80:])
        pytest.fail(f"seed {seed}, {kinds}, {groups} groups of {width}, faults {faults.struck}: {error!r}\n{shown}")
    return job, faults, reached


def to_the_end(job: Job) -> list[str]:
    ended = job.run(SETTLE_S)
    assert ended, f"the job stands still: {job.lighthouse.machine.waiting(job.clock.now)}"
    reached = job.checkers.at_the_end()
    assert reached, f"nobody reached the end: { {name: g.reason for name, g in job.groups.items()} }"
    return reached


def seeds(count: int) -> list[int]:
    chosen = os.environ.get("LIGHTKEEPER_SEED")
    return [int(chosen)] if chosen else list(range(int(os.environ.get("LIGHTKEEPER_HISTORIES", count))))


# ---------------------------------------------------------------- random


@pytest.mark.parametrize("width", [1, 2])
def test_without_faults_every_group_reaches_the_end_in_one_epoch(width: int) -> None:
    for seed in seeds(5):
        job, _, reached = history(seed, HARMLESS, width=width, count=0)
        assert reached == ["g0", "g1", "g2"]
        assert len(job.checkers.memberships) == 1 and job.checkers.highest == 1


@pytest.mark.parametrize("width", [1, 2])
def test_after_failed_reduces_every_group_reaches_the_end(width: int) -> None:
    epochs, adopted = 0, 0
    for seed in seeds(40):
        job, _, reached = history(seed, ("reduce",), width=width, count=2)
        assert reached == ["g0", "g1", "g2"], f"seed {seed}: a reduce that fails costs nobody's membership"
        epochs, adopted = epochs + job.checkers.highest - 1, adopted + job.checkers.adopted
    assert epochs > 10 and adopted > 2, "the faults must have cost epochs, and some must have missed an entry"


@pytest.mark.parametrize("width", [1, 2])
def test_after_broken_streams_and_failed_reduces_the_job_reaches_the_end(width: int) -> None:
    for seed in seeds(30):
        history(seed, HARMLESS, width=width, count=4)


@pytest.mark.parametrize(("groups", "width"), [(2, 1), (3, 1), (4, 2)])
def test_survivors_of_kills_reach_the_end_with_one_history(groups: int, width: int) -> None:
    killed, adopted = 0, 0
    for seed in seeds(30):
        job, faults, _ = history(seed, (*HARMLESS, *DEADLY), groups, width, count=4)
        killed, adopted = killed + sum(k in DEADLY for k in faults.struck), adopted + job.checkers.adopted
    assert killed > 10 and adopted > 0, "in some history a member must have adopted an entry that it missed"


@pytest.mark.parametrize("width", [1, 2])
def test_groups_leave_while_others_die(width: int) -> None:
    left = 0
    for seed in seeds(30):
        job, _, _ = history(seed, (*HARMLESS, *DEADLY, "leave", "leave"), 4, width, count=4)
        left += sum(g.exit_code == 0 and g.ranks[0].step < job.until for g in job.groups.values())
    assert left > 5, "in some histories groups must have left"


def test_with_frozen_managers_the_others_go_on() -> None:
    for seed in seeds(30):
        history(seed, (*HARMLESS, "freeze_manager", "kill"), count=3)


def test_with_a_lighthouse_that_comes_back_without_its_log() -> None:
    for seed in seeds(30):
        history(seed, ("restart_empty", "reduce", "cut"), count=3)


def test_with_a_lighthouse_that_restarts_from_its_log() -> None:
    for seed in seeds(20):
        history(seed, ("restart", "reduce", "kill", "cut"), count=4)


def test_with_a_frozen_lighthouse_nobody_is_lost() -> None:
    for seed in seeds(20):
        _, _, reached = history(seed, ("freeze_lighthouse", "reduce"), count=3)
        assert reached == ["g0", "g1", "g2"], seed


def test_with_a_frozen_lighthouse_only_the_killed_are_lost() -> None:
    for seed in seeds(20):
        job, _, reached = history(seed, ("freeze_lighthouse_and_kill",), count=1)
        killed = [name for name, group in job.groups.items() if group.exit_code == 137]
        assert sorted(reached + killed) == ["g0", "g1", "g2"], (
            f"seed {seed}: {reached} reached the end, {killed} killed"
        )


def test_several_groups_leave_at_once() -> None:
    for seed in seeds(60):
        history(seed, ("leave",), 4, 2, count=3)


def test_with_a_lighthouse_that_dies_in_a_recovery_and_restarts_from_its_log() -> None:
    for seed in seeds(30):
        history(seed, ("kill_and_restart", "reduce_and_restart"), 4, count=2)


# ---------------------------------------------------------------- scripted


def in_first_epoch(seed: int = 1, groups: int = 3, slowness: float = 1.0) -> Job:
    """A job some steps in. Slow: all compute for a second, so that nobody reduces while the rest happens."""
    job = Job(seed, groups)
    job.run_until(lambda: all(g.ranks[0].step >= 3 for g in job.groups.values()))
    job.slowness = slowness
    wanted = max(g.ranks[0].step for g in job.groups.values()) + (slowness > 1)
    job.run_until(lambda: all(r.step == wanted and r.phase == "compute" for g in job.groups.values() for r in g.ranks))
    return job


def dies(job: Job, group: str) -> None:
    job.groups[group].ranks[0].die(-9)


def test_the_lighthouse_dies_in_a_recovery_that_a_death_began() -> None:
    """Both survivors have promised epoch 2 while they computed: nobody reduces, nobody stands, nobody reports."""
    job = in_first_epoch(slowness=20)
    dies(job, "g2")
    survivors = [job.groups["g0"], job.groups["g1"]]
    job.run_until(lambda: all(g.machine.promised == 2 for g in survivors))
    assert job.lighthouse.disk.membership.epoch.number == 1, "not activated yet"
    restart_lighthouse(job, keep=True)
    job.slowness = 1
    assert to_the_end(job) == ["g0", "g1"]


def test_the_lighthouse_dies_between_logging_an_activation_and_sending_it() -> None:
    job = in_first_epoch(slowness=20)
    dies(job, "g2")
    job.run_until(lambda: job.lighthouse.disk.membership.epoch.number == 2)
    restart_lighthouse(job, keep=True)
    job.slowness = 1
    assert to_the_end(job) == ["g0", "g1"]


def test_an_empty_disk_prepares_above_what_was_promised() -> None:
    """Epochs 2 to 4 were promised and never in force; a lighthouse that only hears of epoch 1 must not ask for 2."""
    job = in_first_epoch(slowness=20)
    others = [job.groups["g0"], job.groups["g1"]]
    job.groups["g2"].frozen_until = job.clock.now + 1.0  # it promises nothing for a while
    job.lighthouse.take(others[0].stream, m.Failed(others[0].machine.known.epoch, 4, "injected"))
    for number in (2, 3, 4):  # a broken stream and a return: the next numbers
        job.run_until(lambda n=number: all(g.machine.promised >= n for g in others))
        if number < 4:
            others[0].stream.break_it()
    assert job.lighthouse.disk.membership.epoch.number == 1
    restart_lighthouse(job, keep=False)
    job.slowness = 1
    job.run_until(lambda: job.lighthouse.up and all(g.stream is not None for g in job.groups.values()))
    job.failing = 1.0
    job.clock.after(0.5, lambda: setattr(job, "failing", 0.0))
    assert to_the_end(job) == ["g0", "g1", "g2"]
