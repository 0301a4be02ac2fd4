"""A job that begins at a later step than 0: each group has loaded a checkpoint, perhaps not the same one."""

from __future__ import annotations

from groupworld import TOTAL, GroupWorld, epoch, membership
from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, origin
from lightkeeper.manager import exits, local

# ---------------------------------------------------------------- the lighthouse


def arrive_with(world: World, **steps: int) -> None:
    """Each group comes with the state before its step; states of one step are alike."""
    for name, step in steps.items():
        world.hello(name)
        world.join(name, fingerprint=f"after {step}", step=step)
    for name, step in steps.items():
        world.promise(name, begins=step)


def test_a_job_begins_at_the_step_that_its_groups_come_with() -> None:
    world = World(groups=2)
    arrive_with(world, g0=7, g1=7)
    activate = world.activate("g1")
    assert (activate.membership.groups, activate.first_step, activate.entry) == (("g0", "g1"), 7, origin(7))
    assert [note["step"] for note in world.noted("joined")] == [7, 7] and not world.noted("healing")


def test_groups_with_an_earlier_checkpoint_heal_from_those_with_the_latest() -> None:
    world = World(groups=3, minimum=2)
    arrive_with(world, g0=5, g1=7, g2=0)
    assert world.activate("g1").membership.groups == ("g1",) and world.activate("g1").first_step == 7
    assert not world.told("g0", m.Activate) and not world.told("g0", m.Fence)
    world.pass_s(0.25, {"g1": 7})
    heals = [world.told(name, m.Heal)[-1] for name in ("g0", "g2")]
    assert [heal.step for heal in heals] == [9, 9] and {heal.donors[0].group for heal in heals} == {"g1"}
    assert [heal.why for heal in heals] == [
        f"{g} comes with the state before step {s}" for g, s in (("g0", 5), ("g2", 0))
    ]


def test_what_members_said_before_they_had_a_step_names_no_boundary() -> None:
    """Their ranks were about to load the checkpoint; a boundary that members are past is never copied at."""
    world = World(groups=2)
    for name in ("g0", "g1"):
        world.hello(name)
        world.beat(name, 0, "start")
    for name, step in (("g0", 7), ("g1", 5)):
        world.join(name, fingerprint=f"after {step}", step=step)
    for name, step in (("g0", 7), ("g1", 5)):
        world.promise(name, begins=step)
    assert world.told("g1", m.Heal)[-1].step == world.told("g0", m.Copy)[-1].step == 9


def test_a_checkpoint_loaded_is_no_pace() -> None:
    """By it a member seems to make ten thousand steps between two beats; who joins would wait for as many."""
    world = World(groups=2, minimum=1)
    for name in ("g0", "g1"):
        world.hello(name, start_window_s=1.0)
    world.pass_s(0.5, {"g0": 0})
    world.join("g0", fingerprint="after", step=10_000)
    world.pass_s(1.0, {"g0": 10_000})
    world.promise("g0", begins=10_000)
    world.pass_s(0.25, {"g0": 10_000})
    world.join("g1")
    assert world.told("g1", m.Heal)[-1].step == 10_002
    world.pass_s(0.25, {"g0": 10_001})
    world.pass_s(0.25, {"g0": 10_002})
    assert world.machine.groups["g0"].pace_s == 0.25


def test_of_two_states_of_one_step_the_lowest_slots_is_taken() -> None:
    world = World(groups=2)
    for name in ("g0", "g1"):
        world.hello(name)
        world.join(name, fingerprint=name, step=7)
    for name in ("g0", "g1"):
        world.promise(name, begins=7)
    assert world.newest.groups == ("g0",)
    world.pass_s(0.25, {"g0": 7})
    assert world.told("g1", m.Heal)[-1].why == "g1 comes with another state than g0"


def test_what_a_group_has_loaded_that_comes_while_the_job_runs_means_nothing() -> None:
    world = World(groups=3, minimum=2)
    world.start("g0", "g1", "g2")
    world.die("g2", step=3)
    for name in ("g0", "g1"):
        world.promise(name, step=2)
    world.hello("g2/i2")
    world.join("g2/i2", fingerprint="after 90", step=90)
    world.pass_s(0.25, {"g0": 3, "g1": 3})
    assert not world.told("g2/i2", m.Refused) and not world.is_asked("g2/i2")
    heal = world.told("g2/i2", m.Heal)[-1]
    assert heal.step == 5 and heal.why == "g2 comes with the state before step 90"


def test_a_resumed_job_that_has_committed_nothing_recovers_at_its_first_step() -> None:
    world = World(groups=3)
    arrive_with(world, g0=7, g1=7, g2=7)
    world.die("g2", step=7)
    for name in ("g0", "g1"):
        world.promise(name, begins=7, held=world.shares(name)[name])
    activate = world.activate("g0")
    assert activate.membership.groups == ("g0", "g1") and activate.first_step == 7 and not activate.donors
    world.die("g1", step=7)
    world.promise("g0", step=7)
    assert world.activate("g0").first_step == 8


def test_that_nothing_was_committed_at_a_later_step_than_0_is_no_progress() -> None:
    """The lighthouse dies: its log does not say where the job began. The first step fails again and again."""
    world = World(groups=2)
    arrive_with(world, g0=7, g1=7)
    world.restart()
    for name in ("g0", "g1"):
        world.hello(name, known=world.newest, promised=1, acknowledged=world.term)
        world.join(name, fingerprint="after 7", step=7)
    for number in range(4):
        world.fail("g0", step=7, error=f"failure {number}")
        for name in ("g0", "g1"):
            world.promise(name, begins=7, held=(0,) if name == "g0" else (1,))
    assert world.reason("g0") == "3 recoveries in a row without a commit; first cause: g0: failure 0"


def test_who_is_one_entry_behind_the_first_of_a_resumed_job_fetches_it() -> None:
    world = World(groups=2)
    arrive_with(world, g0=7, g1=7)
    world.fail("g1", step=7)
    world.promise("g0", step=7)
    world.promise("g1", begins=7)
    activate = world.activate("g1")
    assert activate.first_step == 8 and activate.donors == (m.Donor("g1", "g0"),)
    assert activate.entry == Entry(epoch(1), 7)


def test_a_job_whose_run_is_over_begins_with_nothing_to_compute() -> None:
    """A finished run is started again from its last checkpoint: the groups meet, close it, and end well."""
    world = World(groups=2)
    for name in ("g0", "g1"):
        world.hello(name)
        world.join(name, fingerprint="the end", step=40)
    for name in ("g0", "g1"):
        world.promise(name, begins=40, total=0)
    assert world.activate("g0").first_step == 40 and world.shares("g0") == {"g0": (), "g1": ()}
    world.say("g0", m.Finished(world.newest.epoch, 40))
    assert world.machine.stopped is not None and world.machine.stopped.ok


# ---------------------------------------------------------------- a group


def test_a_group_says_at_which_step_its_ranks_begin() -> None:
    world = GroupWorld(ranks=2)
    world.connect()
    world.ready(TOTAL, 7, 7)
    assert world.said(m.Join)[-1].step == 7
    world.prepare(1)
    promise = world.said(m.Promise)[-1]
    assert promise.last == origin(7) and promise.total == TOTAL and not promise.healed
    first = membership(1, "g0", "g1")
    world.hears(m.Activate(first, 7, TOTAL, (m.Share("g1", (8, 9)),), (), origin(7), m.FIRST_EPOCH))
    answer = world.answer()
    assert (answer.verdict, answer.step, answer.plan.share, answer.plan.adopt) == ("recover", 7, (8, 9), None)
    said = [say.line for say in world.pushed(0, local.Say)]
    assert said == ["the job begins at step 7, from the state that this group was started with"]
    world.vote_all("reduced", 7, at=1)
    assert world.machine.last == Entry(epoch(1), 7) and world.machine.step == 8


def test_ranks_that_resume_at_different_steps_end_the_group_with_one_line() -> None:
    world = GroupWorld(ranks=3)
    world.connect()
    world.ready(TOTAL, 7, 7, 5)
    (end,) = world.ended
    assert end.exit_code == exits.REFUSED
    assert end.reason == "the ranks of this group resume at different steps: rank 0 at step 7, rank 2 at step 5"
    assert not world.said(m.Join)


def test_a_joiner_forgets_the_step_that_it_came_with() -> None:
    """It has the state before the job's first step, 3, and says so; it came with a checkpoint of step 90."""
    world = GroupWorld()
    world.connect()
    world.ready(TOTAL, 90)
    world.hears(m.Heal(3, membership(1, "g0", "g2").members))
    assert world.answer().verdict == "heal"
    world.rank_says(0, local.Vote(epoch=0, step=3, outcome="healed", next_total=TOTAL, entry=(0, 0, "")))
    assert (world.answer().verdict, world.answer().step) == ("go", 3)
    world.prepare(2)
    promise = world.said(m.Promise)[-1]
    assert promise.last == origin(3) and promise.healed


def test_a_joiner_of_a_job_at_step_0_has_no_entry_whatever_it_came_with() -> None:
    world = GroupWorld()
    world.connect()
    world.ready(TOTAL, 90)
    world.hears(m.Heal(0, membership(1, "g0", "g2").members))
    world.rank_says(0, local.Vote(epoch=0, step=0, outcome="healed", next_total=TOTAL))
    world.prepare(2)
    assert world.said(m.Promise)[-1].last is None and world.machine.step == 0
