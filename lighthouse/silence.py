"""Who is gone: a verdict on silence.

A neighbour who does not answer the door may be out, asleep, or simply have a broken bell. Nobody breaks the door in
for that alone; but if the whole stairwell waits for them and the postman has brought no sign of life either, somebody
must decide. So a member is never called gone for being silent: only if somebody *waits* for it as well. Either a
member has found the epoch broken (then a broken stream is enough: kernels close the sockets of the dead within
milliseconds), or somebody stands in a reduce and the lease has passed.

Rejected: evicting on the lease alone (as heartbeat time-outs do), since a lost control link of a group that goes on
training would then cost an eviction.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.lighthouse.group import Gone, Group

STANDING_MS_MIN = 20


def somebody_waits(groups: Sequence[Group], for_group: Group, recovering: bool) -> bool:
    """Whether a member other than `for_group` stands still."""
    if recovering:
        return True
    return any(
        other.failed is not None or (other.beat is not None and other.beat.waiting_ms >= STANDING_MS_MIN)
        for other in groups
        if other is not for_group and other.gone is None
    )


def verdict(members: Sequence[Group], group: Group, recovering: bool, lease_s: float, now: float) -> Gone | None:
    """Whether this member must be left out now, and why.

    Args:
        members: all members of the newest epoch, `group` among them.
        group: the one in question.
        recovering: whether a recovery has asked for promises and waits for them.
        lease_s: how long a silence is borne, in seconds.
        now: monotonic seconds.
    """
    if group.gone is not None:
        return group.gone
    others = [g for g in members if g is not group]
    in_touch = sum(g.in_touch for g in members)
    few = 2 * in_touch < len(members)
    bound_s = lease_s * (2 if few else 1)
    silent_s = now - group.heard
    phase, step = (group.beat.phase, group.beat.step) if group.beat else ("", 0)
    if not somebody_waits(others, group, recovering):
        return None
    if group.connection is None:
        epoch_is_over = recovering or any(g.failed is not None for g in others)
        if epoch_is_over and not few:
            return Gone("its manager's stream broke and a member found the epoch broken", "stream", phase, step)
        if silent_s > bound_s:
            return Gone(f"its manager's stream broke {silent_s:.1f} s ago", "lease", phase, step)
    elif silent_s > bound_s:
        return Gone(f"its manager has been silent for {silent_s:.1f} s", "lease", phase, step)
    elif group.beat is not None and group.beat.stopped_ms / 1000 > lease_s:
        return Gone(f"a rank has been stopped for {group.beat.stopped_ms / 1000:.1f} s", "frozen", phase, step)
    return None
