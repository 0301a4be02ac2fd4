"""The shape of a history: how many groups, ranks and lighthouses, how fast, how long. Drawn from its seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from lightkeeper.lighthouse.spares import MEMBER, RESERVE, SPARE


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a history is run with.

    Attributes:
        groups: configured groups.
        ranks: of each group.
        nodes: of each group, each with as many of its ranks; not drawn.
        minimum: fewest groups with which the job goes on.
        lighthouses: length of the managers' address list; each has a disk of its own.
        until: steps of the run.
        microbatches: of an even step; an odd one has one more, so that a wrong total shows.
        microbatch_s: shortest and longest time of a microbatch.
        by_speed: whether work is dealt by speed.
        slow: by how much each group is slower than a microbatch takes; they rotate. Empty: none is.
        rotate_s: how long each of them lasts.
        window_s: faults strike until then.
        lease_s: of the lighthouse.
        beat_s: of the managers; the lighthouse ticks twice as often. Longer than in earnest: most events are these.
        budget_s: the outage budget.
        start_window_s: word of whoever creates the job, as in `Settings`; 0 is none.
        late_s: when the last group is started first.
        times: 1, or 100: as patient as a job a hundred times as large, in which silence is asked about.
        buckets: of a reduce: 1, or 2 with the first one completed before the second begins.
        before: whether a step starts with the reduce of before extras.
        again: probability that a gradient comes after its bucket was launched.
        copy_s: shortest and longest time of a joiner's transfer.
        kept_max: entries that a donor keeps.
        restart_s: shortest and longest time until a group that ended is started again.
        spares: how many of the groups are spares.
        surplus: groups beyond those that the job is configured for; they say so, unless the job is created by word.
        last_to_work: how many of the groups, from the first on, have the role of a spare.
        saves: every how many steps whoever leads writes a checkpoint, from which its group is started again; 0: never.
        resumed: with how many steps behind its state each group is started first; empty: none has any.
        quorum_wait_s: how long the job may stand below its minimum, as in `Settings`; None: as it is derived.
        save_s: how long a group takes to save the last step of a job that ends for want of groups.
        unlike: how many of the groups, from the first on, are started with another state than all others.
    """

    groups: int = 3
    ranks: int = 1
    nodes: int = 1
    minimum: int = 1
    lighthouses: int = 1
    until: int = 40
    microbatches: int = 6
    microbatch_s: tuple[float, float] = (0.02, 0.08)
    by_speed: bool = False
    slow: tuple[float, ...] = ()
    rotate_s: float = 8.0
    window_s: float = 20.0
    lease_s: float = 2.0
    beat_s: float = 0.4
    budget_s: float = 20.0
    start_window_s: float = 0.0
    late_s: float = 0.0
    times: int = 1
    buckets: int = 1
    before: bool = False
    again: float = 0.01
    copy_s: tuple[float, float] = (0.02, 0.5)
    kept_max: int = 100
    restart_s: tuple[float, float] = (0.3, 4.0)
    spares: int = 0
    surplus: int = 0
    last_to_work: int = 0
    saves: int = 0
    resumed: tuple[int, ...] = ()
    quorum_wait_s: float | None = None
    save_s: float = 0.5
    unlike: int = 0
    watched: bool = False

    @property
    def members(self) -> int:
        """How many groups are to work."""
        return self.groups - self.spares

    def role_of(self, group: str) -> str:
        """What the group of this name is set up as."""
        number = int(group[1:])
        if number >= self.groups:
            return MEMBER if self.start_window_s > 0 else RESERVE  # where a job is created by word no log is lost
        return SPARE if number < self.last_to_work else MEMBER


def draw_shape(random: random.Random, groups: int, window_s: float) -> Shape:
    """A shape for one history.

    Args:
        random: of the history's seed.
        groups: how many; 0 draws that as well.
        window_s: faults strike until then.
    """
    count = groups or random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
    pace = random.choice((0.01, 0.03, 0.03, 0.1))
    microbatches = random.choice((count, 6, 6, 8)) if count > 1 else 3
    step_s = 0.05 + pace * 2 * (microbatches + 0.5) / count
    until = max(4, int(window_s * random.uniform(0.2, 1.0) / step_s))
    lighthouses = random.choice((1, 1, 2, 2, 3))
    word = lighthouses == 1 and random.random() < 0.3  # a job is created at one lighthouse
    return Shape(
        groups=count,
        ranks=random.choice((1, 1, 1, 2, 2, 3)),
        minimum=random.choice((1, 1, min(2, count), max(1, count - 1), count)),
        lighthouses=lighthouses,
        until=min(until, 250),
        microbatches=microbatches,
        microbatch_s=(pace, 3 * pace),
        window_s=window_s,
        start_window_s=3.0 if word else 0.0,
        late_s=random.choice((0.0, 0.0, 0.0, 6.0)),
        times=random.choice((1, 1, 1, 100)),
        buckets=random.choice((1, 1, 2)),
        before=until % 3 == 0,  # not drawn by itself: every history would become another one
        copy_s=random.choice(((0.02, 0.2), (0.1, 1.0), (0.5, 3.0))),
        kept_max=random.choice((100, 100, 100, 4)),
    )


def draw_speeds(random: random.Random, groups: int) -> dict[str, Any]:
    """How fast the groups are: fields of a shape."""
    factors = [random.choice((1.0, 1.0, 1.05, 1.4, 2.0, 4.0)) for _ in range(groups)]
    return {
        "by_speed": random.random() < 0.7,
        "slow": tuple(factors) if random.random() < 0.7 else (),
        "rotate_s": random.choice((3.0, 8.0, 60.0)),
    }


def draw_spares(random: random.Random, groups: int) -> dict[str, int]:
    """Fields of a shape: in every other history some groups are spares, or are there beyond the configured number.

    Args:
        random: of its own, so that all else stays as it was without spares.
        groups: how many are configured.
    """
    spares = random.choice((0, 0, 0, 1, 1, 2))
    surplus = random.choice((0, 0, 0, 0, 1, 2))
    last = random.choice((0, 0, 1, 2))
    return {"spares": min(spares, groups - 1), "surplus": surplus, "last_to_work": last if spares else 0}


def draw_checkpoints(random: random.Random, groups: int, until: int) -> dict[str, Any]:
    """Fields of a shape: in every other history groups load checkpoints, when they are started first or again.

    Args:
        random: of its own, so that all else stays as it was without checkpoints.
        groups: how many are configured.
        until: steps of the run.
    """
    first = random.choice((0, 0, 0, random.randint(1, until // 2), random.randint(1, until)))
    steps = [random.choice((first, first, random.randint(0, first))) for _ in range(groups)]
    saves, unlike = random.choice((0, 0, 1, 5)), random.choice((0, 0, 0, 1, 2))
    return {"saves": saves, "resumed": tuple(steps) if first else (), "unlike": min(unlike, groups)}


def shape_from(fields: dict[str, object]) -> Shape:
    """A shape out of a seed's file.

    Raises:
        TypeError: for a field that a shape does not have.
    """
    return Shape(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})  # type: ignore[arg-type]


def shape_out(shape: Shape) -> dict[str, object]:
    """A shape for a seed's file: what differs from the default."""
    default = dataclasses.asdict(Shape())
    return {name: value for name, value in dataclasses.asdict(shape).items() if value != default[name]}
