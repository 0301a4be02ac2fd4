"""What manager and agents say to each other, to protobuf and back. A rank's messages travel as on its own socket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightkeeper.manager import local
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.folding import Said, Views
from lightkeeper.manager.nodes import Hello
from lightkeeper.protos import manager_pb2


def said_to_wire(said: Iterable[Said]) -> Any:
    """A `SaidMany`."""
    many = manager_pb2.SaidMany()
    for one in said:
        many.said.add(ranks=one.ranks, message=local.body(one.message))
    return many


def said_from_ranks(many: Any, ranks: range) -> list[Said]:
    """What an agent hands on.

    Args:
        many: a `SaidMany`.
        ranks: those of its node.

    Raises:
        ValueError: for what is no message, or not of a rank of that node.
    """
    said = []
    for one in many.said:
        if not one.ranks or any(rank not in ranks for rank in one.ranks):
            raise ValueError("a message of a rank of another node")
        message = local.from_rank.decode(one.message)
        if isinstance(message, local.Register) and (message.rank,) != tuple(one.ranks):
            raise ValueError(f"rank {message.rank} registers as another")
        said.append(Said(tuple(one.ranks), message))
    return said


def said_to_ranks(many: Any) -> list[Said]:
    """What an agent's ranks are told.

    Raises:
        ValueError: for what is no message.
    """
    return [Said(tuple(one.ranks), local.to_rank.decode(one.message)) for one in many.said]


def views_to_wire(views: Iterable[Views]) -> list[Any]:
    """`RankViews`."""
    return [
        manager_pb2.RankViews(
            ranks=one.ranks,
            phase=one.view.phase,
            step=one.view.step,
            waiting_ms=_ms(one.view.waiting_s),
            stopped_ms=_ms(one.view.stopped_s),
            microbatch_us=one.view.microbatch_us,
            idle_ms=_ms(one.view.idle_s),
            expected_ms=round(1000 * one.view.expected_s),
            wait_us=one.view.wait_us,
            asks_ms=_ms(one.view.asks_s),
        )
        for one in views
    ]


def views_from_wire(wire: Iterable[Any], ranks: range) -> tuple[Views, ...]:
    """Views of ranks of this node; others are left out."""
    return tuple(
        Views(
            tuple(rank for rank in one.ranks if rank in ranks),
            RankView(
                one.phase,
                one.step,
                one.waiting_ms / 1000,
                one.stopped_ms / 1000,
                one.microbatch_us,
                one.idle_ms / 1000,
                one.expected_ms / 1000,
                one.wait_us,
                one.asks_ms / 1000,
            ),
        )
        for one in wire
    )


def ended_to_wire(rank: int, exit_code: int | None, view: RankView | None) -> Any:
    """A `RankEnded`."""
    ended = manager_pb2.RankEnded(rank=rank, exit_code=exit_code)
    if view is not None:
        ended.view.CopyFrom(views_to_wire([Views((rank,), view)])[0])
    return ended


def ended_from_wire(wire: Any, ranks: range) -> tuple[int, int | None, RankView | None]:
    """Rank, exit code (negative for a signal, None if nobody could tell) and what it did last.

    Raises:
        ValueError: if it is not a rank of this node.
    """
    if wire.rank not in ranks:
        raise ValueError(f"the end of rank {wire.rank}, which is of another node")
    view = views_from_wire([wire.view], ranks)[0].view if wire.HasField("view") else None
    return wire.rank, wire.exit_code if wire.HasField("exit_code") else None, view


def hello_from_wire(wire: Any) -> Hello:
    """How an agent was started."""
    return Hello(wire.group, wire.node_rank, wire.nodes, wire.ranks, wire.host, wire.pid)


def _ms(seconds: float) -> int:
    return min(round(1000 * seconds), (1 << 32) - 1)
