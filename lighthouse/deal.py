"""Work is dealt, not owned: which group computes which microbatch of a step. Pure functions.

As a card dealer who knows the players: who is twice as fast gets twice as many, so that all lay down their last card at
the same moment. A member of speed 0 (a spare) gets none.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache


def deal(total: int, speeds: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deals the microbatches ``0 .. total-1`` of a step to the slots of an epoch.

    Shares are consecutive ranges in slot order. Of all ways to deal, this is one in which whoever is last ends first
    (the largest share size by speed is least), but whoever works gets at least one while there are enough. With equal
    speeds the sizes differ by at most one.

    Args:
        total: number of microbatches of the step, at least 0.
        speeds: relative speed of each slot, at least one slot; 0 works not at all. If all are 0, all work alike.

    Returns:
        One tuple of microbatch indices per slot.
    """
    return _deal(total, tuple(speeds))


@lru_cache(maxsize=64)
def _deal(total: int, speeds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if total < 0 or not speeds or min(speeds) < 0:
        raise ValueError(f"cannot deal {total} microbatches to {len(speeds)} members of speeds {list(speeds[:8])}")
    speeds = at_work(speeds)
    working = [slot for slot, speed in enumerate(speeds) if speed]
    sizes = [total * speed // sum(speeds) for speed in speeds]  # what the proportion gives whole
    if total >= len(working):
        sizes = [max(1, size) if speed else 0 for size, speed in zip(sizes, speeds, strict=True)]
    while sum(sizes) > total:  # some were lifted to one: who ends last gives
        slot = max((s for s in working if sizes[s] > 1), key=lambda s: (Fraction(sizes[s], speeds[s]), s))
        sizes[slot] -= 1
    for slot in _next(total - sum(sizes), sizes, speeds):
        sizes[slot] += 1
    shares, start = [], 0
    for size in sizes:
        shares.append(tuple(range(start, start + size)))
        start += size
    return tuple(shares)


def deal_rest(
    total: int, held: Mapping[str, Sequence[int]], members: Sequence[str], speeds: Sequence[int] = ()
) -> dict[str, tuple[int, ...]]:
    """Deals what nobody holds, in the first step of a recovery; what a member holds it keeps.

    A fresh deal would sum some microbatches twice and give others to nobody who has them. The orphaned ones are dealt
    one by one to whoever would end first with one more, in consecutive runs in slot order. With nothing held and equal
    speeds this is `deal`.

    Args:
        total: number of microbatches of the step.
        held: per member the microbatches it promised to hold; disjoint, each in ``0 .. total-1``.
        members: member groups in slot order.
        speeds: as for `deal`; empty: all alike.

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
    further = [0] * len(members)
    sizes = [len(shares[member]) for member in members]
    for slot in _next(len(orphans), sizes, at_work(tuple(speeds) or (1,) * len(members))):
        further[slot] += 1
    start = 0
    for slot, member in enumerate(members):
        shares[member] += orphans[start : start + further[slot]]
        start += further[slot]
    return {member: tuple(share) for member, share in shares.items()}


def at_work(speeds: tuple[int, ...]) -> tuple[int, ...]:
    """The speeds of those that work; spares that are left alone all do."""
    return speeds if any(speeds) else (1,) * len(speeds)


def _next(count: int, sizes: Sequence[int], speeds: Sequence[int]) -> list[int]:
    """To whom so many further microbatches go: always to whoever then ends first, and of those the lowest slot."""
    if not count:
        return []
    ends = [(Fraction(sizes[s] + 1, speed), s) for s, speed in enumerate(speeds) if speed]
    heapq.heapify(ends)
    chosen = []
    for _ in range(count):
        end, slot = ends[0]
        chosen.append(slot)
        heapq.heapreplace(ends, (end + Fraction(1, speeds[slot]), slot))
    return chosen
