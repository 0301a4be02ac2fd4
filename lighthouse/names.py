"""The names that are in every message, store key, event and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
        return f"step {self.step} of {self.epoch}"


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
    """An epoch with its members in slot order and the epoch it follows."""

    epoch: Epoch
    members: tuple[Member, ...]
    base: Epoch | None = None

    def __hash__(self) -> int:
        """By its name: a thousand members take a millisecond."""
        return hash(self.epoch)

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
