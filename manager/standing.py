"""Whether an epoch still stands, by the word of its members' managers.

Who slept through a lease may have been left out. The lighthouse knows; while none answers, the other members do: an
epoch can only have been followed by another if one of them has promised that. So it stands if each of them, in the
incarnation in which it is a member, says that it is in it and has promised no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightkeeper.lighthouse.names import Membership


@dataclass(frozen=True, slots=True)
class Word:
    """What one member's manager says.

    Attributes:
        incarnation: who answers there now.
        known: the epoch in force for it.
        promised: the highest epoch number it has promised.
        over: why its group has ended, empty while it has not.
    """

    incarnation: str
    known: Membership | None
    promised: int
    over: str = ""


def doubts(mine: Membership, prepared: tuple[Membership, ...], group: str, words: Mapping[str, Word]) -> list[str]:
    """Members whose word does not show that the epoch stands; none if it does.

    Args:
        mine: the epoch in question.
        prepared: planned changes on it that this group knows: the entry that activates one brings it there, too.
        group: which asks, itself a member.
        words: what was answered, by group.
    """
    doubtful = []
    for member in mine.members:
        if member.group == group:
            continue
        word = words.get(member.group)
        stands = (
            word is not None
            and word.incarnation == member.incarnation
            and not word.over
            and word.known is not None
            and (word.known.epoch == mine.epoch or word.known in prepared)
            and word.promised <= word.known.epoch.number
        )
        if not stands:
            doubtful.append(member.group)
    return doubtful
