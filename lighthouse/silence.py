"""Who is gone: a verdict on silence.

A neighbour who does not answer the door may be out, asleep, or simply have a broken bell. Nobody breaks the door in
for that alone; but if the whole stairwell waits for them and the postman has brought no sign of life either, somebody
must decide. So a member is never called gone for being silent: only if somebody *waits* for it as well. Either a
member has found the epoch broken (then a broken stream is enough: kernels close the sockets of the dead within
milliseconds), or somebody has been standing in a reduce for a lease. A member one of whose ranks is stopped by a signal
cannot put in its part: there it is enough that somebody stands at all.

Rejected: evicting on the lease alone (as heartbeat time-outs do), since a lost control link of a group that goes on
training would then cost an eviction.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.lighthouse.group import Gone, Group

STANDING_MS_MIN = 20


def standing_s(groups: Sequence[Group]) -> float:
    """How long the member that stands longest has been standing in a reduce, in seconds; 0 if none stands.

    A normal reduce of some milliseconds is not standing.
    """
    waiting_ms = max((g.beat.waiting_ms for g in groups if g.beat is not None and g.gone is None), default=0)
    return waiting_ms / 1000 if waiting_ms >= STANDING_MS_MIN else 0.0


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
    phase, step = group.where
    if all(g.gone is not None for g in others):
        return None  # nobody is left to wait
    epoch_is_over = recovering or any(g.failed is not None for g in others)
    stands_s = standing_s(others)
    if not epoch_is_over and stands_s == 0.0:
        return None
    if group.beat is not None and group.beat.stopped_ms / 1000 > lease_s:
        return Gone(f"a rank has been stopped for {group.beat.stopped_ms / 1000:.1f} s", "frozen", phase, step)
    if not epoch_is_over and stands_s < bound_s:
        return None  # others may still commit, and each commit proves that it lives
    if group.connection is None:
        if epoch_is_over and not few and group.hello is not None:
            return Gone("its manager's stream broke and a member found the epoch broken", "stream", phase, step)
        if silent_s > bound_s:
            return Gone(f"its manager's stream broke {silent_s:.1f} s ago", "lease", phase, step)
    elif silent_s > bound_s:
        return Gone(f"its manager has been silent for {silent_s:.1f} s", "lease", phase, step)
    return None
