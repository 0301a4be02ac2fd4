"""How a job begins: who is let in, what the first epoch needs, and who is refused with which words."""

from __future__ import annotations

import pytest
from world import SAME, World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Term


def test_the_first_epoch_needs_all_configured_groups() -> None:
    world = World(groups=3)
    world.arrive("g0", "g1")
    world.pass_s(60, {"g0": 0, "g1": 0})
    assert not world.is_asked("g0")
    assert world.reason("g0") == "1 more group: the first epoch needs 3"
    world.arrive("g2")
    assert [world.is_asked(g) for g in ("g0", "g1", "g2")] == [True] * 3
    world.promise("g0")
    world.promise("g1")
    assert not world.told("g0", m.Activate)
    world.promise("g2")
    activate = world.activate("g0")
    assert (activate.membership.groups, activate.first_step, activate.total) == (("g0", "g1", "g2"), 0, 24)
    assert world.shares("g1") == {"g0": tuple(range(8)), "g1": tuple(range(8, 16)), "g2": tuple(range(16, 24))}
    assert world.activate("g1") == world.activate("g2") == activate


def test_a_hello_alone_does_not_count_until_all_ranks_have_registered() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.hello("g1")
    assert not world.is_asked("g0")
    world.join("g1")
    assert world.is_asked("g0") and world.is_asked("g1")


def test_after_the_start_window_the_minimum_is_enough_but_not_before() -> None:
    world = World(groups=3, minimum=2)
    world.arrive("g0", "g1", start_window_s=10.0)
    world.pass_s(9.75, {"g0": 0, "g1": 0})
    assert not world.is_asked("g0")
    world.pass_s(0.5, {"g0": 0, "g1": 0})
    world.promise_all()
    assert world.activate("g1").membership.groups == ("g0", "g1")


def test_the_start_window_does_not_start_a_job_below_its_minimum() -> None:
    world = World(groups=3, minimum=2)
    world.arrive("g0", start_window_s=1.0)
    world.pass_s(20)
    assert not world.is_asked("g0")


def test_a_group_that_dies_while_it_waits_to_join_does_not_count_for_ever() -> None:
    """Scenario 6: start R0 and kill it while it waits; start R1 and R2; the epoch is theirs."""
    world = World(groups=2, minimum=2)
    world.arrive("r0")
    world.cut("r0")
    world.arrive("r1", "r2")
    assert world.is_asked("r1") and world.is_asked("r2")
    world.promise_all()
    assert world.newest.groups == ("r1", "r2")


def test_who_falls_silent_while_it_waits_to_join_is_not_waited_for() -> None:
    """Its host is gone, or it has moved on to another lighthouse and the old stream has yet to break."""
    world = World(groups=2, minimum=2)
    world.arrive("r0", "r1")
    world.promise("r1")
    world.pass_s(4, {"r1": 0})
    assert world.machine.newest is None and world.reason("r1") == "1 more group: the first epoch needs 2"
    world.arrive("r2")
    for group in ("r1", "r2"):
        world.promise(group)
    assert world.newest.groups == ("r1", "r2")


def test_who_is_heard_again_after_its_silence_counts_again() -> None:
    world = World(groups=2, minimum=2)
    world.arrive("r0", "r1")
    world.promise("r1")
    world.pass_s(4, {"r1": 0})
    assert world.closed == ["r0"], "so that it sees that it is not counted on"
    world.arrive("r0")
    for group in ("r0", "r1"):
        world.promise(group)
    assert world.newest.groups == ("r0", "r1")


def test_a_group_that_returns_while_it_waits_to_join_counts_again() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.cut("g0")
    world.arrive("g1")
    assert not world.is_asked("g1")
    world.arrive("g0")
    assert world.is_asked("g0") and world.is_asked("g1")


def test_a_death_during_the_first_prepare_waits_for_all_groups_again() -> None:
    world = World(groups=3)
    world.arrive("g0", "g1", "g2")
    world.promise("g0")
    world.promise("g1")
    world.cut("g2")
    for group in ("g0", "g1"):
        world.promise(group)
    assert world.machine.newest is None, "the first epoch started with two of three configured groups"
    world.arrive("g2/i2")
    for group in ("g0", "g1", "g2/i2"):
        world.promise(group)
    assert world.newest.groups == ("g0", "g1", "g2")


def test_all_dying_during_the_first_prepare_leaves_no_half_recovery_behind() -> None:
    world = World(groups=3)
    world.arrive("g0", "g1", "g2")
    world.cut("g0", "g1", "g2")
    world.arrive("g0/i2")
    assert not world.is_asked("g0/i2"), "one of three groups is asked to start alone"


def test_the_start_window_counts_from_the_first_group_that_is_still_there() -> None:
    world = World(groups=2, minimum=1)
    world.arrive("g0", start_window_s=10.0)
    world.cut("g0")
    world.pass_s(60)
    world.arrive("g1", start_window_s=10.0)
    world.pass_s(1, {"g1": 0})
    assert not world.is_asked("g1"), "g1 starts alone at once, since g0 had come a minute ago"
    world.pass_s(10, {"g1": 0})
    assert world.is_asked("g1")


def test_the_end_of_its_stream_does_not_hide_why_a_group_died_while_it_waited() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.die("g0", "rank 0 exited 1 after ImportError: no module named x")
    world.cut("g0")
    gone = world.machine.groups["g0"].gone
    assert gone is not None and gone.cause == "rank 0 exited 1 after ImportError: no module named x"


# ---------------------------------------------------------------- refused


def test_a_second_incarnation_of_a_group_that_still_beats_is_refused_for_good() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.pass_s(1)
    world.hello("g0/i2")
    (refused,) = world.told("g0/i2", m.Refused)
    assert not refused.retry
    assert (
        refused.reason
        == "g0 is already run by incarnation g0i1, which still beats; end it first or choose another --group"
    )
    assert world.closed == ["g0/i2"] and world.noted("refused")[0]["incarnation"] == "i2"


def test_a_second_incarnation_of_a_silent_member_is_asked_to_retry_until_the_lease_has_passed() -> None:
    world = World(groups=2)
    world.start()
    world.pass_s(1, {"g0": 1, "g1": 1})
    world.cut("g0")
    world.hello("g0/i2")
    assert [r.retry for r in world.told("g0/i2", m.Refused)] == [True]
    world.forget_sent()
    world.pass_s(1.8, {"g1": 1})
    world.hello("g0/i2")
    assert [r.retry for r in world.told("g0/i2", m.Refused)] == [True]
    world.forget_sent()
    world.pass_s(0.4, {"g1": 1})
    world.hello("g0/i2")
    assert world.told("g0/i2", m.Welcome) and world.is_asked("g1"), "the rest goes on without the silent one"
    world.promise("g1", 0)
    assert world.newest.groups == ("g1",)
    world.join("g0/i2")
    assert world.told("g0/i2", m.Heal)


def test_a_second_incarnation_takes_the_place_of_one_that_ended_while_it_waited() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.cut("g0")
    world.arrive("g0/i2", "g1")
    world.promise("g0/i2")
    world.promise("g1")
    assert [(x.group, x.incarnation) for x in world.newest.members] == [("g0", "i2"), ("g1", "g1i1")]


def test_groups_that_want_different_numbers_are_refused_by_name() -> None:
    world = World(groups=3, minimum=2)
    world.arrive("g0")
    world.hello("g1", groups=2)
    assert world.reason("g1") == (
        "g1 asks for 2 groups with a minimum of 2, but g0 for 3 groups with a minimum of 2; give all groups the same"
    )
    world.hello("g2", minimum=1)
    assert "g2 asks for 3 groups with a minimum of 1, but g0 for 3" in world.reason("g2")
    world.hello("g2", spares=1)
    assert "g2 asks for 3 groups, 1 of them spares, with a minimum of 2, but g0 for 3 groups" in world.reason("g2")


@pytest.mark.parametrize(("groups", "minimum", "spares"), [(0, 1, 0), (2, 3, 0), (2, 0, 0), (2, 1, 2)])
def test_numbers_that_make_no_sense_are_refused(groups: int, minimum: int, spares: int) -> None:
    world = World()
    world.hello("g0", groups=groups, minimum=minimum, spares=spares)
    assert "1 <= minimum <= groups and 0 <= spares < groups must hold" in world.reason("g0")


def test_the_number_of_whoever_came_alone_and_went_binds_nobody() -> None:
    world = World()
    world.arrive("g0", groups=5)
    world.cut("g0")
    world.arrive("g1", "g2", groups=2)
    assert world.is_asked("g1") and world.is_asked("g2")


def test_a_group_whose_signature_differs_is_refused_with_the_difference() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.hello("g1")
    world.join("g1", {"w": "float32[3]", "microbatches of step 0": "24"})
    (refused,) = world.told("g1", m.Refused)
    assert not refused.retry
    assert refused.reason == (
        "g1 differs from g0: microbatches of step 0 is 24 in g1 and absent in g0; "
        "w is float32[3] in g1 and float32[2] in g0"
    )
    world.arrive("g2")  # the refused one does not count
    assert world.is_asked("g0") and world.is_asked("g2") and not world.is_asked("g1")


def test_who_waits_is_told_why_its_partner_was_refused_until_that_is_put_right() -> None:
    world = World(groups=3)
    world.arrive("g0")
    world.hello("g1")
    world.join("g1", {"w": "float32[3]"})
    world.pass_s(2, {"g0": 0})
    needs = "2 more groups: the first epoch needs 3"
    assert world.reason("g0") == f"{needs}; refused: g1 differs from g0: w is float32[3] in g1 and float32[2] in g0"
    world.hello("g1/i2")
    world.join("g1/i2")
    world.pass_s(2, {"g0": 0, "g1/i2": 0})
    assert world.reason("g0") == "1 more group: the first epoch needs 3"


def test_whoever_asks_for_another_job_is_named_to_those_who_wait_and_briefly() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.hello("g1", groups=7)
    world.pass_s(2, {"g0": 0})
    assert "; refused: g1 asks for 7 groups with a minimum of 1, but g0 for 2 groups" in world.reason("g0")
    world.hello("g" * 1000, groups=7)
    world.pass_s(2, {"g0": 0})
    assert len(world.reason("g0")) < 400


def test_a_difference_of_many_names_is_cut_short() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.hello("g1")
    world.join("g1", {f"p{i}": "x" for i in range(50)})
    assert world.reason("g1").count(" is ") == 5 and world.reason("g1").endswith("and 46 more")


def test_messages_of_a_stream_that_was_replaced_have_no_effect() -> None:
    world = World(groups=2)
    world.start()
    old = world.connections["g0"]
    world.hello("g0")
    assert world.closed == ["g0"]
    world._carry_out(world.machine.received(old, "g0", m.Died("late", 0, "", 0), world.now))
    world._carry_out(world.machine.disconnected(old, world.now))
    world.fail("g1")
    assert world.is_asked("g0") and world.is_asked("g1")


def test_joining_twice_changes_nothing() -> None:
    world = World(groups=2)
    world.arrive("g0")
    world.join("g0", {"other": "signature"})
    world.hello("g1")
    world.join("g1", SAME)
    assert not world.told("g1", m.Refused) and world.is_asked("g1")


def test_the_event_log_can_tell_a_first_epoch_by_its_cause() -> None:
    world = World(3)
    world.start()
    assert [note["cause"] for note in world.noted("activated")] == [m.FIRST_EPOCH]


def test_a_recovery_of_a_term_that_has_risen_is_asked_anew() -> None:
    """r1 has obeyed another lighthouse meanwhile: what the lower term asks for is void for it."""
    world = World(groups=2)
    world.arrive("r0", "r1")
    first = world.asked("r1")
    world.promise("r0")
    world.cut("r1")
    world.arrive("r1", acknowledged=Term(first.term.number, "zz"))
    asked = world.asked("r1")
    assert asked.term > Term(first.term.number, "zz") and asked.number > first.number
    world.promise_all()
    assert world.newest.groups == ("r0", "r1")
