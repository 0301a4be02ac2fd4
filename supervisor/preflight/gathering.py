"""Who has said what, and for whom somebody waits: a pure table of the nodes that are looked at together.

As at a meeting that begins ten minutes late at most: the first to arrive starts the clock, who is there by then takes
part, and all are told the same list. Who once was missing is not waited for again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

KEYS_MAX = 10_000


class Refused(ValueError):
    """A node is not let in; the text says why."""


@dataclass
class _Topic:
    nodes: frozenset[int]
    until: float
    values: dict[int, Any] = field(default_factory=dict)
    closed: bool = False


class Gathering:
    """What the nodes exchange, by topic.

    Args:
        nnodes: how many there are.
    """

    def __init__(self, nnodes: int) -> None:
        self._nnodes = nnodes
        self._starts: dict[int, str] = {}
        self._topics: dict[str, _Topic] = {}
        self.absent: dict[int, str] = {}

    def say(self, node: int, start: str, topic: str, value: Any, nodes: Iterable[int] | None, until: float) -> None:
        """A node says something on a topic. Whoever comes after the topic was closed is not heard.

        Args:
            node: its rank.
            start: names its start: two starts of one node are not both let in.
            topic: what it is about.
            value: what it says.
            nodes: who is expected (None: all); of those who were missing before nobody is. The first one's word counts.
            until: when the topic is closed, whoever is missing then; the first one's word counts here too.

        Raises:
            Refused: there is no such node, or another start of it has come, or too much is talked of.
        """
        if not 0 <= node < self._nnodes:
            raise Refused(f"there is no node {node} of {self._nnodes}: do all have the same --nnodes?")
        if (known := self._starts.setdefault(node, start)) != start:
            raise Refused(f"node {node} has come already, as {known}: --node-rank is to be different on each node")
        if topic not in self._topics:
            if len(self._topics) >= KEYS_MAX:
                raise Refused("too many topics")
            expected = frozenset(range(self._nnodes) if nodes is None else nodes) - set(self.absent)
            self._topics[topic] = _Topic(expected, until)
        one = self._topics[topic]
        if not one.closed and node in one.nodes:
            one.values[node] = value

    def until(self, topic: str) -> float:
        """When the topic is closed at the latest."""
        return self._topics[topic].until

    def look(self, topic: str, now: float) -> dict[int, Any] | None:
        """What was said, once all have or the time is over; it does not change after that. None before."""
        one = self._topics[topic]
        if not one.closed:
            missing = one.nodes - set(one.values)
            if missing and now < one.until:
                return None
            one.closed = True
            for node in missing:
                self.absent.setdefault(node, topic)
        return one.values

    def missing(self, topic: str) -> list[int]:
        """Who was expected and has said nothing."""
        one = self._topics[topic]
        return sorted(one.nodes - set(one.values))
