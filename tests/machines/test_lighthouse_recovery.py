"""Prepare, promise, activate after something broke: who goes on, at which step, with which microbatches and entry."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, Term


def test_a_failed_reduce_with_nobody_dead_ends_the_epoch_and_keeps_all() -> None:
    world = World()
    first = world.start()
    world.fail("g1", 3, "injected")
    assert world.asked("g0") == Epoch(2, Term(1, "lh"))
    world.promise_all(2, {"g0": tuple(range(8)), "g1": tuple(range(8, 16)), "g2": tuple(range(16, 24))})
    activate = world.activate("g2")
    assert activate.membership.groups == ("g0", "g1", "g2") and activate.membership.base == first
    assert activate.first_step == 3 and activate.entry == Entry(first, 2) and not activate.donors
    assert world.shares("g0") == {"g0": tuple(range(8)), "g1": tuple(range(8, 16)), "g2": tuple(range(16, 24))}
    assert activate.cause == "g1 reported: injected"


def test_each_number_is_logged_before_it_is_spoken_of_and_rises() -> None:
    """`World` asserts the order at every action; here is that it has something to assert."""
    world = World()
    world.start()
    world.fail("g0")
    world.die("g2")
    world.promise("g0", 0)
    world.promise("g1", 0)
    kinds = [(type(r).__name__, getattr(r, "number", None) or r.membership.epoch.number) for r in world.logged]
    assert kinds == [("Promised", 1), ("Activated", 1), ("Promised", 2), ("Promised", 3), ("Activated", 3)]


def test_a_death_during_a_recovery_starts_over_with_a_higher_number_and_new_promises() -> None:
    world = World(groups=4)
    world.start()
    world.die("g3")
    second = world.asked("g0")
    world.promise("g0", 4)
    world.promise("g1", 4)
    world.cut("g2")
    third = world.asked("g0")
    assert third.number == second.number + 1
    world.say("g0", m.Promise(second, world.newest, (), Entry(world.newest.epoch, 4), (), 24))  # a late one of before
    world.promise("g1", 4)
    assert world.newest.epoch.number == 1, "a promise to the number before counts no more"
    world.promise("g0", 4)
    assert world.newest.groups == ("g0", "g1") and world.newest.epoch == third


def test_a_return_before_the_activation_starts_over_with_the_one_who_returned() -> None:
    world = World()
    world.start()
    world.cut("g2")
    world.fail("g0", suspects=("g2",))
    second = world.asked("g0")
    world.promise("g0", 4)
    world.hello("g2", known=world.newest)
    third = world.asked("g2")
    assert third.number == second.number + 1 == world.asked("g0").number
    for group in ("g0", "g1", "g2"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1", "g2") and not world.told("g2", m.Fence)


def test_promises_of_who_was_not_asked_or_for_another_epoch_do_not_count() -> None:
    world = World()
    world.start()
    world.fail("g0")
    world.promise("g0", 0)
    world.promise("g1", 0)
    world.say("g2", m.Promise(Epoch(1, Term(1, "lh")), None, (), None, (), 24))
    world.say("g2", m.Promise(Epoch(2, Term(9, "lh")), None, (), None, (), 24))
    assert world.machine.recovery is not None and world.machine.recovery.missing == ("g2",)


def test_a_member_one_behind_fetches_the_entry_by_its_name_from_who_has_it() -> None:
    world = World()
    first = world.start()
    world.fail("g2", 5)
    world.promise("g0", 5, held=tuple(range(8)))
    world.promise("g1", 4, held=tuple(range(8, 16)))  # what it holds is for the step that is done already
    world.promise("g2", 4, held=tuple(range(16, 24)))
    activate = world.activate("g1")
    assert activate.first_step == 6 and activate.entry == Entry(first, 5)
    assert activate.donors == (m.Donor("g1", "g0"), m.Donor("g2", "g0"))
    assert world.shares("g1") == {"g0": tuple(range(8)), "g1": tuple(range(8, 16)), "g2": tuple(range(16, 24))}


def test_two_ahead_and_one_behind() -> None:
    world = World()
    world.start()
    world.fail("g1", 5)
    world.promise("g0", 5, held=(0, 1, 2))
    world.promise("g1", 4, held=(9,))
    world.promise("g2", 5, held=(20, 21))
    activate = world.activate("g0")
    assert activate.donors == (m.Donor("g1", "g0"),) and activate.first_step == 6
    shares = world.shares("g0")
    assert shares["g0"][:3] == (0, 1, 2) and shares["g2"][:2] == (20, 21)
    assert sorted(k for share in shares.values() for k in share) == list(range(24))
    assert [len(share) for share in shares.values()] == [8, 8, 8]


def test_donors_share_the_late() -> None:
    world = World(groups=4)
    world.start()
    world.fail("g0", 5)
    for group, step in (("g0", 4), ("g1", 5), ("g2", 4), ("g3", 5)):
        world.promise(group, step)
    assert world.activate("g0").donors == (m.Donor("g0", "g1"), m.Donor("g2", "g3"))


def test_who_lags_by_more_than_one_entry_is_left_out() -> None:
    world = World()
    world.start()
    world.fail("g0", 5)
    world.promise("g0", 5)
    world.promise("g1", 5)
    world.promise("g2", 3)
    assert world.activate("g0").membership.groups == ("g0", "g1")
    assert world.reason("g2") == "it lags by more than one entry"


def test_two_entries_for_one_step_stop_the_job() -> None:
    world = World()
    first = world.start()
    world.fail("g0", 5)
    world.promise("g0", 5, entry=first)
    world.promise("g1", 5, entry=Epoch(7, Term(3, "elsewhere")))
    world.promise("g2", 4)
    (stop,) = world.told("g0", m.Stop)
    assert not stop.ok
    assert stop.reason == (
        "the job contradicts itself and must not go on: two entries for one step: "
        "step 5 of e1/1@lh; step 5 of e7/3@elsewhere"
    )
    assert world.told("g1", m.Stop) and world.told("g2", m.Stop) and not world.told("g0", m.Activate)


def test_two_members_that_hold_the_same_microbatch_stop_the_job() -> None:
    world = World()
    world.start()
    world.fail("g0", 5)
    world.promise("g0", 4, held=(0, 1, 2))
    world.promise("g1", 4, held=(2, 3))
    world.promise("g2", 4)
    assert "g0 and g1 both hold microbatch 2" in world.reason("g0")


def test_members_that_disagree_on_the_size_of_a_step_stop_the_job() -> None:
    world = World()
    world.start()
    world.fail("g0", 5)
    world.promise("g0", 4, total=24)
    world.promise("g1", 4, total=12)
    world.promise("g2", 4, total=24)
    assert "groups disagree on the microbatches of step 5: [12, 24]" in world.reason("g0")


def test_below_the_minimum_it_waits_and_says_for_whom() -> None:
    world = World(groups=3, minimum=2)
    world.start()
    world.die("g2")
    world.die("g1")
    world.promise("g0", 4)
    world.pass_s(5, {"g0": 5})
    assert not world.told("g0", m.Activate)
    assert world.reason("g0") == "any group: at least 2 groups"
    assert world.noted("waiting")[-1]["since_s"] >= 4


def test_while_promises_are_missing_it_says_whose() -> None:
    world = World()
    world.start()
    world.fail("g0")
    world.promise("g0", 0)
    world.pass_s(1.5, {"g0": 1, "g1": 1, "g2": 1})
    assert world.reason("g0") == "g1, g2: their promise"
    assert len([n for n in world.noted("waiting") if n["whom"] == "g1, g2"]) == 1, "once per second, not per tick"


def test_the_activation_is_repeated_until_the_beats_show_it() -> None:
    world = World()
    world.start()
    world.fail("g0")
    world.promise_all(0)
    world.forget_sent()
    world.pass_s(2, {"g0": 1, "g1": 1})  # g2 beats in the old epoch
    assert not world.told("g0", m.Activate)
    assert len(world.told("g2", m.Activate)) == 2
    world.forget_sent()
    world.beat("g2", 1)
    world.pass_s(3, {"g0": 1, "g1": 1})
    assert not world.told("g2", m.Activate)


def test_left_out_means_fenced_and_only_after_the_activation() -> None:
    world = World()
    world.start()
    world.beat("g2", 3)
    world.pass_s(2.5, {"g0": 3, "g1": 3}, waiting_ms=2600)
    assert world.noted("group_lost") and not world.told("g2", m.Fence)
    world.promise("g0", 2)
    assert not world.told("g2", m.Fence)
    world.promise("g1", 2)
    assert world.told("g2", m.Fence)


def test_who_was_fenced_is_fenced_once() -> None:
    world = World()
    world.start()
    world.die("g2")
    world.promise_all(0)
    world.fail("g0")
    world.promise_all(0)
    world.fail("g0")
    world.promise_all(0)
    assert [note["group"] for note in world.noted("fenced")] == ["g2"]


# ---------------------------------------------------------------- again and again


def three_failed_recoveries(world: World, **suspects: tuple[str, ...]) -> None:
    """The epoch breaks four times at one step; each group reports whom it suspects."""
    for _ in range(4):
        for group, blamed in suspects.items():
            if group in world.newest.groups:
                world.fail(group, 5, f"{group} lost its connection", blamed)
        if world.machine.recovery is not None:
            world.promise_all(4)


def test_three_recoveries_without_a_commit_leave_out_whom_most_failures_name() -> None:
    world = World()
    world.start()
    three_failed_recoveries(world, g0=("g2",), g1=("g2",), g2=("g0",))
    assert "named by most of 3 failed recoveries; first cause: g0: g0 lost its connection" in world.reason("g2")
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert world.newest.groups == ("g0", "g1")


def test_three_recoveries_without_a_commit_and_nobody_to_blame_stop_with_the_first_cause() -> None:
    world = World(groups=2)
    world.start()
    three_failed_recoveries(world, g0=("g1",), g1=("g0",))
    (stop,) = world.told("g0", m.Stop)
    assert (
        not stop.ok and stop.reason == "3 recoveries in a row without a commit; first cause: g0: g0 lost its connection"
    )


def test_who_alone_fails_by_itself_every_time_is_left_out_whomever_the_others_name() -> None:
    """Its abort breaks the others' connections, and they name each other for it."""
    world = World()
    world.start()
    three_failed_recoveries(world, g1=("g1",), g0=("g2",), g2=("g0",))
    assert "alone the cause of 3 failed recoveries; first cause: g1: g1 lost its connection" in world.reason("g1")
    world.promise("g0", 4)
    world.promise("g2", 4)
    assert world.newest.groups == ("g0", "g2")


def test_if_all_fail_by_themselves_the_job_stops_with_the_first_cause() -> None:
    world = World()
    world.start()
    three_failed_recoveries(world, g1=("g1",), g0=("g0",), g2=("g2",))
    (stop,) = world.told("g0", m.Stop)
    assert not stop.ok and "without a commit; first cause: g1: g1 lost its connection" in stop.reason


def test_nobody_is_left_out_if_too_few_would_be_left() -> None:
    world = World(groups=2, minimum=2)
    world.start()
    three_failed_recoveries(world, g1=("g1",))
    (stop,) = world.told("g0", m.Stop)
    assert not stop.ok and "without a commit; first cause: g1: g1 lost its connection" in stop.reason


def test_a_commit_between_makes_the_count_start_over() -> None:
    world = World(groups=2)
    world.start()
    for step in range(5, 15):
        world.fail("g0", step)
        world.promise_all(step - 1)
        world.beat("g0", step + 1)
        assert not world.told("g0", m.Stop)


def test_beats_that_show_no_commit_do_not_make_the_count_start_over() -> None:
    world = World(groups=2)
    world.start()
    for _ in range(4):
        world.beat("g0", 5)
        world.fail("g0", 5)
        world.promise_all(4)
    assert world.told("g0", m.Stop)


def test_the_first_cause_is_also_named_when_it_was_a_death() -> None:
    world = World(groups=5)
    world.start()
    for group in ("g4", "g3", "g2", "g1"):
        world.die(group, cause=f"rank 0 of {group} was killed by SIGKILL")
        world.promise_all(4)
    assert not world.reason("g0").endswith("first cause: "), "the stop names no cause"


# ---------------------------------------------------------------- epochs that only promises name


def test_an_epoch_prepared_on_the_newest_must_be_heard_of_too() -> None:
    """The rest of a planned leave may have gone on alone: without one of them nobody knows."""
    world = World()
    base = world.newest if world.start() else None
    assert base is not None
    prepared = Membership(Epoch(9, Term(1, "lh")), tuple(x for x in base.members if x.group != "g2"), base.epoch)
    world.die("g0")
    world.cut("g1")
    world.promise("g2", 4, prepared=(prepared,))
    world.pass_s(10, {"g2": 5})
    assert not world.told("g2", m.Activate), "g2 goes on although g0 and g1 may have gone on without it"


def test_the_newest_epoch_that_a_promise_names_is_the_one_that_counts() -> None:
    """The entries have put a change in force that this lighthouse did not prepare."""
    world = World()
    world.start()
    base = world.newest
    newer = Membership(Epoch(2, Term(1, "lh")), tuple(x for x in base.members if x.group != "g2"), base.epoch)
    world.hello("g0", known=base, prepared=(newer,), acknowledged=Term(1, "lh"))
    world.say("g0", m.Join(("g0:2",)))
    world.die("g2")
    world.promise("g0", 5, known=newer, entry=base.epoch)
    world.promise("g1", 5, known=newer, entry=base.epoch)
    assert world.newest.base == newer.epoch and world.newest.groups == ("g0", "g1")
