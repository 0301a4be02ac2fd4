"""Who is odd among nodes that should be alike. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def majority(values: Mapping[int, Any]) -> Any:
    """The value that most nodes have; of two that are as frequent, that of the lowest node.

    Two of two that differ cannot both be refused, or one odd node would stop everybody: so somebody's word must count.
    """
    holders: dict[str, list[int]] = {}
    for node, value in values.items():
        holders.setdefault(json.dumps(value, sort_keys=True), []).append(node)
    best = max(holders.values(), key=lambda nodes: (len(nodes), -min(nodes)))
    return values[min(best)]


def odd_ones(facts: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
    """Of nodes that do not have the facts of most: a line for each fact that differs.

    Args:
        facts: by node rank, facts by name; one that a node does not have is None.
    """
    found: dict[int, list[str]] = {}
    for name in sorted({name for of_node in facts.values() for name in of_node}):
        values = {node: of_node.get(name) for node, of_node in facts.items()}
        usual = majority(values)
        holders = sum(value == usual for value in values.values())
        for node, value in sorted(values.items()):
            if value != usual:
                whose = f"{holders} of {len(values)} nodes have"
                if holders * 2 <= len(values):
                    whose = f"no majority; node {min(one for one, held in values.items() if held == usual)} has"
                found.setdefault(node, []).append(f"{name} is {_short(value)}, {whose} {_short(usual)}")
    return found


def differences(mine: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """A line for each fact that is expected and is not so here."""
    return [
        f"{name} is {_short(mine.get(name))}, expected {_short(value)}"
        for name, value in sorted(expected.items())
        if mine.get(name) != value
    ]


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def reference_clock(offsets: Mapping[int, float]) -> float:
    """The offset by which the others are judged: the middle one; of two in the middle that of the lower node.

    Args:
        offsets: by node rank, seconds by which its clock is ahead of the host's that was asked.
    """
    ordered = sorted(offsets.items(), key=lambda one: one[1])
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return min(middle)[1]


def wrong_clocks(offsets: Mapping[int, float], skew_s_max: float) -> dict[int, float]:
    """Nodes whose clock is further from the reference than allowed, with by how many seconds it is ahead."""
    usual = reference_clock(offsets)
    return {node: at - usual for node, at in sorted(offsets.items()) if abs(at - usual) > skew_s_max}
