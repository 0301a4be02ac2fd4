"""What a group's own manager tells an operator while no lighthouse answers."""

from __future__ import annotations

from typing import Any

from lightkeeper.lighthouse.fields import to_wire
from lightkeeper.manager.machine import GroupMachine
from lightkeeper.protos import manager_pb2


def group_state(machine: GroupMachine, phase: str, now: float) -> Any:
    """A `GroupStateReply` of the machine's state; `phase` is its slowest rank's, `now` in monotonic seconds."""
    reply = manager_pb2.GroupStateReply(
        group=machine.settings.group,
        incarnation=machine.incarnation,
        step=machine.step,
        phase=phase,
        in_touch=machine.in_touch,
        away_ms=0 if machine.in_touch else round((now - machine.away_since) * 1000),
        lighthouse=machine.settings.lighthouse,
        waiting_ms=round(max((now - since for since in machine.waiting.values()), default=0.0) * 1000),
        suspects=machine.suspects,
        standby=machine.standby,
        over=machine.ending or "",
    )
    if machine.known is not None:
        reply.membership.CopyFrom(to_wire(machine.known))
    return reply
