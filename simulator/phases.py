"""Where in the protocol a history is: several may be so at once. Faults are aimed at them, and counted by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightkeeper.simulator.groups import GroupProcess
    from lightkeeper.simulator.world import World


def living(world: World) -> list[GroupProcess]:
    """Groups whose manager runs."""
    return [group for group in world.groups.values() if group.alive]


def members(world: World) -> list[GroupProcess]:
    """Living groups that are members of the newest epoch."""
    newest = world.checkers.newest
    if newest is None:
        return []
    return [g for g in living(world) if newest.slot_of(g.group, g.incarnation) is not None]


def joiners(world: World) -> list[GroupProcess]:
    """Living groups that heal or follow."""
    return [g for g in living(world) if any(rank.phase in ("heal", "replay", "follow") for rank in g.ranks)]


def _any_rank(world: World, *phases: str) -> bool:
    return any(rank.phase in phases for group in living(world) for rank in group.ranks if rank.alive)


def _start(world: World) -> bool:
    return all(group.machine.known is None for group in living(world))


def _steady(world: World) -> bool:
    newest = world.checkers.newest
    here = members(world)
    if newest is None or len(here) < len(newest.members) or _recovery(world) or _planned(world):
        return False
    return all(r.phase in ("before", "compute", "reduce", "vote") for g in here for r in g.ranks) and _all_switched(
        world
    )


def _all_switched(world: World) -> bool:
    newest = world.checkers.newest
    return all(g.machine.known is not None and g.machine.known == newest for g in members(world))


def _recovery(world: World) -> bool:
    return any(lh.up and lh.machine.recovery is not None and lh.machine.newest is not None for lh in world.lighthouses)


def _switching(world: World) -> bool:
    here = members(world)
    return bool(here) and (not _all_switched(world) or _any_rank(world, "form", "adopt"))


def _planned(world: World) -> bool:
    return any(lh.up and lh.machine.prepared for lh in world.lighthouses)


def _below_minimum(world: World) -> bool:
    return world.checkers.newest is not None and len(members(world)) < world.shape.minimum


def _away(world: World) -> bool:
    return all(not lh.up or lh.frozen for lh in world.lighthouses)


def _apart(world: World) -> bool:
    return len({g.stream.lighthouse.address for g in living(world) if g.stream is not None}) > 1


PHASES: dict[str, Callable[[World], bool]] = {
    "start": _start,  # no epoch is known to anybody alive
    "steady": _steady,  # all members compute, reduce and vote
    "reduce": lambda world: _any_rank(world, "before", "reduce"),
    "vote": lambda world: _any_rank(world, "vote"),
    "recovery asked": _recovery,  # promises are asked for, or the activation waits
    "switching": _switching,  # activated, and not every member is there: it forms, fetches an entry, has not heard
    "healing": lambda world: _any_rank(world, "heal"),
    "following": lambda world: _any_rank(world, "replay", "follow"),
    "planned change": _planned,
    "closing": lambda world: _any_rank(world, "closing"),
    "below minimum": _below_minimum,
    "lighthouse away": _away,
    "two lighthouses": _apart,  # groups are in touch with different ones
}


def phases_now(world: World) -> list[str]:
    """The phases that hold now; never none (a job between two epochs with nobody there is in ``start``)."""
    return [name for name, holds in PHASES.items() if holds(world)]
