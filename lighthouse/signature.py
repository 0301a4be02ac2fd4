"""What must be alike in all groups, compared by name."""

from __future__ import annotations

from collections.abc import Mapping

SHOWN_MAX = 5
FIRST = ("ranks", "place")  # what differs because of these is not worth a line


def _order(name: str) -> tuple[int, str]:
    return FIRST.index(name) if name in FIRST else len(FIRST), name


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], me: str = "here", them: str = "there") -> list[str]:
    """Lines that name what differs between two signatures, the first few of them.

    Args:
        mine: name to value, for instance ``{"wte.weight": "float32[256, 64]"}``.
        theirs: the same from the other group.
        me: what to call the first in the lines.
        them: what to call the second.
    """
    lines = []
    for name in sorted(mine.keys() | theirs.keys(), key=_order):
        a, b = mine.get(name), theirs.get(name)
        if a != b:
            lines.append(f"{name} is {a or 'absent'} in {me} and {b or 'absent'} in {them}")
            if name == "ranks":
                return lines
    if len(lines) > SHOWN_MAX:
        return [*lines[:SHOWN_MAX], f"and {len(lines) - SHOWN_MAX} more"]
    return lines
