"""The operator's word: where it is taken, about whom it is, and when it is void."""

from __future__ import annotations

from world import World

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Epoch, Membership, Term

A = Term(1, "a")


def stale() -> World:
    """A knows epoch 1 by its log, which is outdated; g0 alone is in touch with it, and g2 trains under B."""
    world = World(3, term=A)
    world.start()
    world.restart()
    world.hello("g0", known=world.newest, acknowledged=world.term)
    world.join("g0")
    world.pass_s(5, {"g0": 5})
    return world


def later(world: World, number: int, *groups: str) -> Membership:
    """An epoch that B formed of members of this one."""
    members = tuple(member for member in world.newest.members if member.group in groups)
    return Membership(Epoch(number, Term(2, "b")), members, world.newest.epoch)


def test_a_word_is_refused_where_nobody_of_the_job_calls() -> None:
    world = World(3, term=A)
    world.start()
    world.restart()
    world.pass_s(5)
    assert world.fence("g2", "ann").startswith("nobody of this job is in touch with this lighthouse")
    world.arrive("g0", known=world.newest, acknowledged=world.term)
    assert world.fence("g2", "ann") == "", "it may be what g0 waits for"


def test_the_same_word_again_changes_nothing() -> None:
    world = stale()
    assert world.fence("g2", "ann") == ""
    world.pass_s(3, {"g0": 5})
    gone_s = world.machine.fencing("g2", world.now).gone_s
    assert gone_s is not None and 2.9 < gone_s < 3.6
    assert world.fence("g2", "bob") == "" and [note["by"] for note in world.noted("operator_fenced")] == ["ann"]


def test_a_word_about_one_incarnation_is_not_used_against_a_later_one() -> None:
    world = World(3, term=A)
    world.start()
    world.cut("g2")
    world.pass_s(3, {"g0": 5, "g1": 5})
    meant = world.machine.fencing("g2", world.now).incarnation
    world.arrive("g2/i2")
    world.promise("g0", 4)
    world.promise("g1", 4)
    world.cut("g2/i2")
    world.pass_s(3, {"g0": 5, "g1": 5})
    assert meant == "g2i1" and world.newest.groups == ("g0", "g1")
    assert world.fence("g2", "ann", meant) == "g2 has been started again: incarnation i2 is known here now"
    assert not world.noted("operator_fenced")


def test_a_word_given_before_an_epoch_that_was_formed_with_the_group_is_void() -> None:
    """The operator asked A, whose log ends at epoch 1; B has formed epoch 4 with g2 since, as g1 says."""
    world = stale()
    assert world.fence("g2", "ann") == ""
    newer = later(world, 4, "g0", "g1", "g2")
    world.arrive("g1", known=newer, acknowledged=Term(2, "b"))
    (void,) = world.noted("operator_word_void")
    assert (void["group"], void["incarnation"]) == ("g2", "g2i1") and world.newest == newer
    world.pass_s(5, {"g0": 5, "g1": 5}, waiting_ms=5000)
    assert not world.told("g1", m.Activate), "nothing is left out on the strength of that word"
    world.arrive("g2", known=newer, acknowledged=Term(2, "b"))
    assert world.told("g2", m.Welcome) and not world.told("g2", m.Fence)


def test_a_group_that_comes_from_a_newer_epoch_is_not_fenced_for_an_older_word() -> None:
    world = stale()
    assert world.fence("g2", "ann") == ""
    newer = later(world, 4, "g0", "g1", "g2")
    world.arrive("g2", known=newer, acknowledged=Term(2, "b"))
    assert world.noted("operator_word_void") and world.told("g2", m.Welcome) and not world.told("g2", m.Fence)
    assert not world.machine.reigns


def test_a_word_on_which_an_epoch_was_formed_stands() -> None:
    """The operator was wrong, and g2 went on under B: now there are two histories, and this one goes on."""
    world = stale()
    world.arrive("g1", known=world.newest, acknowledged=world.term)
    base = world.newest
    assert world.fence("g2", "ann") == ""
    world.promise("g0", 4)
    world.promise("g1", 4)
    assert world.newest.groups == ("g0", "g1")
    other = Membership(Epoch(9, Term(2, "b")), base.members[2:], base.epoch)
    world.hello("g2", known=other, acknowledged=Term(2, "b"))
    assert "ann says that its processes are gone" in world.reason("g2") and not world.noted("operator_word_void")
    assert world.newest.groups == ("g0", "g1")
