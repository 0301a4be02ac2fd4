"""What the group machine asks the manager's service to do, in order."""

from __future__ import annotations

from dataclasses import dataclass

from lightkeeper.events.schema import Event
from lightkeeper.lighthouse.messages import ToLighthouse
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager.local import ToRank


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to the lighthouse, or drop if it is not there: `Hello` says everything anew."""

    message: ToLighthouse


@dataclass(frozen=True, slots=True)
class ToRanks:
    """Send to one rank, or to all if `rank` is None."""

    message: ToRank
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """Fence: kill every rank of the group, and whatever they started."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The manager ends with this exit code, after what was sent before."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collect:
    """Keep what can be seen of the group's ranks now; a `Kill` that follows waits for it, for a bounded time.

    Attributes:
        why: in a word, which the folder's name has.
        reason: in a sentence.
        step: the group's.
    """

    why: str
    reason: str
    step: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write an event."""

    event: Event


@dataclass(frozen=True, slots=True)
class DropKeys:
    """Rendezvous keys of epochs below this number are void; whoever waits for one is refused."""

    below: int


@dataclass(frozen=True, slots=True)
class AskMembers:
    """Ask the other members' managers which epoch is in force for them; what they say goes to `members_say`."""

    membership: Membership


Action = AskMembers | Tell | ToRanks | Collect | Kill | End | Note | DropKeys
