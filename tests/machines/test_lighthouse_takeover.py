"""Several lighthouses: who reigns, who takes over and when, who is sent on, and whose word counts for the dead."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Superseded
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term

A = Term(1, "a")
KNOWN = Membership(Epoch(1, A), tuple(Member(f"g{i}", f"g{i}i1", f"g{i}:1", (f"g{i}:2",)) for i in range(3)))


def standby(groups: int = 3) -> World:
    """Another lighthouse, whose log is empty, beside `A`."""
    return World(groups, term=Term(1, "b"))


def call(world: World, *groups: str, place: int = 2, known: Membership | None = KNOWN, acknowledged: Term = A) -> None:
    """Managers call that have other addresses."""
    for group in groups:
        world.arrive_if_taken(group, known=known, acknowledged=acknowledged, place=place)


def come(world: World, *groups: str, known: Membership = KNOWN, acknowledged: Term = A) -> None:
    """Managers come that have no other address."""
    for group in groups:
        world.arrive(group, known=known, acknowledged=acknowledged)


def fail_and_promise(world: World, *groups: str) -> None:
    world.fail(groups[0], 5)
    for group in groups:
        world.promise(group, 4)


# ---------------------------------------------------------------- when it reigns


def test_a_hello_is_no_acknowledgement() -> None:
    """g2's stream breaks before it has read the `Welcome`: it goes on obeying the other lighthouse."""
    world = standby()
    come(world, "g0", "g1")
    world.hello("g2", reads=False, known=KNOWN, acknowledged=A)
    world.cut("g2")
    fail_and_promise(world, "g0", "g1")
    world.pass_s(30, {"g0": 5, "g1": 5}, waiting_ms=30_000)
    assert not world.told("g0", m.Activate), "g2 may be training under A, which may leave out g0 and g1"


def test_it_takes_over_once_every_member_has_acknowledged_and_says_so() -> None:
    world = standby()
    come(world, "g0", "g1")
    assert not world.noted("took_over")
    come(world, "g2")
    assert [note["members"] for note in world.noted("took_over")] == [["g0", "g1", "g2"]]
    world.cut("g2")
    fail_and_promise(world, "g0", "g1")
    assert world.newest.groups == ("g0", "g1"), "now it may leave out"


def test_acknowledgements_need_not_be_there_at_one_time() -> None:
    world = standby()
    come(world, "g0")
    world.cut("g0")
    come(world, "g1", "g2")
    assert world.noted("took_over")


def test_an_acknowledgement_of_a_term_that_has_risen_since_is_void() -> None:
    """g2 has obeyed a term above ours: who acknowledged our lower one may have gone to that lighthouse since."""
    world = standby()
    come(world, "g0")
    world.cut("g0")
    come(world, "g1")
    come(world, "g2", acknowledged=Term(7, "a"))
    assert world.risen[-1] == Term(8, "b")
    assert world.told("g1", m.Welcome)[-1].term == Term(8, "b"), "who is here is asked anew"
    assert not world.noted("took_over")
    come(world, "g0")
    assert world.noted("took_over")


def test_who_loses_its_reign_does_not_get_it_back_by_a_restart() -> None:
    """g0 has obeyed b and come back; a restart of a with its log must not make it forget that."""
    world = World(3, term=A)
    world.start()
    known = world.newest
    world.cut("g1", "g2")
    world.arrive("g0", known=known, acknowledged=Term(2, "b"))
    assert any(isinstance(record, Superseded) for record in world.logged)
    acknowledged = world.told("g0", m.Welcome)[-1].term
    world.restart()
    world.term = world.machine.term = Term(acknowledged.number + 1, "a")
    come(world, "g0", known=known, acknowledged=acknowledged)
    world.fail("g0", 5)
    world.pass_s(30, {"g0": 5}, waiting_ms=30_000)
    world.promise("g0", 4)
    world.pass_s(30, {"g0": 5}, waiting_ms=60_000)
    assert not world.told("g0", m.Activate), "b may have left g0 out, and go on with g1 and g2"


def test_an_older_copy_of_the_log_does_not_reign() -> None:
    world = World(3, term=A)
    world.start()
    known = world.newest
    world.restart()
    world.term = world.machine.term = Term(2, "a")
    come(world, "g0", known=known, acknowledged=Term(5, "a"))
    world.fail("g0", 5)
    world.pass_s(30, {"g0": 5}, waiting_ms=30_000)
    world.promise("g0", 4)
    assert not world.told("g0", m.Activate) and world.risen[-1] == Term(6, "a")


def test_two_lighthouses_that_both_lack_somebodys_word_both_wait() -> None:
    a, b = World(3, term=A), standby()
    a.start()
    known = a.newest
    come(b, "g1", "g2", known=known)
    moved = b.told("g1", m.Welcome)[-1].term
    a.cut("g0", "g1", "g2")
    come(a, "g1", known=known, acknowledged=moved)  # back from b
    a.fail("g1", 5)
    fail_and_promise(b, "g2")
    for world, group in ((a, "g1"), (b, "g2")):
        world.pass_s(30, {group: 5}, waiting_ms=30_000)
        if world.is_asked(group):
            world.promise(group, 4)
        world.pass_s(30, {group: 5}, waiting_ms=60_000)
        assert world.machine.newest == known and not world.told(group, m.Activate)


def test_a_member_that_another_lighthouse_has_left_out_is_fenced_here() -> None:
    world = standby()
    newer = Membership(Epoch(2, A), KNOWN.members[:2], KNOWN.epoch)
    come(world, "g0", known=newer)
    come(world, "g2")
    assert world.told("g2", m.Fence) and not world.told("g2", m.Welcome)


def test_a_member_that_was_here_before_the_news_is_fenced_when_it_comes() -> None:
    world = standby()
    newer = Membership(Epoch(2, A), KNOWN.members[:2], KNOWN.epoch)
    come(world, "g2")
    come(world, "g0", known=newer)
    assert world.told("g2", m.Fence) and world.machine.newest == newer


def test_an_epoch_in_force_by_a_change_that_it_did_not_prepare_needs_the_newcomers_word() -> None:
    """g3 was taken in by the members' entries under A, and may be with A now."""
    world = standby(4)
    with_g3 = Membership(Epoch(2, A), (*KNOWN.members, Member("g3", "g3i1", "g3:1", ("g3:2",))), KNOWN.epoch)
    for group in ("g0", "g1", "g2"):
        world.arrive(group, known=KNOWN, acknowledged=A, prepared=(with_g3,))
    assert world.noted("took_over")
    world.fail("g0", 5)
    for group in ("g0", "g1", "g2"):
        world.promise(group, 4, known=with_g3, entry=KNOWN.epoch)
    world.pass_s(30, {"g0": 5, "g1": 5, "g2": 5}, waiting_ms=30_000)
    assert not world.told("g0", m.Activate) and world.reason("g0").startswith("g3: ")


def alone() -> tuple[World, Membership]:
    """A has just left g0 and g1 out; and the epoch before."""
    world = World(3, term=A)
    world.start()
    known = world.newest
    world.cut("g0", "g1")
    world.fail("g2", 5)
    world.pass_s(6, {"g2": 5}, waiting_ms=6000)
    world.promise("g2", 4)
    assert world.newest.groups == ("g2",)
    return world, known


def untold() -> tuple[World, Membership]:
    """A has left g0 and g1 out, and neither g2 nor anybody else has heard of it; they have all been at b since."""
    world, known = alone()
    world.cut("g2")
    return world, known


def test_an_epoch_that_was_logged_and_never_told_does_not_bring_the_reign_back() -> None:
    """Under b, g0 and g1 may have gone on without g2 from the epoch that g2 still knows."""
    world, known = untold()
    come(world, "g2", known=known, acknowledged=Term(2, "b"))
    for _ in range(100):
        world.beat("g2", 5, "reduce", 30_000, epoch=known.epoch.number)
        world.pass_s(0.25)
    if world.is_asked("g2"):
        world.promise("g2", 4, known=known)
    assert not world.noted("took_over") and world.newest.groups == ("g2",)
    assert world.reason("g2").startswith("g0, g1: ")
    come(world, "g0", known=known, acknowledged=Term(2, "b"))
    assert not world.told("g0", m.Fence), "it is not known who was left out"
    newer = Membership(Epoch(9, Term(2, "b")), known.members[:2], known.epoch)
    come(world, "g1", known=newer, acknowledged=Term(2, "b"))
    assert world.newest == newer and world.told("g2", m.Fence), "b has gone on with g0 and g1"


def test_once_all_that_may_be_concerned_obey_the_untold_epoch_counts() -> None:
    world, known = untold()
    come(world, "g0", "g1", "g2", known=known, acknowledged=Term(2, "b"))
    assert world.noted("took_over") and world.told("g0", m.Fence) and world.told("g1", m.Fence)
    world.promise("g2", 4, known=known)
    assert world.newest.groups == ("g2",)


def test_who_may_be_left_out_and_takes_itself_for_a_member_does_not_heal() -> None:
    """g2 is told of the epoch without g0 and g1 and has yet to show it; g0 has been at b since, and comes back."""
    world, known = alone()
    world.hello("g0", reads=False, known=known, acknowledged=Term(1, "b"))
    world.join("g0")
    world.pass_s(1)
    assert not world.told("g0", m.Fence) and not world.told("g0", m.Heal) and not world.told("g2", m.Copy)
    world.beat("g2", 5)
    world.acknowledge("g0", "g2")
    assert world.told("g0", m.Fence) and not world.told("g0", m.Heal)


def test_only_who_reigns_says_that_an_epoch_stands() -> None:
    """g0 was frozen; A may have left it out meanwhile."""
    world = standby()
    come(world, "g0", "g1")
    world.say("g0", m.Query(KNOWN.epoch))
    assert not world.told("g0", m.Stands)
    come(world, "g2")
    assert world.told("g0", m.Stands) == [m.Stands(KNOWN.epoch)]


# ---------------------------------------------------------------- a standby sends on


def test_a_standby_sends_on_until_every_member_has_called() -> None:
    world = standby()
    call(world, "g0", "g1", place=1)
    assert world.reason("g0") == "standby: takes over once it has heard g1, g2"
    assert world.reason("g1") == "standby: takes over once it has heard g2"
    assert not world.told("g0", m.Welcome), "nobody has acknowledged anything: A, if it lives, still reigns"
    call(world, "g2", "g0", "g1", place=1)
    assert world.noted("took_over") and world.machine.reigns


def test_a_call_long_ago_does_not_count() -> None:
    world = standby()
    call(world, "g0", "g1", place=1)
    world.pass_s(10)
    call(world, "g2", place=1)
    assert world.reason("g2") == "standby: takes over once it has heard g0, g1"


def test_a_call_before_the_epoch_was_known_does_not_count() -> None:
    """All looked for a place to begin, and found another one."""
    world = standby()
    call(world, "g0", "g2", place=2, known=None)
    call(world, "g1", place=2)
    assert world.reason("g1") == "standby: takes over once it has heard g0, g2"


def test_those_before_it_in_the_list_have_a_lease() -> None:
    world = standby()
    call(world, "g0", "g1", "g2", place=2)
    assert world.reason("g2").startswith("standby: all have called")
    world.pass_s(2)
    call(world, "g0", "g1", "g2", place=2)
    assert world.noted("took_over")


def test_a_take_over_that_does_not_come_about_lets_the_members_go() -> None:
    """g2 called here and then found A; g0 and g1 must not stay where nothing can be decided."""
    world = standby()
    call(world, "g2", "g0", "g1", "g0", place=1)
    assert world.told("g0", m.Welcome) and not world.noted("took_over")
    world.pass_s(10, {"g0": 5, "g1": 5})
    assert world.reason("g0") == "standby: takes over once it has heard g2" and "g0" in world.closed


def test_a_manager_without_another_address_is_taken_in_at_once() -> None:
    world = standby()
    call(world, "g0", place=0)
    assert world.told("g0", m.Welcome) and not world.told("g0", m.Refused)


def test_a_returning_group_does_not_wait_at_a_lighthouse_that_does_not_know_the_job() -> None:
    world = standby()
    call(world, "g2", place=1, known=None)
    assert world.reason("g2") == "standby: it knows no such job, and begins one once it has heard 2 more groups"


def test_a_new_job_begins_where_all_its_groups_call() -> None:
    world = World()
    call(world, "g0", "g1", "g2", "g0", "g1", place=1, known=None)
    world.promise_all()
    assert world.newest.groups == ("g0", "g1", "g2")


# ---------------------------------------------------------------- whose word counts for the dead


def test_a_dead_groups_own_manager_lets_the_standby_take_over() -> None:
    world = standby()
    come(world, "g0", "g1")
    world.fail("g0", 5)
    assert not world.noted("took_over")
    died = m.Died("rank 0 was killed by SIGKILL", 0, "reduce", 5)
    world.hello("g2", known=KNOWN, acknowledged=A, died=died)
    assert world.told("g2", m.Fence) and "g2" in world.closed
    assert [lost["detected_by"] for lost in world.noted("group_lost")] == ["manager"]
    for group in ("g0", "g1"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1") and world.noted("took_over")


def test_a_death_told_before_anybody_else_comes_counts_too() -> None:
    world = standby()
    world.hello("g2", known=KNOWN, acknowledged=A, died=m.Died("rank 0 exited 1", 0, "compute", 5))
    come(world, "g0", "g1")
    for group in ("g0", "g1"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1")


def test_the_operators_word_lets_the_standby_take_over_and_is_noted() -> None:
    world = standby()
    come(world, "g0", "g1")
    world.fail("g0", 5)
    world.pass_s(3, {"g0": 5, "g1": 5}, waiting_ms=3000)
    assert world.fence("g2", "ann@console") == ""
    (note,) = world.noted("operator_fenced")
    assert note == {"group": "g2", "incarnation": "g2i1", "by": "ann@console"}
    for group in ("g0", "g1"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1")
    world.hello("g2", known=KNOWN, acknowledged=A)
    assert "ann@console says that its processes are gone" in world.reason("g2")


def test_the_operators_word_is_refused_for_a_group_that_beats() -> None:
    world = standby()
    come(world, "g0", "g1", "g2")
    assert world.fence("g2", "ann") == "g2 was heard 0.0 s ago: it lives; end its processes first"
    assert not world.noted("operator_fenced") and not world.is_asked("g0")


def test_the_operators_word_is_refused_for_a_group_that_calls_at_the_standby() -> None:
    world = standby()
    call(world, "g0", "g1")
    world.pass_s(1)
    assert "it lives" in world.fence("g0", "ann")
    world.pass_s(5)
    assert world.fence("g0", "ann") == ""


def test_the_operators_word_is_refused_for_a_group_that_nobody_knows() -> None:
    world = World()
    world.start()
    assert world.fence("g7", "ann") == "job job has no group g7 here; it has g0, g1, g2"


def test_with_its_log_the_operators_word_saves_the_lease() -> None:
    world = World()
    world.start()
    world.cut("g2")
    world.pass_s(3, {"g0": 5, "g1": 5})
    assert not world.noted("group_lost"), "nobody waits for it"
    assert world.fence("g2", "ann") == ""
    for group in ("g0", "g1"):
        world.promise(group, 4)
    assert world.newest.groups == ("g0", "g1")


def test_who_returns_where_its_end_was_not_seen_is_not_taken_for_the_one_that_is_missing() -> None:
    world = standby()
    come(world, "g0", "g1")
    world.pass_s(10, {"g0": 5, "g1": 5})
    world.arrive("g2/i2")
    for group in ("g0", "g1"):
        world.promise(group, 4)
    world.pass_s(2, {"g0": 5, "g1": 5, "g2/i2": 0})
    assert world.reason("g0").startswith("g2: the earlier processes of g2 may still live; `lightkeeper fence --group")
    assert world.fence("g2", "ann") == ""
    assert not world.told("g2/i2", m.Fence), "the word is about the earlier ones"


# ---------------------------------------------------------------- one lineage


def survivor_cut_off() -> World:
    """g1 is dead, g0 alone in epoch 2, and its control link is lost."""
    world = World(groups=2, minimum=1)
    world.start()
    world.die("g1", step=5)
    world.promise("g0", 4)
    world.beat("g0", 6)
    world.cut("g0")
    world.pass_s(5)
    return world


def test_a_group_that_returns_while_the_sole_survivor_is_cut_off_begins_no_second_job() -> None:
    world = survivor_cut_off()
    known = world.newest
    world.arrive("g1/i2", start_window_s=1.0)
    world.pass_s(30)
    assert world.machine.newest == known and not world.is_asked("g1/i2")
    assert world.reason("g1/i2").startswith("g0: they may be training without this lighthouse")
    world.arrive("g0", known=known, acknowledged=world.term)
    world.beat("g0", 500)
    world.tick()
    assert world.told("g1/i2", m.Heal) and not world.told("g0", m.Fence), "it joins the one that there is"


def test_once_all_were_started_again_the_job_begins_anew() -> None:
    """Who starts a group again says that its earlier processes are gone; so a whole cluster can be restarted."""
    world = survivor_cut_off()
    world.arrive("g1/i2")
    world.arrive("g0/i2")
    world.promise("g0/i2")
    world.promise("g1/i2")
    assert {member.incarnation for member in world.newest.members} == {"i2"}


def test_once_the_operator_has_said_that_the_survivor_is_gone_the_job_begins_anew() -> None:
    world = survivor_cut_off()
    world.arrive("g1/i2", start_window_s=1.0)
    assert world.fence("g0", "ann") == ""
    world.pass_s(2)
    world.promise("g1/i2")
    assert world.newest.groups == ("g1",)


# ---------------------------------------------------------------- an older log


def test_who_returned_under_another_lighthouse_is_waited_for_and_not_taken_for_started_again() -> None:
    """Its log has g2's first incarnation; the members know the second, which calls last: nothing needs a recovery."""
    world = World(3, term=A)
    world.start()
    newest = Membership(
        Epoch(4, Term(3, "b")), (*world.newest.members[:2], Member("g2", "i2", "g2:1", ("g2:2",))), None
    )
    world.restart()
    obeyed = Term(3, "b")
    come(world, "g0", "g1", known=newest, acknowledged=obeyed)
    world.pass_s(1, {"g0": 50, "g1": 50}, waiting_ms=30)
    assert not world.is_asked("g0"), "g2 has yet to call"
    come(world, "g2/i2", known=newest, acknowledged=obeyed)
    world.pass_s(5, {"g0": 60, "g1": 60, "g2/i2": 60}, waiting_ms=30)
    assert [note["members"] for note in world.noted("took_over")] == [["g0", "g1", "g2"]]
    assert not world.noted("group_lost") and not world.is_asked("g0") and world.newest == newest


def test_who_was_sent_on_has_a_lease_from_the_start_of_the_reign() -> None:
    """g0 goes round between the addresses, and is not here when the operator's word lets the standby reign."""
    world = standby()
    call(world, "g2", "g0", "g1", "g0", place=1)
    world.fail("g0", 5, suspects=("g2",))
    world.pass_s(20)
    call(world, "g0", "g1", place=1)
    assert not world.machine.groups["g0"].in_touch and world.fence("g2", "ann") == ""
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g2"], "g0 called a moment ago"
    world.tick()
    assert [lost["group"] for lost in world.noted("group_lost")] == ["g2"]
