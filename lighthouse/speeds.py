"""How fast the members are, as the work is dealt by it: measured, rounded, and changed seldom. Pure.

A captain who moves rowers to the other bench at every stroke never gets anywhere. So speeds change only if the step
would then end clearly sooner, if that has been so for some steps, and not again for a while: each change costs a
planned epoch, and a different order of summation.

Rejected: shares by a running average without a threshold, which follow noise; to deal in the trainers by what each
knows of the others, which would need one more agreement per step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightkeeper.lighthouse.deal import deal
from lightkeeper.lighthouse.names import EVEN, Membership, speeds_in

GAIN = Fraction(1, 20)  # of the step's time: below that nothing is changed
EVERY_STEPS = 20  # at most one change in so many
STEADY_STEPS = 4  # for which the gain must have stood
GRAIN = EVEN // 20  # speeds are rounded to it: noise of a few per cent names no one slower
FACTOR_MAX = 20  # between a speed and the median
NAMED_MAX = 3


@dataclass(slots=True)
class Dealer:
    """When the speeds of a job may change.

    Attributes:
        changed: at which step they last did, or the first one that was seen here; None: none was seen yet.
        since: at which step a gain was first seen that stands, None if there is none.
    """

    changed: int | None = None
    since: int | None = None

    def look(self, step: int, membership: Membership, paces_us: Sequence[int], total: int) -> tuple[int, ...] | None:
        """The members' new speeds, or None if they stay.

        Args:
            step: how far the members are.
            membership: in force.
            paces_us: microseconds per microbatch of each member, as it was measured; 0: not known.
            total: microbatches of a step.
        """
        if self.changed is None or step < self.changed:
            self.changed = step
        new = better(membership, paces_us, total)
        if new is None:
            self.since = None
            return None
        self.since = step if self.since is None or step < self.since else self.since
        if step - self.since < STEADY_STEPS or step - self.changed < EVERY_STEPS:
            return None
        return new

    def in_force(self) -> None:
        """Other speeds are in force; at which step since, the next look shows, or a later one than that."""
        self.changed = self.since = None


def better(membership: Membership, paces_us: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Speeds by which a step would end clearly sooner than by the present ones, or None.

    Whoever has a speed of 0 keeps it, and its pace plays no part; one whose pace is not known counts as it is dealt
    now. A step takes as long as its slowest member: the largest share size times pace.
    """
    now = [membership.speed_of(slot) for slot in range(len(membership.members))]
    working = [slot for slot, speed in enumerate(now) if speed]
    known = [paces_us[slot] for slot in working if paces_us[slot]]
    if len(working) < 2 or len(known) < 2 or total < 1:
        return None
    median_us = statistics.median(known)
    middle = statistics.median([now[slot] for slot in working if paces_us[slot]])
    paces = [paces_us[slot] or max(1, round(median_us * middle / (now[slot] or middle))) for slot in range(len(now))]
    before = _step_us(total, now, paces)
    if total / sum(1 / paces[slot] for slot in working) > before * (1 - GAIN):
        return None  # no shares could win so much; a deal among a thousand takes a tenth of a second
    new = [rounded(median_us / paces[slot]) if now[slot] else 0 for slot in range(len(now))]
    after = _step_us(total, new, paces)
    return None if after > before * (1 - GAIN) else speeds_in(new)


def rounded(share_of_median: float) -> int:
    """A speed relative to the median, as it is dealt by."""
    bounded = min(float(FACTOR_MAX), max(1 / FACTOR_MAX, share_of_median))
    return max(GRAIN, GRAIN * round(EVEN * bounded / GRAIN))


def _step_us(total: int, speeds: Sequence[int], paces_us: Sequence[int]) -> int:
    return max(len(share) * pace for share, pace in zip(deal(total, speeds), paces_us, strict=True))


def usual(speeds: Sequence[int]) -> int:
    """The speed of one that comes in among these: their median, until it is measured; spares do not count."""
    working = sorted(speed for speed in speeds if speed)
    return working[(len(working) - 1) // 2] if working else EVEN


def changed(old: Membership, new: Membership) -> bool:
    """Whether those who stay are dealt work by other proportions among themselves."""
    slots = [new.slot_of(member.group, member.incarnation) for member in old.members]
    pairs = [(old.speed_of(slot), new.speed_of(to)) for slot, to in enumerate(slots) if to is not None]
    working = [(a, b) for a, b in pairs if a and b]
    return any(a * working[0][1] != b * working[0][0] for a, b in working)


def why(old: Membership, speeds: Sequence[int]) -> str:
    """One line on a change of speeds among the same members, whoever changed most first."""
    new = speeds or (EVEN,) * len(old.members)
    ratios = []
    for slot, name in enumerate(old.groups):
        before, after = old.speed_of(slot), new[slot]
        if before and after and before != after:
            ratios.append((max(before, after) / min(before, after), name, before / EVEN, after / EVEN))
    ratios.sort(key=lambda item: (-item[0], item[1]))
    said = [f"{name} {was:.2f} -> {by:.2f}" for _, name, was, by in ratios]  # "slower" alone would mean: than before
    more = f", and {len(said) - NAMED_MAX} more" if len(said) > NAMED_MAX else ""
    return f"new shares: {', '.join(said[:NAMED_MAX])} of the median{more}"
