"""When a job may start anew, and who may be taken for gone: what simulated histories found, as transcripts."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Member, Membership


def running(groups: int = 2, minimum: int = 1) -> tuple[World, Membership]:
    world = World(groups, minimum)
    world.start()
    return world, world.newest


def test_silence_of_all_members_does_not_start_the_job_anew() -> None:
    """g0 trains on, cut off; g1 died. Whoever comes with the word of a creator would start step 0 beside it."""
    world, membership = running()
    world.cut("g0", "g1")
    world.pass_s(10)
    world.arrive("g1/i2", start_window_s=1.0)
    world.pass_s(5)
    assert world.newest == membership and not world.is_asked("g1/i2") and not world.told("g1/i2", m.Heal)
    assert world.reason("g1/i2").startswith("g0: they may be training")
    world.arrive("g0", known=membership)
    world.tick()
    world.promise("g0", 40)
    world.pass_s(1, {"g0": 42})
    assert world.newest.groups == ("g0",) and world.told("g1/i2", m.Heal), "one lineage"


def test_the_job_starts_anew_once_every_member_was_started_again() -> None:
    world, membership = running()
    world.cut("g0", "g1")
    world.pass_s(10)
    world.arrive("g0/i2")
    assert world.newest == membership
    world.arrive("g1/i2")
    assert world.asked("g0/i2") == world.asked("g1/i2")
    world.promise("g0/i2")
    world.promise("g1/i2")
    assert world.newest.base is None and [member.incarnation for member in world.newest.members] == ["i2", "i2"]


def test_joiners_that_wait_start_the_job_anew_when_the_last_member_dies() -> None:
    world, _ = running()
    world.die("g1", step=3)
    world.promise("g0", 2)
    world.arrive("g1/i2")
    world.die("g0", step=5)
    world.pass_s(1)
    world.arrive("g0/i2")
    assert world.asked("g1/i2") == world.asked("g0/i2"), "its hello and its join were not forgotten"


def test_last_words_do_not_bring_a_job_back_whose_members_have_all_said_that_they_are_dead() -> None:
    """g0 dies before it has read of the epoch without g1, and its last words name g1 a member."""
    world, first = running()
    world.die("g1", step=3)
    world.promise("g0", 2)
    world.arrive("g1/i2")
    world.die("g0", step=3)
    world.hello("g0", known=first, died=m.Died("rank 0 was killed by SIGKILL", 0, "reduce", 3))
    world.arrive("g0/i2")
    assert world.asked("g1/i2") == world.asked("g0/i2"), "nobody waits for g1/i1, which has said that it is dead"
    world.promise("g0/i2")
    world.promise("g1/i2")
    assert world.newest.base is None and [member.incarnation for member in world.newest.members] == ["i2", "i2"]


def test_a_member_evicted_for_its_silence_is_not_known_to_be_gone() -> None:
    """g1 was silent while g0 stood; then g0 died. g1 may train on alone."""
    world, membership = running()
    world.cut("g1")
    world.fail("g0", 5)
    world.die("g0", step=5)
    world.arrive("g0/i2", start_window_s=1.0)
    world.pass_s(10)
    assert world.newest == membership


def test_who_was_left_out_elsewhere_is_fenced_and_does_not_heal() -> None:
    world, first = running(groups=3)
    world.restart(log=False)
    later = Membership(first.epoch.__class__(5, first.epoch.term), first.members[:2], first.epoch)
    world.arrive("g0", known=later)
    world.arrive("g2", known=first)
    assert "gone on without it" in world.reason("g2") and not world.told("g2", m.Heal)


def test_who_is_here_is_fenced_when_a_newer_epoch_without_it_is_learnt() -> None:
    world, first = running(groups=3)
    world.restart(log=False)
    later = Membership(first.epoch.__class__(5, first.epoch.term), first.members[:2], first.epoch)
    world.arrive("g2", known=first)
    assert not world.told("g2", m.Fence)
    world.arrive("g0", known=later)
    assert "gone on without it" in world.reason("g2")


def test_who_leaves_by_a_planned_change_is_not_fenced_by_a_lighthouse_that_learns_of_it() -> None:
    world, first = running(groups=3)
    world.restart(log=False)
    later = Membership(first.epoch.__class__(5, first.epoch.term), first.members[:2], first.epoch)
    world.arrive("g2", known=first, prepared=(later,))
    world.arrive("g0", known=later)
    assert not world.told("g2", m.Fence) and not world.told("g2", m.Heal)


def test_who_has_left_is_not_asked_for_a_first_epoch() -> None:
    """It only waits for its last reduce to close; the lighthouse has lost its log."""
    world, first = running(groups=3)
    world.restart(log=False)
    left = Membership(first.epoch.__class__(5, first.epoch.term), first.members[:2], first.epoch)
    world.arrive("g2", known=left)
    assert world.newest == left and not world.is_asked("g2") and not world.told("g2", m.Heal)


def test_a_new_incarnation_has_not_left_when_a_planned_change_without_its_group_comes_into_force() -> None:
    world, _ = running(groups=3)
    world.say("g2", m.Leave("SIGTERM"))
    planned = world.planned("g0")
    world.cut("g2")
    world.pass_s(3, {"g0": 5, "g1": 5})
    world.arrive("g2/i2")
    world.beat("g0", 6, epoch=planned.epoch.number)
    for group in ("g0", "g1"):
        world.promise(group, 5)
    world.pass_s(1, {"g0": 7, "g1": 7})
    assert world.told("g2/i2", m.Heal), "it is a joiner like any other"


def test_a_member_that_its_own_manager_calls_gone_need_not_consent_to_a_new_lighthouse() -> None:
    world, membership = running(groups=3)
    world.restart(log=False)
    for group in ("g0", "g1", "g2"):
        if group != "g2":
            world.arrive(group, known=membership)
    world.hello("g2", known=membership)
    world.machine.reigns = False  # as if g2 had acknowledged another lighthouse since
    world.die("g2", step=5)
    for group in ("g0", "g1"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1")


def test_a_joiner_that_lost_the_entries_before_the_switch_is_gone_after_it() -> None:
    """Members carry the flag on; it will never apply the entry that makes it one, and they would stand for it."""
    world = World(3)
    world.start()
    world.die("g2", step=5)
    for group in ("g0", "g1"):
        world.promise(group, 4)
    world.arrive("g2/i2")
    world.beat("g2/i2", 9, "follow", epoch=0)
    planned = world.planned("g0")
    world.say("g2/i2", m.Lost("no donor has the entry that follows"))
    world.forget_sent()
    for group in ("g0", "g1"):
        world.beat(group, 12, epoch=planned.epoch.number)
    assert world.is_asked("g0") and world.noted("group_lost")[-1]["group"] == "g2"


def test_below_the_minimum_before_the_first_step_the_boundary_is_that_before_it() -> None:
    """Boundary 0 is one, and not the word that nobody needs a copy."""
    world = World(3, minimum=3)
    world.start()
    world.die("g2")
    for group in ("g0", "g1"):
        world.promise(group)
    world.arrive("g2/i2")
    (copy,) = world.told("g0", m.Copy)
    (heal,) = world.told("g2/i2", m.Heal)
    assert copy.step == heal.step == 0 != m.RELEASE
    assert [donor.__class__ for donor in heal.donors] == [Member, Member]


def test_a_joiner_that_has_not_switched_does_not_go_on_alone() -> None:
    """The member that took it in died; what that one committed alone is final, and the joiner lags behind it."""
    world = World(2)
    world.start()
    world.die("g1", step=5)
    world.promise("g0", 4)
    world.arrive("g1/i2")
    world.beat("g1/i2", 9, "follow", epoch=0)
    planned = world.planned("g0")
    before = planned.base
    world.beat("g0", 12, epoch=planned.epoch.number)
    world.die("g0", step=12)
    assert world.newest == planned
    epoch = world.asked("g1/i2")
    last = Entry(before, 9)
    world.say("g1/i2", m.Promise(epoch, None, (planned,), last, (), 24))
    world.pass_s(1)
    assert not world.told("g1/i2", m.Activate) and world.newest == planned


def test_a_planned_change_that_a_lost_log_held_is_taken_from_the_beat_that_shows_it() -> None:
    world, first = running(groups=3)
    planned = Membership(first.epoch.__class__(4, first.epoch.term), first.members[:2], first.epoch)
    world.restart(log=False)
    for group in ("g0", "g1", "g2"):
        world.arrive(group, known=first, prepared=(planned,))
    assert world.newest == first
    world.beat("g0", 7, epoch=4)
    assert world.newest == planned and world.noted("took_over")[-1]["epoch"] == planned.epoch


def test_who_does_not_have_all_members_prepares_nothing() -> None:
    """Another lighthouse may have them, and give the same number to another change."""
    world, _ = running(groups=3)
    world.cut("g1")
    world.say("g2", m.Leave("SIGTERM"))
    assert not [p for p in world.told("g0", m.Prepare) if p.planned is not None]
    world.restart()
    for group in ("g0", "g1", "g2"):
        world.arrive(group, known=world.newest)
    world.say("g2", m.Leave("SIGTERM"))
    assert world.planned("g0").groups == ("g0", "g1")


def test_a_leaver_is_no_joiner_when_a_promise_shows_the_change_that_let_it_go() -> None:
    world, first = running(groups=3)
    world.say("g2", m.Leave("SIGTERM"))
    planned = world.planned("g0")
    world.fail("g2", 5)
    world.promise("g0", 5, known=planned, entry=first.epoch)
    world.promise("g1", 4, prepared=(planned,))
    world.promise("g2", 4, prepared=(planned,))
    for group in ("g0", "g1"):
        world.promise(group, 5, known=planned, entry=first.epoch)
    world.pass_s(1, {"g0": 7, "g1": 7})
    assert world.newest.groups == ("g0", "g1") and not world.told("g2", m.Heal)
