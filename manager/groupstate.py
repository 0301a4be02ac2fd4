"""What a group's own manager tells an operator, and the other members, while no lighthouse answers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from lightkeeper.lighthouse.fields import from_wire, to_wire
from lightkeeper.lighthouse.names import Member, Membership
from lightkeeper.manager.machine import GroupMachine
from lightkeeper.manager.standing import Word
from lightkeeper.protos import manager_pb2, manager_pb2_grpc
from lightkeeper.wire import CHANNEL_OPTIONS

WORD_S_MAX = 2.0


def group_state(machine: GroupMachine, phase: str, at: str, now: float) -> Any:
    """A `GroupStateReply` of the machine's state.

    Args:
        machine: the group's.
        phase: that of its slowest rank.
        at: address of the lighthouse that welcomed it last.
        now: monotonic seconds.
    """
    reply = manager_pb2.GroupStateReply(
        group=machine.settings.group,
        incarnation=machine.incarnation,
        step=machine.step,
        phase=phase,
        in_touch=machine.in_touch,
        away_ms=0 if machine.in_touch else round((now - machine.away_since) * 1000),
        lighthouse=machine.settings.lighthouse,
        waiting_ms=round(max((now - since for since in machine.waiting.values()), default=0.0) * 1000),
        suspects=[name for name in machine.suspects if name != machine.settings.group],
        standby=machine.standby,
        over=machine.ending or "",
        promised=machine.promised,
        at=at if machine.in_touch else "",
    )
    if machine.known is not None:
        reply.membership.CopyFrom(to_wire(machine.known))
    return reply


async def words_of(membership: Membership, group: str, metadata: Any) -> dict[str, Word]:
    """What the managers of the other members say of their epoch, by group; who does not answer in time is missing.

    Args:
        membership: whose members are asked.
        group: which asks.
        metadata: the job's token and id.
    """
    others = [member for member in membership.members if member.group != group]
    words = await asyncio.gather(*(_word_of(member, metadata) for member in others))
    return {member.group: word for member, word in zip(others, words, strict=True) if word is not None}


async def _word_of(member: Member, metadata: Any) -> Word | None:
    async with grpc.aio.insecure_channel(member.manager, options=CHANNEL_OPTIONS) as channel:
        stub: Any = manager_pb2_grpc.ManagerStub(channel)
        try:
            reply = await stub.GroupState(manager_pb2.GroupStateRequest(), metadata=metadata, timeout=WORD_S_MAX)
        except grpc.aio.AioRpcError:
            return None
    known = from_wire(reply.membership) if reply.HasField("membership") else None
    return Word(reply.incarnation, known, reply.promised, reply.over)
