"""What the checks with other nodes have in common: how they end when the others, or this node, are not heard."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightkeeper.supervisor.preflight.meeting import LeftOut, MeetingLost, Place
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, skipped

Look = Callable[[Request, Mapping[str, Result]], Result]


def with_others(look: Callable[[Request, Mapping[str, Result], Place], Result]) -> Look:
    """A check's `look`, given its place at the meeting.

    A lost meeting is node 0's fault or the network's, so it skips the check; a node that the others went on without
    has been too slow, so that fails.
    """

    def looked(request: Request, earlier: Mapping[str, Result]) -> Result:
        place = Place(request)
        try:
            return look(request, earlier, place)
        except MeetingLost as error:
            return skipped(f"{error}; node 0 has ended")
        except LeftOut as error:
            return failed(str(error))
        finally:
            place.close()

    return looked


def without(missing: tuple[int, ...]) -> str:
    """``; without node 2, which did not answer``; empty if nobody is missing."""
    if not missing:
        return ""
    names = ", ".join(map(str, missing))
    return f"; without node {names}, which did not answer: do not join it"
