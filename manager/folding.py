"""What the ranks of one node say, folded into one message per step; and what they are told, said once.

A manager that spoke with each rank of a large group would spend its time on their messages: 260 ms a step for 512 of
them. All ranks of a node vote alike in nearly every step, and are answered alike. So their votes are held until the
last of them has voted, which the group has to wait for anyway, and equal ones are said once. Whatever else a rank says
goes on at once, and takes along what was held; so does a failure, which others wait for.

No I/O and no clock: ranks and manager are whoever calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightkeeper.manager import local
from lightkeeper.manager.answers import RankView

HELD_S_MAX = 0.2  # then a vote goes on alone: the manager may have an answer for it that does not need the others
AT_ONCE = ("failed", "lost")


@dataclass(frozen=True, slots=True)
class Said:
    """One message of, or to, each of these ranks."""

    ranks: tuple[int, ...]
    message: local.FromRank | local.ToRank


class Folder:
    """The votes of the ranks of one node.

    Args:
        ranks: indices of these ranks within the group.
    """

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._awaits: set[int] = set()  # voted, and not answered yet
        self._ended: set[int] = set()
        self._held: list[tuple[int, local.FromRank]] = []
        self._since = 0.0

    def takes(self, rank: int, message: local.FromRank, now: float) -> list[Said]:
        """A rank says something; returns what is said to the manager now, in order."""
        held = isinstance(message, local.Vote) and message.outcome not in AT_ONCE
        if isinstance(message, local.Vote):
            self._awaits.add(rank)
        if not self._held:
            self._since = now
        self._held.append((rank, message))
        return [] if held and not self._all_have_voted() else self._all_held()

    def answered(self, ranks: Iterable[int]) -> None:
        """These ranks were told the answer to their votes."""
        self._awaits.difference_update(ranks)

    def ended(self, rank: int) -> list[Said]:
        """A rank ended: nobody waits for its vote."""
        self._ended.add(rank)
        return self._all_held() if self._all_have_voted() else []

    def due(self, now: float) -> list[Said]:
        """What has been held for too long."""
        return self._all_held() if self._held and now - self._since > HELD_S_MAX else []

    def _all_have_voted(self) -> bool:
        return len(self._awaits | self._ended) >= len(self._ranks)

    def _all_held(self) -> list[Said]:
        held, self._held = self._held, []
        return fold(held)


def fold(said: Iterable[tuple[int, local.FromRank | local.ToRank]]) -> list[Said]:
    """Says equal messages once. What is said by (or to) one rank stays in its order.

    Args:
        said: rank and message, in order.
    """
    ranks_of: list[list[int]] = []
    messages: list[local.FromRank | local.ToRank] = []
    place_of: dict[bytes, int] = {}
    newest: dict[int, int] = {}  # place of the last message of each rank
    encoded: tuple[object, bytes] = (None, b"")
    for rank, message in said:
        if message is not encoded[0]:
            encoded = (message, type(message).__name__.encode() + local.body(message))
        place = place_of.get(encoded[1])
        if place is None or newest.get(rank, -1) >= place:
            place = place_of[encoded[1]] = len(messages)
            messages.append(message)
            ranks_of.append([])
        ranks_of[place].append(rank)
        newest[rank] = place
    return [Said(tuple(ranks), message) for ranks, message in zip(ranks_of, messages, strict=True)]


def by_node(told: Iterable[tuple[int | None, local.ToRank]], nodes: int, per_node: int) -> list[list[Said]]:
    """What each node's ranks are told, folded.

    Args:
        told: rank, or None for all ranks of the group, and message; in order.
        nodes: nodes of the group.
        per_node: ranks of each: rank ``r`` is on node ``r // per_node``.
    """
    parts: list[list[tuple[int, local.ToRank]]] = [[] for _ in range(nodes)]
    for rank, message in told:
        for one in range(nodes * per_node) if rank is None else (rank,):
            parts[one // per_node].append((one, message))
    return [fold(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Views:
    """Ranks in one phase of one step, seen as their worst: how long one waits, is stopped, does nothing new, takes for
    a microbatch; and how little one waits in a step.
    """

    ranks: tuple[int, ...]
    view: RankView


def fold_views(views: dict[int, RankView]) -> list[Views]:
    """Ranks in the same phase and step, seen together; those that wait, those that are stopped, those that have done
    nothing new for about as long, and the slowest, by themselves.
    """
    slowest = max(views, key=lambda rank: (views[rank].microbatch_us, -rank), default=-1)
    slowest = slowest if slowest in views and views[slowest].microbatch_us else -1
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, view in sorted(views.items()):
        idle = int(view.idle_s).bit_length()  # below a second all are alike, then each doubling
        waits = view.waiting_s > 0, view.stopped_s > 0, view.asks_s > 0
        alike = (view.phase, view.step, *waits, idle, view.expected_s, rank == slowest)
        groups.setdefault(alike, []).append(rank)
    return [Views(tuple(ranks), _worst([views[rank] for rank in ranks])) for ranks in groups.values()]


def _worst(views: list[RankView]) -> RankView:
    """Of views in one phase of one step."""
    return RankView(
        views[0].phase,
        views[0].step,
        max(view.waiting_s for view in views),
        max(view.stopped_s for view in views),
        max(view.microbatch_us for view in views),
        max(view.idle_s for view in views),
        views[0].expected_s,
        min(view.wait_us for view in views),
        min(view.asks_s for view in views),
    )
