"""With the minimum alive and a lighthouse that may decide in reach, the job commits within the outage budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightkeeper.lighthouse.spares import RESERVE
from lightkeeper.simulator.checkers import Violation
from lightkeeper.simulator.phases import living, members

if TYPE_CHECKING:
    from lightkeeper.simulator.faults import Faults
    from lightkeeper.simulator.groups import GroupProcess
    from lightkeeper.simulator.world import World

LOOK_S = 1.0
SLACK_S = 15.0
MEET_S = 60.0  # until all groups have met at one of several lighthouses
SEATED_S = 5.0  # until a group for which there is a place is told to heal


class Liveness:
    """Looks once a second.

    Args:
        world: the history.
        faults: what strikes in it; while something still has an effect, nothing is asked.
    """

    def __init__(self, world: World, faults: Faults) -> None:
        self.world, self.faults = world, faults
        self.quiet_since = self.calm_since = self.members_since = 0.0
        self.bound_s = world.shape.budget_s + SLACK_S + (MEET_S if world.shape.lighthouses > 1 else 0.0)
        self._outside: dict[str, float] = {}  # since when an incarnation is not told to heal, though there is a place
        world.clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        world, now = self.world, self.world.clock.now
        world.clock.after(LOOK_S, self._look)
        world.checkers.waits()
        if world.over or world.done:
            return
        if not self._quiet():
            self.quiet_since = self.calm_since = now
            self._outside.clear()
        elif not self._may_go_on():
            self.calm_since = now
        if self.quiet_since < now:
            self._leaves_nobody_outside(now)
        if not self._only_followers():
            self.members_since = now
        elif now - self.members_since > self.bound_s and not world.operator_speaks():
            world.start_all_again()
        quiet_s, stands_s = (now - max(t, world.checkers.last_commit_s) for t in (self.quiet_since, self.calm_since))
        if quiet_s > self.bound_s and world.operator_speaks():
            self.quiet_since = self.calm_since = now
        elif stands_s > self.bound_s:
            waiting = "; ".join(f"{lh.address}: {lh.machine.waiting(lh.now)}" for lh in world.lighthouses if lh.up)
            raise Violation("liveness", f"nothing was committed for {stands_s:.0f} s, and nothing is wrong ({waiting})")

    def _leaves_nobody_outside(self, now: float) -> None:
        """A group that is in touch, parked or not, is told to heal once the job has a place for it."""
        waiting = {name: self._outside.get(name, now) for name in map(self._not_told, living(self.world)) if name}
        self._outside = waiting
        for name, since in waiting.items():
            if now - since > SEATED_S:
                raise Violation("A5", f"{name} has waited for {now - since:.0f} s, and there is a place for it")

    def _not_told(self, process: GroupProcess) -> str:
        """Its incarnation, if the lighthouse it is in touch with has a place for it and has not told it to heal."""
        newest, here = self.world.checkers.newest, members(self.world)
        if process.stream is None or newest is None or len(here) < len(newest.members):
            return ""
        lighthouse = process.stream.lighthouse
        machine = lighthouse.machine
        group = machine.groups.get(process.group)
        if group is None or group.join is None or group.incarnation != process.incarnation or not group.in_touch:
            return ""
        others = [other for other in machine.groups.values() if other.in_touch and not machine.is_member(other.name)]
        coming = [other.comes_in or other.tries > 0 for other in others]  # or it comes in again after a breath
        may_come = not machine.is_member(process.group) and not group.comes_in and group.admit_s < lighthouse.now
        place = machine.reigns and machine.newest == newest and len(here) + sum(coming) < self.world.shape.groups
        return process.incarnation if place and may_come else ""

    def _quiet(self) -> bool:
        """Whether nothing is wrong with machines and network: if the job stands, a person looks why."""
        world = self.world
        if world.clock.now < self.faults.last_s or not world.network.whole or world.network.slow_s:
            return False
        groups = living(world)
        if len(groups) < world.shape.minimum or any(g.frozen or any(r.frozen for r in g.ranks) for g in groups):
            return False
        return all(lh.up and not lh.frozen for lh in world.lighthouses)

    def _may_go_on(self) -> bool:
        """Whether nobody's word is needed for the job to go on."""
        if self.world.checkers.newest is None or not members(self.world):
            groups = [group for group in living(self.world) if group.settings.role != RESERVE]
            return len(groups) >= self.world.shape.groups and not self._only_followers()  # a first epoch: all of them
        return self._may_decide()

    def _only_followers(self) -> bool:
        """Whether all members are gone and a joiner holds their state: only a person may say that they are."""
        return not members(self.world) and any(group.machine.following for group in living(self.world))

    def _may_decide(self) -> bool:
        """Whether nobody is missing, or a lighthouse reigns by its log."""
        world, newest = self.world, self.world.checkers.newest
        assert newest is not None
        if len(members(world)) == len(newest.members):
            return True
        here = {g.stream.lighthouse for g in members(world) if g.stream is not None}
        return any(lh.machine.newest == newest and lh.machine.reigns for lh in here)
