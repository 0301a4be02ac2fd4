"""Who of a group's nodes has come, is silent, or is gone; and what travels between them."""

from __future__ import annotations

import dataclasses

import pytest

from lightkeeper.manager import local, nodewire
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.folding import Said, Views
from lightkeeper.manager.nodes import Hello, Nodes
from lightkeeper.manager.settings import Settings

SETTINGS = Settings(group="g1", nnodes=3, ranks=6, token="t", outage_budget_s=10.0)
HELLO = Hello("g1", 1, 3, 6, "host-b", 71)


def nodes() -> Nodes:
    return Nodes(SETTINGS, 0.0)


def come(made: Nodes, node: int, now: float = 0.0) -> None:
    assert made.comes(dataclasses.replace(HELLO, node_rank=node), False, now) is None


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("group", "g2", "this group's manager has --group g1, and the agent --group g2"),
        ("nodes", 2, "this group's manager has --nnodes 3, and the agent --nnodes 2"),
        ("ranks", 3, "this group's manager has --ranks 2, and the agent --ranks 1"),
        ("node_rank", 0, "--node-rank 0: of 3 nodes the others are 1 to 2"),
        ("node_rank", 3, "--node-rank 3: of 3 nodes the others are 1 to 2"),
    ],
)
def test_an_agent_that_was_started_otherwise_is_refused_for_good(field: str, value: object, says: str) -> None:
    refusal = nodes().comes(dataclasses.replace(HELLO, **{field: value}), False, 0.0)  # type: ignore[arg-type]
    assert refusal is not None and refusal.reason == says and not refusal.retry


def test_a_second_agent_of_a_node_may_belong_to_the_next_incarnation() -> None:
    made = nodes()
    come(made, 1)
    refusal = made.comes(dataclasses.replace(HELLO, pid=99), False, 1.0)
    assert refusal is not None and refusal.retry
    assert refusal.reason == "node 1 (host-b, pid 71) has come to this incarnation of the group already"
    refusal = made.comes(dataclasses.replace(HELLO, node_rank=2), True, 1.0)
    assert refusal is not None and refusal.retry


def test_a_node_is_named_once_it_is_silent_for_longer_than_the_lease() -> None:
    made = nodes()
    come(made, 1)
    come(made, 2)
    for tick in range(1, 30):
        now = 0.1 * tick
        made.heard(2, now)
        found = made.silent(2.0, now)
        assert (found is None) == (now <= 2.0), now
    assert found == (1, "node 1 (host-b, pid 71) has not been heard for 2.9 s")


def test_a_manager_that_stood_still_hears_first_and_blames_itself() -> None:
    made = nodes()
    come(made, 1)
    assert made.silent(2.0, 0.1) is None
    assert made.silent(2.0, 5.1) is None  # what the node said meanwhile is still to be read
    assert made.gone(1, 2.0, 5.2) == (
        "this manager stood still for 5.0 s, longer than the lease, and so node 1 (host-b, pid 71) has ended"
    )
    for tick in range(1, 22):
        found = made.silent(2.0, 5.1 + 0.1 * tick)
    assert found is not None and found[0] == 1
    assert made.gone(1, 2.0, 7.2) == "the agent of node 1 (host-b, pid 71) is gone", "that was long ago"


def test_a_stream_may_be_seen_to_break_before_the_clock_is_looked_at() -> None:
    made = nodes()
    come(made, 1)
    assert made.silent(2.0, 0.1) is None
    assert made.gone(1, 2.0, 3.1).startswith("this manager stood still for 3.0 s")


def test_who_has_not_come_is_said_less_and_less_often_and_given_up_after_the_start_budget() -> None:
    made = nodes()
    come(made, 2)
    said = [now for now in range(100) if made.awaited(float(now))]
    assert said == [3, 7, 15, 31, 63]
    assert made.too_late(100.0) is None
    assert made.too_late(101.0) == "waiting for the agent of node 1 (the group has 3 nodes) since 101 s"
    come(made, 1, 102.0)
    assert made.awaited(500.0) is None and made.too_late(500.0) is None


def test_a_group_is_fenced_when_every_agent_has_said_so() -> None:
    made = nodes()
    come(made, 1)
    come(made, 2)
    made.is_fenced(2)
    assert made.fenced(2) and not made.fenced(1, 2)
    assert made.unfenced() == ["node 1 (host-b, pid 71)"]
    assert made.silent(2.0, 0.5) is None


def test_views_are_those_of_the_last_beat() -> None:
    made = nodes()
    come(made, 1)
    view = RankView("reduce", 3, 0.5, 0.0)
    made.beats(1, (Views((2, 3), view),), 0.1)
    made.heard(1, 0.9)
    assert made.views() == {2: view, 3: view}


# ---------------------------------------------------------------- the wire


def test_what_ranks_say_and_are_told_there_and_back() -> None:
    said = [
        Said((2, 3), local.Vote(epoch=1, step=5, outcome="healed", entry=(1, 2, "lh"), suspects=("g0",))),
        Said((3,), local.SetKey(epoch=1, key="k", value=b"\0\xff", timeout_ms=5, request=9)),
    ]
    assert nodewire.said_from_ranks(nodewire.said_to_wire(said), range(2, 4)) == said
    told = [Said((2,), local.Answer(verdict="go", share=(1, 2), step=6)), Said((2, 3), local.Touch())]
    assert nodewire.said_to_ranks(nodewire.said_to_wire(told)) == told


@pytest.mark.parametrize("ranks", [(), (1,), (2, 4)])
def test_a_message_for_ranks_of_another_node_is_malformed(ranks: tuple[int, ...]) -> None:
    wire = nodewire.said_to_wire([Said(ranks, local.Built(epoch=1))])
    with pytest.raises(ValueError, match="a message of a rank of another node"):
        nodewire.said_from_ranks(wire, range(2, 4))


def test_a_rank_registers_as_itself_and_bytes_that_are_no_message_are_malformed() -> None:
    register = local.Register(token="", rank=3, pid=1, transfer="h:1", progress="")
    with pytest.raises(ValueError, match="rank 3 registers as another"):
        nodewire.said_from_ranks(nodewire.said_to_wire([Said((2,), register)]), range(2, 4))
    wire = nodewire.said_to_wire([Said((2,), register)])
    wire.said[0].message = b"\x80\x04pickled"
    with pytest.raises(ValueError):
        nodewire.said_from_ranks(wire, range(2, 4))


@pytest.mark.parametrize("code", [0, 3, -9, None])
@pytest.mark.parametrize("view", [None, RankView("apply", 4, 0.0, 1.5, 70)])
def test_the_end_of_a_rank_there_and_back(code: int | None, view: RankView | None) -> None:
    wire = nodewire.ended_to_wire(3, code, view)
    assert nodewire.ended_from_wire(wire, range(2, 4)) == (3, code, view)
    with pytest.raises(ValueError, match="of another node"):
        nodewire.ended_from_wire(wire, range(3))
