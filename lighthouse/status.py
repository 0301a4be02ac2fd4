"""A job as an operator sees it."""

from __future__ import annotations

from typing import Any

from lightkeeper.lighthouse.fields import to_wire
from lightkeeper.lighthouse.machine import JobMachine
from lightkeeper.protos import lighthouse_pb2


def status(machine: JobMachine, now: float) -> Any:
    """A `StatusReply` of the machine's state; `now` in monotonic seconds."""
    whom, why, since_s = machine.waiting(now)
    ended = machine.ended if machine.newest is None else ""
    in_touch = sum(g.in_touch and machine.is_member(g.name) for g in machine.groups.values())
    reply = lighthouse_pb2.StatusReply(
        job=machine.job,
        term=to_wire(machine.term),
        waiting=f"{', '.join(whom)} ({why}) for {since_s:.1f} s" if whom and machine.stopped is None else "",
        reigns=machine.reigns and machine.newest is not None,
        stopped=machine.stopped.reason if machine.stopped else "" if whom else ended,
        ended=ended if whom and machine.stopped is None else "",
        members_in_touch=in_touch,
    )
    if machine.newest is not None:
        reply.membership.CopyFrom(to_wire(machine.newest))
    for name, group in sorted(machine.groups.items()):
        state = "member" if machine.is_member(name) else "parked" if group.parked else "joining"
        if state == "member" and machine.newest is not None and name in machine.newest.spares:
            state = "spare"
        if group.leaving:
            state += ", leaving"
        if group.gone is not None:
            state = f"gone: {group.gone.cause}"
        elif group.connection is None:
            state += ", not in touch"
        beat = group.beat
        reply.groups.add(
            group=name,
            incarnation=group.incarnation,
            state=state,
            phase=beat.phase if beat else "",
            step=beat.step if beat else 0,
            silent_ms=round((now - group.heard) * 1000),
        )
    return reply
