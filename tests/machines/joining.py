"""A group that joins, as far as it has come: told to heal, or healed."""

from __future__ import annotations

import pytest

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Member
from tests.machines.groupworld import GroupWorld

RANKS = pytest.mark.parametrize("ranks", [1, 2])
E1 = (1, 1, "lh")  # the name of epoch 1 as votes carry it


def donors(*groups: str, ranks: int = 2) -> tuple[Member, ...]:
    return tuple(Member(g, "i1", f"{g}:1", tuple(f"{g}:{10 + r}" for r in range(ranks))) for g in groups)


def joiner(ranks: int = 1) -> GroupWorld:
    """g1 came back while g0 and g2 train in epoch 1; it is told to heal from the boundary before step 5."""
    world = GroupWorld(ranks)
    world.connect()
    world.ready()
    world.hears(m.Heal(5, donors("g0", "g2", ranks=ranks)))
    return world


def healed(ranks: int = 1) -> GroupWorld:
    """It has the state before step 5."""
    world = joiner(ranks)
    joiner_votes(world, "healed", 5)
    world.forget()
    return world


def joiner_votes(world: GroupWorld, outcome: str, step: int, rank: int | None = None, **more: object) -> None:
    entry = None if outcome == "lost" else E1
    for r in range(world.size) if rank is None else (rank,):
        world.vote(r, outcome, step, at=0, **{"entry": entry, **more})
