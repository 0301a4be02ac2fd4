"""Work is dealt, not owned: which group computes which microbatch of a step. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def deal(total: int, members: int) -> tuple[tuple[int, ...], ...]:
    """Deals the microbatches ``0 .. total-1`` of a step to the slots of an epoch.

    Shares are consecutive ranges in slot order whose sizes differ by at most one.

    Args:
        total: number of microbatches of the step, at least 0.
        members: number of slots, at least 1.

    Returns:
        One tuple of microbatch indices per slot.
    """
    if total < 0 or members < 1:
        raise ValueError(f"cannot deal {total} microbatches to {members} members")
    size, larger = divmod(total, members)
    shares, start = [], 0
    for slot in range(members):
        end = start + size + (slot < larger)
        shares.append(tuple(range(start, end)))
        start = end
    return tuple(shares)


def deal_rest(total: int, held: Mapping[str, Sequence[int]], members: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Deals what nobody holds, in the first step of a recovery; what a member holds it keeps.

    A fresh deal would sum some microbatches twice and give others to nobody who has them. The orphaned ones are dealt
    so that the shares become as equal as they can, in consecutive runs in slot order. With nothing held this is `deal`.

    Args:
        total: number of microbatches of the step.
        held: per member the microbatches it promised to hold; disjoint, each in ``0 .. total-1``.
        members: member groups in slot order.

    Returns:
        Per member its whole share: what it held, then what it was dealt.

    Raises:
        ValueError: if two members hold the same microbatch or one is out of range.
    """
    shares = {member: list(held.get(member, ())) for member in members}
    owner: dict[int, str] = {}
    for member, share in shares.items():
        for k in share:
            if not 0 <= k < total:
                raise ValueError(f"{member} holds microbatch {k} of a step that has {total}")
            if k in owner:
                raise ValueError(f"{owner[k]} and {member} both hold microbatch {k}")
            owner[k] = member
    orphans = [k for k in range(total) if k not in owner]
    further = dict.fromkeys(members, 0)
    fewest = [(len(shares[member]), slot) for slot, member in enumerate(members)]  # the first of those with least
    heapq.heapify(fewest)
    for _ in orphans:
        size, slot = fewest[0]
        further[members[slot]] += 1
        heapq.heapreplace(fewest, (size + 1, slot))
    start = 0
    for member in members:
        shares[member] += orphans[start : start + further[member]]
        start += further[member]
    return {member: tuple(share) for member, share in shares.items()}
