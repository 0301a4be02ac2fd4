"""Pairs of nodes: who is slow, told from two tries with different partners. Pure functions.

One slow pair says that one of two is slow, or what is between them. A second partner tells: who is fast with anybody
is well, and who is slow with everybody is not. (An all-reduce among all says only that somebody is slow: everybody
waits for that one.) A first round pairs neighbours, a second gives those in doubt a partner that has proved well,
where there is one; a third is had only if the second left somebody in doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Pair = tuple[int, int]
SLOW_SHARE = 0.5  # of the fastest pair: without a floor a pair below that is slow
ROUNDS_MAX = 3


@dataclass(frozen=True)
class Sweep:
    """What the pairs say.

    Attributes:
        nodes: those that are slow with everybody.
        links: pairs of which both are well, but not with each other.
        unclear: pairs that nobody else was paired with: one of the two is slow, or the link.
        limit_gbps: below that a pair is slow.
    """

    nodes: tuple[int, ...] = ()
    links: tuple[Pair, ...] = ()
    unclear: tuple[Pair, ...] = ()
    limit_gbps: float = 0.0

    def named(self, node: int) -> str:
        """What is said against this node; empty if nothing is."""
        if node in self.nodes:
            return f"node {node} is slow with every partner"
        for pair in self.unclear:
            if node in pair:
                return f"node {pair[0]}, node {pair[1]} or the link between them is slow"
        return ""

    def line(self) -> str:
        """In one line, for people."""
        parts = [f"node {node} is slow with every partner" for node in self.nodes]
        parts += [f"the link between {a} and {b} is slow" for a, b in self.links]
        parts += [f"node {a}, node {b} or the link between them is slow" for a, b in self.unclear]
        return "; ".join(parts) or "no pair is slow"


def pair(a: int, b: int) -> Pair:
    """Two nodes, in the order in which a pair is named."""
    return (a, b) if a < b else (b, a)


def neighbours(nodes: Iterable[int]) -> list[list[Pair]]:
    """The first round, as waves: the pairs of a wave are measured at once, none twice in it.

    Of an odd number the last one is paired with the first one, in a wave of its own.
    """
    order = sorted(nodes)
    if len(order) < 2:
        return []
    waves = [[pair(a, b) for a, b in zip(order[::2], order[1::2], strict=False)]]
    if len(order) % 2:
        waves.append([pair(order[-1], order[0])])
    return waves


def judge(measured: Mapping[Pair, float], floor_gbps: float | None = None) -> Sweep:
    """Who is slow.

    Args:
        measured: bus bandwidth by pair, in GB/s; 0 for a pair that did not get done.
        floor_gbps: below that a pair is slow; None: below `SLOW_SHARE` of the fastest.
    """
    limit = SLOW_SHARE * max(measured.values(), default=0.0) if floor_gbps is None else floor_gbps
    slow = [one for one, gbps in sorted(measured.items()) if gbps < limit]
    well = {node for one, gbps in measured.items() if gbps >= limit for node in one}
    doubted = {node for one in slow for node in one} - well
    links = tuple(one for one in slow if well.issuperset(one))
    # slow with one that is well, and with somebody else: it is the node; with that one alone it may be the link
    tries = {node: [one for one in slow if node in one] for node in doubted}
    named = {node for node, pairs in tries.items() if len(pairs) > 1 and any(well & set(one) for one in pairs)}
    if not well and len(doubted) > 2:
        named = doubted  # nobody is well: the floor is above all, or the network below it
    unclear = tuple(one for one in slow if set(one) & doubted and not set(one) & named)
    return Sweep(tuple(sorted(named)), links, unclear, limit)


def next_round(nodes: Iterable[int], measured: Mapping[Pair, float], floor_gbps: float | None) -> list[list[Pair]]:
    """The second and the third round, as waves: nobody gets a partner again.

    Those in doubt get one that is well, as many at once as there are; if there is none, and where nobody is in doubt,
    all get a new neighbour.
    """
    order = sorted(nodes)
    found = judge(measured, floor_gbps)
    doubted = {node for one, gbps in measured.items() if gbps < found.limit_gbps for node in one}
    well = {node for one, gbps in measured.items() if gbps >= found.limit_gbps for node in one}
    suspects = [node for node in order if node in doubted - well]
    if suspects and well:
        return _with_proven(suspects, sorted(well), measured)
    return _shifted(order, measured)


def _with_proven(suspects: list[int], well: list[int], measured: Mapping[Pair, float]) -> list[list[Pair]]:
    waves: list[list[Pair]] = []
    left = list(suspects)
    while left:
        wave: list[Pair] = []
        busy: set[int] = set()
        for node in list(left):
            partner = next((one for one in well if one not in busy and pair(node, one) not in measured), None)
            if partner is not None:
                wave.append(pair(node, partner))
                busy.add(partner)
                left.remove(node)
        if not wave:
            break  # it has met all of them
        waves.append(wave)
    return waves


def _shifted(order: list[int], measured: Mapping[Pair, float]) -> list[list[Pair]]:
    """A matching of pairs that were not measured yet, near neighbours first."""
    wave: list[Pair] = []
    free = order[1:] + order[:1]
    while free:
        node = free.pop(0)
        partner = next((one for one in free if pair(node, one) not in measured), None)
        if partner is not None:
            free.remove(partner)
            wave.append(pair(node, partner))
    return [wave] if wave else []


def settled(measured: Mapping[Pair, float], floor_gbps: float | None) -> bool:
    """Whether a third round would tell nothing more: nobody is in doubt, or each was slow with one that is well."""
    found = judge(measured, floor_gbps)
    well = {node for one, gbps in measured.items() if gbps >= found.limit_gbps for node in one}
    doubted = {node for one, gbps in measured.items() if gbps < found.limit_gbps for node in one} - well
    return doubted <= set(found.nodes) and (not doubted or bool(well))
