"""Which nodes get no work, why, and how they come back. Pure: a book and the time in, a new book out.

Like a library's list of books that are being mended: one is put on it with a reason, comes off it when somebody has
read it through (a burn-in), and one that comes back twice in a week is not lent again before a person has looked at it.

A node is known by its name and, where it can be read, by its hardware's serial: hardware that was put aside stays so
under a new name, and other hardware under an old name is not it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

WEEK_S = 7 * 86400.0
FAILURES_MAX = 2  # within a week; from so many on nobody returns by a burn-in alone
KEPT_MAX = 50  # failures and burn-ins of one node, the newest
TEXT_CHARS_MAX = 500
NODES_MAX = 100_000


@dataclass(frozen=True)
class Failure:
    """One reason to put a node aside; `burn_in`: it failed there, while it was aside already. `wall`: s since 1970."""

    wall: float
    reason: str
    evidence: str = ""
    job: str = ""
    burn_in: bool = False


@dataclass(frozen=True)
class BurnIn:
    """One burn-in that a node passed or did not."""

    wall: float
    passed: bool
    rounds: int
    seconds: float
    command: str = ""


@dataclass(frozen=True)
class Node:
    """What is known of a node that was put aside at least once.

    Attributes:
        name: as the scheduler calls it.
        serial: of its hardware, "" if it could not be read.
        out: whether it gets no work now.
        count: how often it was put aside, ever.
        failures: the newest of them, oldest first.
        burn_ins: the newest of them.
        released: when, why and how it came back last: "", or words.
    """

    name: str
    serial: str = ""
    out: bool = True
    count: int = 0
    failures: tuple[Failure, ...] = ()
    burn_ins: tuple[BurnIn, ...] = ()
    released: str = ""

    @property
    def reason(self) -> str:
        """The newest one."""
        return self.failures[-1].reason if self.failures else ""

    @property
    def passed(self) -> bool:
        """Whether it has passed a burn-in since it failed last."""
        last = self.failures[-1].wall if self.failures else 0.0
        return bool(self.burn_ins) and self.burn_ins[-1].passed and self.burn_ins[-1].wall >= last

    def recent(self, wall: float) -> int:
        """Failures within the last week, burn-ins that failed included. One dated later counts: a clock was wrong."""
        return sum(wall - failure.wall < WEEK_S for failure in self.failures)

    def returns_by_itself(self, wall: float) -> bool:
        """Whether a burn-in alone may bring it back."""
        return self.recent(wall) < FAILURES_MAX


class NotAllowed(ValueError):
    """A node may not come back so, or is not there; the text says what to do."""


@dataclass(frozen=True)
class Book:
    """All nodes, by name."""

    nodes: dict[str, Node] = field(default_factory=dict)

    def find(self, name: str, serial: str = "") -> Node | None:
        """The node, by its serial first.

        Args:
            name: as the scheduler calls it.
            serial: of its hardware, "" if it cannot be read.

        Returns:
            None if nothing is known of it: never put aside, or other hardware that has the name now.
        """
        if serial:
            for node in self.nodes.values():
                if node.serial == serial:
                    return node
        named = self.nodes.get(name)
        return None if named is not None and serial and named.serial and named.serial != serial else named

    def excluded(self, name: str, serial: str = "") -> str:
        """Why a node gets no work; "" if it may."""
        node = self.find(name, serial)
        if node is None or not node.out:
            return ""
        known = f" (known as {node.name})" if node.name != name else ""
        return f"{name}{known} is in quarantine: {node.reason or 'no reason is given'}"

    def add(self, name: str, reason: str, wall: float, *, serial: str = "", evidence: str = "", job: str = "") -> Book:
        """With a node put aside, or once more; `wall` in seconds since 1970.

        Raises:
            NotAllowed: there are too many nodes.
        """
        known = self.find(name, serial)
        if known is None and len(self.nodes) >= NODES_MAX and name not in self.nodes:
            raise NotAllowed(f"{NODES_MAX} nodes are in it already")
        others = self
        if known is None and (former := self.nodes.get(name)) is not None:  # other hardware had that name
            kept = replace(former, name=f"{name}~{former.serial}")
            others = Book({key: one for key, one in self.nodes.items() if key != name} | {kept.name: kept})
        node = known or Node(name)
        failure = Failure(wall, _cut(reason), _cut(evidence), _cut(job))
        node = replace(node, out=True, serial=serial or node.serial, count=node.count + 1)
        return others._with(_failed(node, failure))

    def burned_in(self, name: str, burn_in: BurnIn, since: int, why: str = "") -> Book:
        """With what came of a burn-in: passed, it comes back unless it failed too often; failed, that is a failure.

        Args:
            name: of the node.
            burn_in: how it went.
            since: the node's `count` when the burn-in began; one that was put aside meanwhile stays so.
            why: what went wrong, if it did.

        Raises:
            NotAllowed: it is not in quarantine.
        """
        node = self._out(name)
        node = replace(node, burn_ins=(*node.burn_ins, burn_in)[-KEPT_MAX:])
        if not burn_in.passed:
            return self._with(_failed(node, Failure(burn_in.wall, _cut(why or "burn-in failed"), burn_in=True)))
        if node.count == since and node.returns_by_itself(burn_in.wall):
            node = replace(node, out=False, released=f"passed a burn-in of {burn_in.rounds} rounds")
        return self._with(node)

    def release(self, name: str, by: str, force: str = "") -> Book:
        """With a node that gets work again by a person's word.

        Args:
            name: of the node.
            by: who says so.
            force: why it may come back without having passed a burn-in; "": it must have.

        Raises:
            NotAllowed: it is not in quarantine, or has passed no burn-in since it failed.
        """
        node = self._out(name)
        if not force and not node.passed:
            raise NotAllowed(
                f"{name} has passed no burn-in since it failed: lightkeeper quarantine burn-in {name}, or release it "
                "with --force REASON"
            )
        words = f"by {by}: {_cut(force)}" if force else f"by {by}, after it passed a burn-in"
        return self._with(replace(node, out=False, released=words))

    def _out(self, name: str) -> Node:
        node = self.nodes.get(name)
        if node is None or not node.out:
            raise NotAllowed(f"{name} is not in quarantine")
        return node

    def _with(self, node: Node) -> Book:
        return Book({**self.nodes, node.name: node})


def _failed(node: Node, failure: Failure) -> Node:
    return replace(node, failures=(*node.failures, failure)[-KEPT_MAX:])


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS_MAX else line[: TEXT_CHARS_MAX - 3] + "..."


@dataclass(frozen=True)
class Share:
    """A node's part of all exclusions: `share` alone, `together` with those above it, both 0 to 1."""

    name: str
    count: int
    share: float
    together: float


def concentration(nodes: Iterable[Node]) -> list[Share]:
    """Who was put aside how often, the most often first: a few nodes with most of it are bad nodes.

    A burn-in that failed is not counted: the node was aside already.
    """
    counted = sorted((node for node in nodes if node.count), key=lambda node: (-node.count, node.name))
    total, sofar, shares = sum(node.count for node in counted), 0, []
    for node in counted:
        sofar += node.count
        shares.append(Share(node.name, node.count, node.count / total, sofar / total))
    return shares
