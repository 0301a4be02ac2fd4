"""Who of a job's groups works, who is a spare, and who waits outside. Pure functions.

A football team has eleven on the field however many came: who plays goes on playing, and when one is carried off, one
from the bench runs on that very minute, since all of them watched the match. More people than field and bench hold wait
at the gate; they have not seen the match, and cost nothing.

A spare has every entry, so that it works from the step on in which it is needed: no state is moved. It works until it
is gone itself: if the one it stands in for comes back, that one is the spare from then on. Only a group that was set up
as a spare (``role``) makes way, and only at the moment in which one comes in that was not: so nothing flaps.

A job may begin only once all of its groups are there, and a lighthouse that knows nothing of the job counts them: so a
group that is none of them says so (``reserve``). It begins no job, waits until one runs that has a place for it, and is
like a spare then.

Rejected: to promote by measured speed or by name. Whoever is promoted holds nothing of the step, so all are alike; and
to give the work back to whoever had it before would be a second change of shares for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

SPARE = "spare"
MEMBER = "member"
RESERVE = "reserve"
ROLES = (MEMBER, SPARE, RESERVE)


def at_work(
    groups: Sequence[str], members: int, worked: Collection[str], joined: Collection[str], spares: Collection[str]
) -> frozenset[str]:
    """Which groups of an epoch compute: `members` of them as long as there are so many.

    Args:
        groups: all of the epoch, in slot order.
        members: how many are to work.
        worked: those that worked in the epoch before.
        joined: those that were not in the epoch before.
        spares: those that were set up as spares or reserves; they are the last to work.
    """
    working = [group for group in groups if group in worked][:members]
    others = sorted((group for group in groups if group not in working), key=lambda group: group in spares)
    free = max(0, members - len(working))
    working += others[:free]
    for group in others[free:]:
        stand_in = next((w for w in reversed(working) if w in spares and w in worked), None)
        if group in joined and group not in spares and stand_in is not None:
            working[working.index(stand_in)] = group
    return frozenset(working)


def parked_words(groups: int, members: int, spares: int) -> str:
    """What a group is told that the job has no use for now.

    Args:
        groups: how many the job has, this one not counted.
        members: how many of them are to work.
        spares: how many are to be spares.
    """
    has = f"{members} + {spares}" if spares else str(members)
    return f"parked: {groups} group{'s are' if groups != 1 else ' is'} here, the job has {has}; joins when one is lost"
