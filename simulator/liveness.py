"""With the minimum alive and a lighthouse that may decide in reach, the job commits within the outage budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightkeeper.simulator.checkers import Violation
from lightkeeper.simulator.phases import living, members

if TYPE_CHECKING:
    from lightkeeper.simulator.faults import Faults
    from lightkeeper.simulator.world import World

LOOK_S = 1.0
SLACK_S = 15.0
MEET_S = 60.0  # until all groups have met at one of several lighthouses


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
        world.clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        world, now = self.world, self.world.clock.now
        world.clock.after(LOOK_S, self._look)
        world.checkers.waits()
        if world.over or world.done:
            return
        if not self._quiet():
            self.quiet_since = self.calm_since = now
        elif not self._may_go_on():
            self.calm_since = now
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
            groups = living(self.world)
            return len(groups) == self.world.shape.groups and not self._only_followers()  # a first epoch: all of them
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
