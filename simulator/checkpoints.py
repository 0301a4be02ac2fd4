"""The user's checkpoints: what each group finds when it is started, and with whom a job must begin because of them.

Whoever leads writes one when a step is final, on its own disk alone: so the groups of a job that is started again come
with different ones, and a group that comes back to a job that runs with one that the job has left behind, or has not
come to again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, origin
from lightkeeper.simulator.state import START, State

if TYPE_CHECKING:
    from lightkeeper.simulator.lighthouses import Lighthouse
    from lightkeeper.simulator.network import Stream
    from lightkeeper.simulator.world import World

OTHER = 10_000  # above all steps: bits of one that nobody else has


def loaded(step: int, bits: int) -> State:
    """A state out of a file: nobody knows the entry that it ends with."""
    return State(step - 1, origin(step), bits)


class Checkpoints:
    """The newest on each group's disk."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.begun_from = 0  # jobs that were begun from a checkpoint
        self._disks: dict[str, State] = {}
        self._begun: set[Epoch] = set()
        self._promised: dict[tuple[str, str], m.Promise] = {}  # the newest by lighthouse and incarnation
        for number, name in enumerate(world.names):
            step = world.shape.resumed[number] if number < len(world.shape.resumed) else 0
            other = number < world.shape.unlike
            if step or other:
                self._disks[name] = loaded(step, -(OTHER * (number + 1) if other else 0) - step)

    def of(self, group: str) -> State:
        """What the group has when it is started."""
        return self._disks.get(group, START)

    def final(self, state: State, membership: Membership | None) -> None:
        """A step is final; who leads in the epoch that made it writes a checkpoint, if one is due and it lives."""
        every = self.world.shape.saves
        if not every or (state.step + 1) % every or membership is None or not state.name.made:
            return
        lead = next(one for slot, one in enumerate(membership.members) if membership.speed_of(slot))
        process = self.world.groups.get(lead.group)
        if process is not None and process.alive and process.incarnation == lead.incarnation:
            self._disks[lead.group] = loaded(state.step + 1, state.bits)

    def kept(self, state: State) -> None:
        """What the job's last group saves as it ends, on a storage that all share: from then on each starts from it."""
        for name in self.world.names:
            if self.of(name).step < state.step:
                self._disks[name] = loaded(state.step + 1, state.bits)

    # ------------------------------------------------------------ rule W11

    def hears(self, lighthouse: Lighthouse, stream: Stream, promise: m.Promise) -> None:
        """A promise arrives."""
        self._promised[lighthouse.address, stream.process.incarnation] = promise

    def begins(self, lighthouse: Lighthouse, membership: Membership) -> str:
        """A lighthouse logs a first epoch: who of its members does not hold the state furthest on; empty: all do."""
        promised = {
            stream: promise
            for (address, stream), promise in self._promised.items()
            if address == lighthouse.address and promise.epoch == membership.epoch
        }
        if not promised or membership.epoch in self._begun:
            return ""  # it has learnt of a job that runs
        self._begun.add(membership.epoch)
        held = self._held(lighthouse, promised)
        best = furthest(list(held.values()))
        self.begun_from += not best.made and best.step >= 0
        wrong = [one.group for one in membership.members if held.get(one.group) != best]
        return (
            f"{', '.join(wrong)} begin {membership.epoch}, and of {_told(held)} {best} is furthest on" if wrong else ""
        )

    def _held(self, lighthouse: Lighthouse, promised: Mapping[str, m.Promise]) -> Mapping[str, Entry]:
        """By group in touch that has joined: the name of its state, when it promised, or now if it was not asked."""
        found: dict[str, Entry] = {}
        joined = [g for g in lighthouse.machine.groups.values() if g.join is not None and g.in_touch and not g.leaving]
        some_parked = len(joined) > self.world.shape.groups
        for group in joined:
            process, promise = self.world.groups.get(group.name), promised.get(group.incarnation)
            if promise is not None:
                found[group.name] = promise.last or origin(0)
            elif process is not None and process.incarnation == group.incarnation and not some_parked:
                found[group.name] = process.machine.last or origin(0)
        return found


def furthest(names: Sequence[Entry]) -> Entry:
    """By hand: the newest entry, unless a checkpoint has more steps behind it."""
    best = origin(0)
    for name in names:
        if not name.made and name.step > best.step:
            best = name
    newest = [name for name in sorted(names, key=lambda name: (name.epoch, name.step)) if name.made][-1:]
    return newest[0] if newest and newest[0].step >= best.step else best


def _told(held: Mapping[str, Entry]) -> str:
    return ", ".join(f"{group}: {name}" for group, name in sorted(held.items()))
