"""The nodes of a group, as its manager sees them: who has come, who is silent, who has killed its ranks.

A group lives as long as all its nodes do. So a node that is gone ends it at once, and a node that is silent for a lease
has ended what it holds by itself (its agent hears no manager either). No I/O and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightkeeper.manager.answers import SAY_AFTER_S, RankView
from lightkeeper.manager.folding import Views
from lightkeeper.manager.settings import Settings

HOST_CHARS_MAX = 253


@dataclass(frozen=True, slots=True)
class Hello:
    """How an agent was started; all of a group must have been started alike."""

    group: str
    node_rank: int
    nodes: int
    ranks: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an agent is not taken, and whether it should try again."""

    reason: str
    retry: bool = False


@dataclass(slots=True)
class Node:
    """A node whose agent has come."""

    name: str
    heard: float
    views: tuple[Views, ...] = ()
    fenced: bool = False


class Nodes:
    """The nodes besides the manager's own, which is number 0.

    Args:
        settings: what the group was told.
        now: monotonic seconds.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self.settings = settings
        self.there: dict[int, Node] = {}
        self._since = self._clock = now
        self._slept_s, self._slept_until = 0.0, now  # how long this process stood still, and until when that may tell
        self._say_after_s = SAY_AFTER_S

    @property
    def missing(self) -> list[int]:
        """Nodes whose agents have not come."""
        return [node for node in range(1, self.settings.nnodes) if node not in self.there]

    def comes(self, hello: Hello, ending: bool, now: float) -> Refusal | None:
        """An agent's first message; None if it is taken.

        Args:
            hello: what it says.
            ending: whether the group is about to end.
            now: monotonic seconds.
        """
        s = self.settings
        for what, mine, its in (
            ("--group", s.group, hello.group),
            ("--nnodes", s.nnodes, hello.nodes),
            ("--ranks", f"{s.ranks_per_node}", f"{hello.ranks / s.nnodes:g}"),
        ):
            if mine != its:
                return Refusal(f"this group's manager has {what} {mine}, and the agent {what} {its}")
        if not 1 <= hello.node_rank < s.nnodes:
            return Refusal(f"--node-rank {hello.node_rank}: of {s.nnodes} nodes the others are 1 to {s.nnodes - 1}")
        if ending:
            return Refusal("this incarnation of the group ends", retry=True)
        if (other := self.there.get(hello.node_rank)) is not None:
            return Refusal(f"{other.name} has come to this incarnation of the group already", retry=True)
        name = f"node {hello.node_rank} ({hello.host[:HOST_CHARS_MAX]}, pid {hello.pid})"
        self.there[hello.node_rank] = Node(name, now)
        return None

    def heard(self, node: int, now: float) -> None:
        """A node says something."""
        self.there[node].heard = now

    def beats(self, node: int, views: tuple[Views, ...], now: float) -> None:
        """A node says what its ranks do."""
        self.there[node].heard, self.there[node].views = now, views

    def gone(self, node: int, lease_s: float, now: float) -> str:
        """A node's stream broke; in words."""
        self._mind_clock(lease_s, now)
        name = self.there[node].name
        if now < self._slept_until:
            return f"this manager stood still for {self._slept_s:.1f} s, longer than the lease, and so {name} has ended"
        return f"the agent of {name} is gone"

    def silent(self, lease_s: float, now: float) -> tuple[int, str] | None:
        """Which node has been silent for longer than the lease, and in words; None if none has.

        Silence counts from this process's own last standstill: what was said meanwhile has yet to be read.
        """
        self._mind_clock(lease_s, now)
        for number, node in self.there.items():
            if now - node.heard > lease_s and not node.fenced:
                return number, f"{node.name} has not been heard for {now - node.heard:.1f} s"
        return None

    def _mind_clock(self, lease_s: float, now: float) -> None:
        gap_s, self._clock = now - self._clock, now
        if gap_s > lease_s / 2:
            for node in self.there.values():
                node.heard = now
        if gap_s > lease_s:
            self._slept_s, self._slept_until = gap_s, now + lease_s

    def awaited(self, now: float) -> str | None:
        """A line, less and less often, on who has not come yet."""
        if not self.missing or now - self._since <= self._say_after_s:
            return None
        self._say_after_s = 2 * (now - self._since)
        return f"{self._who_is_missing()} since {now - self._since:.0f} s"

    def too_late(self, now: float) -> str | None:
        """Why the group gives up, if an agent has not come for longer than groups may be started apart."""
        budget_s = self.settings.timeouts.start_budget_s
        if not self.missing or now - self._since <= budget_s:
            return None
        return f"{self._who_is_missing()} since {now - self._since:.0f} s"

    def _who_is_missing(self) -> str:
        one = len(self.missing) == 1
        whom = f"the agent{'' if one else 's'} of node{'' if one else 's'} {', '.join(map(str, self.missing))}"
        return f"waiting for {whom} (the group has {self.settings.nnodes} nodes)"

    def views(self) -> dict[int, RankView]:
        """What the ranks of all these nodes did when it was last said."""
        return {rank: one.view for node in self.there.values() for one in node.views for rank in one.ranks}

    def is_fenced(self, node: int) -> None:
        """A node says that nothing of the group runs on it any more."""
        self.there[node].fenced = True

    def fenced(self, *nodes: int) -> bool:
        """Whether all of these nodes have said that."""
        return all(self.there[node].fenced for node in nodes)

    def unfenced(self) -> list[str]:
        """Who has not."""
        return [node.name for node in self.there.values() if not node.fenced]
