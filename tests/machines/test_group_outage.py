"""One group while no lighthouse is there, or only one that sends it on; and what it still says after its end."""

from __future__ import annotations

from groupworld import TERM, GroupWorld, epoch

from lightkeeper.events import schema
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Term
from lightkeeper.manager import exits, local
from lightkeeper.manager.machine import RankView


def started(ranks: int = 1, **settings: object) -> GroupWorld:
    world = GroupWorld(ranks, **settings)
    world.start()
    return world


def test_it_answers_a_welcome_with_the_term_that_it_obeys_from_now_on() -> None:
    world = started()
    world.forget()
    world.hears(m.Welcome(Term(5, "b"), 2000, 200))
    assert world.said(m.Acknowledged) == [m.Acknowledged(Term(5, "b"))]
    world.prepare(2, term=TERM)
    assert not world.said(m.Promise), "what the earlier lighthouse still says is void"


def test_it_does_not_acknowledge_a_lower_term() -> None:
    world = started()
    world.hears(m.Welcome(Term(5, "b"), 2000, 200))
    world.forget()
    world.hears(m.Welcome(TERM, 2000, 200))
    assert not world.said(m.Acknowledged) and world.machine.hello().acknowledged == Term(5, "b")


def test_an_activation_of_a_lower_term_has_no_effect() -> None:
    world = started()
    world.hears(m.Welcome(Term(5, "b"), 2000, 200))
    world.activate(2, "g1", term=TERM)
    assert world.machine.known is not None and world.machine.known.epoch == epoch(1)


def test_every_rank_says_whose_connection_broke_and_that_the_lighthouse_is_away() -> None:
    world = started(ranks=2)
    world.disconnect()
    for rank in range(2):
        world.vote(rank, "failed", 0, at=1, error="closed by peer", suspects=("g2",))
    world.pass_s(2.25)
    world.hears(m.Refused("standby: takes over once it has heard g2", retry=True))
    world.pass_s(4)
    for rank in range(2):
        lines = [say.line for say in world.pushed(rank, local.Say)]
        away = "the connection to g2 broke, and the lighthouse at 127.0.0.1:29400 is away"
        assert lines == [
            f"step 0 stands since 2 s: {away}",
            f"step 0 stands since 5 s: {away} (one was reached: standby: takes over once it has heard g2)",
        ]


def test_a_broken_reduce_whose_culprit_is_not_known_names_nobody() -> None:
    world = started()
    world.disconnect()
    world.vote(0, "failed", 0, at=1, error="timed out")
    world.pass_s(2.25)
    (line,) = [say.line for say in world.pushed(0, local.Say)]
    assert line == "step 0 stands since 2 s: a reduce failed, and the lighthouse at 127.0.0.1:29400 is away"


def test_a_group_that_was_never_a_member_waits_to_join_and_stands_at_no_step() -> None:
    world = GroupWorld()
    world.ready()
    world.pass_s(2.25)
    (line,) = [say.line for say in world.pushed(0, local.Say)]
    assert line == "waits to join since 2 s: the lighthouse at 127.0.0.1:29400 is away"


def test_what_broke_while_the_stream_was_broken_is_told_briefly_and_with_its_suspect() -> None:
    world = started()
    world.disconnect()
    advice = "This is typically caused by a remote worker crashing. Check the logs of the remote worker. GLHF!"
    said = f"all-reduce of e1r0 failed: [/a/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7. {advice}"
    world.vote(0, "failed", 0, at=1, error=said, suspects=("g2",))
    world.connect()
    (failed,) = world.said(m.Failed)[-1:]
    assert failed == m.Failed(epoch(1), 0, "all-reduce of e1r0 failed: connection closed by peer 127.0.0.1:7", ("g2",))
    (event,) = [event for event in world.events if isinstance(event, schema.ReduceFailed)]
    assert event.error == said, "the event keeps all of it"


def test_a_standby_that_sends_it_on_is_no_lighthouse_that_cannot_be_reached() -> None:
    world = GroupWorld(outage_budget_s=5.0)
    world.ready()
    for _ in range(10):
        world.pass_s(3)
        world.hears(m.Refused("standby: it knows no such job", retry=True))
    assert not world.ended
    world.pass_s(6)
    assert "could not be reached" in world.ended[0].reason


def test_a_standby_that_sends_it_on_for_ever_is_not_waited_for_for_ever() -> None:
    world = GroupWorld(outage_budget_s=1.0)
    world.ready()
    for _ in range(25):
        world.pass_s(0.5)
        world.hears(m.Refused("standby: it knows no such job", retry=True))
    assert [end.exit_code for end in world.ended] == [exits.GAVE_UP]


def test_after_its_end_a_new_stream_begins_and_ends_with_the_word_that_it_is_gone() -> None:
    world = started()
    world.disconnect()
    world.rank_ends(0, -9, "reduce", 0)
    assert world.ended[0].exit_code == 137 and world.killed and world.machine.owes_word
    world.forget()
    world._carry_out(world.machine.connected(world.now, 2))
    (hello,) = world.told
    assert hello.died == m.Died("rank 0 was killed by SIGKILL", 0, "reduce", 0)
    assert hello.place == 2 and hello.known is not None
    world.hears(m.Refused("standby: takes over once it has heard g0", retry=True))
    assert world.machine.owes_word, "that one has not taken it"
    world.hears(m.Fence("its end is known here"))
    assert not world.machine.owes_word and len(world.ended) == 1


def test_who_was_alone_owes_nobody_a_word() -> None:
    world = GroupWorld()
    world.connect()
    world.ready()
    world.prepare(1)
    world.activate(1, "g1")
    world.disconnect()
    world.rank_ends(0, -9)
    assert not world.machine.owes_word


def test_who_gave_up_after_its_budget_has_waited_long_enough() -> None:
    world = started(outage_budget_s=5.0)
    world.disconnect()
    world.vote(0, "failed", 0, at=1, error="closed by peer", suspects=("g2",))
    world.pass_s(6)
    assert world.ended[0].exit_code == exits.GAVE_UP and not world.machine.owes_word


# ---------------------------------------------------------------- a lease slept through


def slept() -> GroupWorld:
    """No lighthouse answers, its manager has stood still for longer than a lease, and then its rank voted."""
    world = started()
    world.disconnect()
    world.freeze_s(5)
    world.vote_all("reduced", 0, at=1)
    assert not world.answers()[1:]
    world.pass_s(1.25)
    return world


def test_who_slept_through_a_lease_asks_the_members_and_goes_on_by_their_word() -> None:
    world = slept()
    assert [asked.groups for asked in world.asked] == [("g0", "g1", "g2")]
    world.members_say(world.machine.known)
    assert world.answer().verdict == "go" and world.machine.step == 1
    world.pass_s(3)
    assert len(world.asked) == 1, "it knows now"


def test_it_asks_again_while_one_of_them_does_not_answer_and_commits_nothing() -> None:
    world = slept()
    world.members_say(world.machine.known, "g2")
    world.pass_s(2)
    assert len(world.asked) == 3 and not world.answers()[1:] and world.machine.step == 0


def test_members_that_have_promised_another_epoch_are_no_word_for_this_one() -> None:
    world = slept()
    world.members_say(world.machine.known, promised=2)
    assert not world.answers()[1:]


def test_a_word_that_comes_after_its_own_promise_has_no_effect() -> None:
    world = slept()
    world.connect()
    world.prepare(2)
    world.members_say(world.asked[-1])
    assert not world.answers()[1:] and world.machine.step == 0


def test_a_lighthouse_that_answers_spares_the_members_the_question() -> None:
    world = started()
    world.freeze_s(5)
    world.hears(m.Stands(epoch(1)))
    world.pass_s(3)
    assert not world.asked


def test_who_slept_says_so_and_who_has_not_answered() -> None:
    world = slept()
    world.members_say(world.machine.known, "g2")
    world.pass_s(1.0)
    (line,) = [say.line for say in world.pushed(0, local.Say)]
    assert line == (
        "step 0 stands since 2 s: this manager itself stood still for 5 s and asks the other members whether its epoch "
        "still stands (no answer from g2); the lighthouse at 127.0.0.1:29400 is away"
    )
    world.members_say(world.machine.known, promised=2)
    world.pass_s(3.0)
    assert "(the word of g0, g2 does not show it)" in world.pushed(0, local.Say)[-1].line


# ---------------------------------------------------------------- a reduce that somebody does not come to


def stand(world: GroupWorld, seconds: float, *silent: str, since_s: float = 0.0) -> None:
    """Its rank stands in a reduce, and the members' managers, but for the silent ones, answer when they are asked."""
    for quarter in range(1, round(seconds * 4) + 1):
        asked = len(world.asked)
        world.pass_s(0.25, {0: RankView("reduce", 0, since_s + quarter / 4, 0.0)})
        if len(world.asked) > asked:
            world.members_say(world.asked[-1], *silent)


def test_who_stands_in_a_reduce_without_a_lighthouse_says_less_and_less_often_whose_manager_does_not_answer() -> None:
    world = started()
    world.disconnect()
    stand(world, 18, "g2")
    away = "the lighthouse at 127.0.0.1:29400 is away, and no answer from the manager of g2"
    lines = [say.line for say in world.pushed(0, local.Say)]
    assert lines == [f"step 0 stands in its reduce since {s} s: {away}" for s in (2, 5, 10)]


def test_a_reduce_that_stands_longer_than_the_budget_ends_the_group_and_names_the_member() -> None:
    world = started(outage_budget_s=10.0)
    world.disconnect()
    stand(world, 9.5, "g2")
    assert not world.ended
    stand(world, 2, "g2", since_s=9.5)
    (end,) = world.ended
    assert end.exit_code == exits.GAVE_UP and "no answer from the manager of g2" in end.reason
    assert "longer than the outage budget" in end.reason


def test_who_is_left_by_one_that_gave_up_first_still_names_the_member_that_did_not_answer() -> None:
    world = started(outage_budget_s=10.0)
    world.disconnect()
    stand(world, 9.5, "g2")
    world.vote(0, "failed", 0, at=1, error="closed by peer", suspects=("g0",))
    world.pass_s(11)
    (end,) = world.ended
    assert end.exit_code == exits.GAVE_UP and "no answer from the manager of g2" in end.reason


def test_nobody_gives_up_on_members_whose_managers_answer() -> None:
    world = started(outage_budget_s=10.0)
    world.disconnect()
    stand(world, 30)
    assert not world.ended
    assert "and the managers of all members answer" in world.pushed(0, local.Say)[-1].line


def test_with_a_lighthouse_in_touch_it_is_not_for_the_members_to_say() -> None:
    world = started(outage_budget_s=10.0)
    stand(world, 30, "g2")
    assert not world.asked and not world.ended and not world.pushed(0, local.Say)
    world.disconnect()
    stand(world, 5, "g2", since_s=30.0)
    assert world.asked and not world.ended, "the lighthouse is away since a moment only"
