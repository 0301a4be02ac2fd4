"""The names that are in every message, store key, event and checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

EVEN = 1000  # the speed of a member of which nothing is known


@dataclass(frozen=True, order=True, slots=True)
class Term:
    """A lighthouse's reign: new at every start, never shared by two lighthouses.

    Attributes:
        number: rises at every start; above any number that was ever acknowledged.
        lighthouse: id of the lighthouse, random at its first start.
    """

    number: int
    lighthouse: str

    def __str__(self) -> str:
        return f"{self.number}@{self.lighthouse}"


@dataclass(frozen=True, order=True, slots=True)
class Epoch:
    """A membership. Its number is above any that was ever promised in the job."""

    number: int
    term: Term

    def __str__(self) -> str:
        return f"e{self.number}/{self.term}"


@dataclass(frozen=True, slots=True)
class Entry:
    """The name of a reduced gradient: there is one attempt per epoch and step."""

    epoch: Epoch
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of {self.epoch}" if self.made else f"the start at step {self.step + 1}"

    @property
    def made(self) -> bool:
        """Whether an epoch of this job made it; else it is an `origin`."""
        return self.epoch.number > 0


def origin(step: int) -> Entry:
    """What stands in the place of an entry's name for the state that a group was started with.

    Args:
        step: how many steps that state has behind it, 0 for a fresh one: the index of the next.
    """
    return Entry(Epoch(0, Term(0, "")), step - 1)


@dataclass(frozen=True, slots=True)
class Member:
    """One replica group in an epoch's member list; its index there is its slot.

    Attributes:
        group: stable name, for instance ``g2``.
        incarnation: new for every process start of the group.
        manager: address of the group's manager, ``host:port`` (rendezvous keys, donor look-ups).
        ranks: addresses of the ranks' transfer servers, ``host:port``, by rank index.
    """

    group: str
    incarnation: str
    manager: str
    ranks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Membership:
    """An epoch with its members in slot order and the epoch it follows.

    Attributes:
        speeds: relative speed of each member, by which microbatches are dealt; 0 is a spare, which takes part in
            every reduce and computes nothing. Empty: all alike.
    """

    epoch: Epoch
    members: tuple[Member, ...]
    base: Epoch | None = None
    speeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.speeds and len(self.speeds) != len(self.members):
            raise ValueError(f"{self.epoch} has {len(self.members)} members and {len(self.speeds)} speeds")

    def __hash__(self) -> int:
        """By its name: a thousand members take a millisecond."""
        return hash(self.epoch)

    def speed_of(self, slot: int) -> int:
        """Relative speed of a member; `EVEN` where all are alike."""
        return self.speeds[slot] if self.speeds else EVEN

    @cached_property
    def spares(self) -> tuple[str, ...]:
        """Names of the members that compute nothing, in slot order."""
        return tuple(member.group for member, speed in zip(self.members, self.speeds, strict=False) if not speed)

    def slot_of(self, group: str, incarnation: str | None = None) -> int | None:
        """Index of the group in the member list, or None if it is not in it (or is another incarnation)."""
        slot = self._slots.get(group)
        return slot if slot is None or incarnation in (None, self.members[slot].incarnation) else None

    @cached_property
    def _slots(self) -> dict[str, int]:
        """Slot by group: looked up for every member in every event of a job."""
        return {member.group: slot for slot, member in enumerate(self.members)}

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Names of the members in slot order."""
        return tuple(member.group for member in self.members)


def speeds_in(speeds: Sequence[int]) -> tuple[int, ...]:
    """The speeds as a membership has them: none if all are alike."""
    return () if len(set(speeds)) <= 1 else tuple(speeds)
