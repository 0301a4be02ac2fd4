"""Which group is slow, for how long it has been, what that costs everybody, and whether it pays to go on without. Pure.

In a rowing boat it is not the one who shouts that is slow: the slow one is always working, and the others wait for it.
So a group is called slow by two measures at once: it needs longer for a microbatch than the others do, and it waits
less than they do (or is dealt less already). And only if both have been so for a whole window of steps: a garbage
collection is no slow machine. What is called slow is so until it has been as fast as the others for a whole window.

Rejected: the mean of all groups, itself among them (of two groups the slower one of 1.3 would be 1.13 times the mean);
eviction by the time per microbatch alone (dealing by speed comes first, and mostly suffices).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightkeeper.lighthouse.deal import deal
from lightkeeper.lighthouse.names import EVEN
from lightkeeper.lighthouse.speeds import rounded

SLOW = 1.2  # times what the others take
WELL = 1.1  # below that it is not slow any more; between the two it is what it was
WINDOW_STEPS = 8
EVICT_WINDOWS = 3  # for which it must have been slow before anybody is asked to leave for it
FLAPS_MAX = 2  # times that it was slow and was not again; with one more it is as good as slow
FLAP_STEPS = 40 * WINDOW_STEPS
HORIZON_S = 600.0  # over which leaving somebody out must pay
GAIN_MIN = 0.05  # of a step; below that nobody is left out


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a working group is.

    Attributes:
        group: its name.
        microbatch_us: microseconds that its slowest rank takes for a microbatch, 0 if that is not known.
        rank: that rank.
        wait_us: microseconds that it waits for the others in a step, 0 if that is not known.
        speed: by which it is dealt work; 0: not at all.
    """

    group: str
    microbatch_us: int
    rank: int = 0
    wait_us: int = 0
    speed: int = EVEN


@dataclass(frozen=True, slots=True)
class SlowGroup:
    """A group that has been slow for a whole window; fields as of the event `slow`."""

    group: str
    rank: int
    factor: float
    costs: float
    steps: int
    step: int
    wait_s: float
    others_wait_s: float
    flaps: int


@dataclass(slots=True)
class _Seen:
    """What is known of one group.

    Attributes:
        since: the step from which on it has been slow; None: it is not.
        well_since: the step from which on one that was called slow has not been.
        said: whether it was called slow, and has not been well for a window since.
        flapped: at which steps it became well again.
    """

    since: int | None = None
    well_since: int | None = None
    said: bool = False
    flapped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slows:
    """The slow groups of a job."""

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def look(self, step: int, paces: Sequence[Pace], total: int) -> tuple[list[SlowGroup], list[str]]:
        """Who is called slow from now on, and who is not any more.

        Args:
            step: how far the members are.
            paces: of the members.
            total: microbatches of a step.
        """
        working = [pace for pace in paces if pace.speed and pace.microbatch_us]
        for name in self._seen.keys() - {pace.group for pace in paces}:
            del self._seen[name]
        slow, ended = [], []
        for pace in working if len(working) > 1 else ():
            others = [other for other in working if other is not pace]
            factor = pace.microbatch_us / statistics.median(other.microbatch_us for other in others)
            seen = self._seen.setdefault(pace.group, _Seen())
            if self._becomes_slow(seen, step, factor, _waits_less(pace, others)):
                slow.append(_described(pace, others, factor, step, seen, costs(pace.group, working, total)))
            elif self._becomes_well(seen, step, factor):
                ended.append(pace.group)
        return slow, ended

    def slow_for(self, group: str, step: int) -> int:
        """For how many steps a group that is called slow has been so; 0 if it is not."""
        seen = self._seen.get(group)
        if seen is None or not seen.said or seen.since is None:
            return 0
        return EVICT_WINDOWS * WINDOW_STEPS if len(seen.flapped) > FLAPS_MAX else step - seen.since

    def _becomes_slow(self, seen: _Seen, step: int, factor: float, waits_less: bool) -> bool:
        if factor < SLOW or not waits_less:
            if factor < WELL or not seen.said:
                seen.since = None
            return False
        seen.well_since = None
        seen.since = step if seen.since is None or step < seen.since else seen.since
        if seen.said or step - seen.since < WINDOW_STEPS:
            return False
        seen.said = True
        seen.flapped = [at for at in seen.flapped if 0 <= step - at < FLAP_STEPS]
        return True

    def _becomes_well(self, seen: _Seen, step: int, factor: float) -> bool:
        if not seen.said or factor >= WELL:
            seen.well_since = None
            return False
        seen.well_since = step if seen.well_since is None or step < seen.well_since else seen.well_since
        if step - seen.well_since < WINDOW_STEPS:
            return False
        seen.said, seen.since, seen.well_since = False, None, None
        seen.flapped.append(step)
        return True


def _waits_less(pace: Pace, others: Sequence[Pace]) -> bool:
    """Whether it waits less than the others do, or is dealt less already so that it need not."""
    known = [other.wait_us for other in others if other.wait_us]
    if pace.speed < statistics.median(other.speed for other in others):
        return True
    return not known or not pace.wait_us or pace.wait_us <= statistics.median(known)


def _described(pace: Pace, others: Sequence[Pace], factor: float, step: int, seen: _Seen, share: float) -> SlowGroup:
    assert seen.since is not None
    others_us = statistics.median(other.wait_us for other in others)
    return SlowGroup(
        pace.group, pace.rank, factor, share, step - seen.since, step, pace.wait_us / 1e6, others_us / 1e6,
        len(seen.flapped),
    )  # fmt: skip


def costs(group: str, paces: Sequence[Pace], total: int) -> float:
    """The share of a step's time, 0 to 1, that goes if this group becomes as fast as the median of the others.

    Args:
        group: which.
        paces: of all that work, by the speeds of which the work is dealt now.
        total: microbatches of a step.
    """
    now_us = step_us(paces, total)
    others_us = statistics.median(pace.microbatch_us for pace in paces if pace.group != group)
    well = [pace.microbatch_us if pace.group != group else others_us for pace in paces]
    dealt = [rounded(statistics.median(well) / us) for us in well]
    best_us = max(len(share) * us for share, us in zip(deal(total, dealt), well, strict=True))
    return max(0.0, 1.0 - best_us / now_us) if now_us else 0.0


def step_us(paces: Sequence[Pace], total: int) -> float:
    """Microseconds of a step, which ends when the last group has computed its share."""
    shares = deal(total, [pace.speed for pace in paces])
    return max(len(share) * pace.microbatch_us for share, pace in zip(shares, paces, strict=True))


def may_leave(group: str, paces: Sequence[Pace], total: int, spare: bool, heal_s: float) -> bool:
    """Whether a slow group should be asked to leave: it cannot be dealt less, and a spare takes its place or it pays.

    Args:
        group: which.
        paces: of all that work.
        total: microbatches of a step.
        spare: whether the job has a spare.
        heal_s: seconds until another group is in its place.
    """
    sizes = {pace.group: len(share) for pace, share in zip(paces, deal(total, [p.speed for p in paces]), strict=True)}
    if sizes.get(group, 0) > 1 or len(paces) < 2:
        return False
    return spare or pays(step_us(paces, total), step_us([p for p in paces if p.group != group], total), heal_s)


def pays(with_us: float, without_us: float, heal_s: float, horizon_s: float = HORIZON_S) -> bool:
    """Whether to go on without a group saves more time than its replacement costs.

    What is saved is the share of a step by which the others are faster without it, over the horizon; what it costs is,
    at most, that everybody stands while its replacement heals. (It never costs so much; who errs here errs towards
    leaving things as they are.)

    Args:
        with_us: a step with it.
        without_us: a step without it.
        heal_s: seconds until another group is in its place.
        horizon_s: for how long it would have gone on like this, in seconds.
    """
    gain = 1.0 - without_us / with_us if with_us else 0.0
    return gain >= GAIN_MIN and gain * horizon_s > heal_s
