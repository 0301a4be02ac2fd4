"""What the lighthouse knows of one group's current incarnation."""

from __future__ import annotations

from dataclasses import dataclass

from lightkeeper.lighthouse.messages import Beat, Failed, Hello, Join
from lightkeeper.lighthouse.names import Member


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a group is no longer there, and who says so.

    Attributes:
        cause: one line for the person on call.
        detected_by: ``manager`` (its own manager said so), ``stream`` (broken), ``lease`` (silent), ``frozen``,
            ``failures`` (named by most failed reduces) or ``left``.
    """

    cause: str
    detected_by: str
    phase: str = ""
    step: int = 0


@dataclass(slots=True)
class Group:
    """One incarnation of a group, as its stream shows it.

    Attributes:
        connection: number of its stream, None while the stream is broken.
        heard: when it was last heard, or its stream broke (monotonic seconds).
        joined_s: when it joined (monotonic seconds).
        failed: its report that the newest epoch is over, until the next one is activated.
    """

    name: str
    incarnation: str
    heard: float
    connection: int | None = None
    hello: Hello | None = None
    join: Join | None = None
    joined_s: float = 0.0
    beat: Beat | None = None
    failed: Failed | None = None
    gone: Gone | None = None
    leaving: str = ""
    told_to_stop: bool = False

    @property
    def in_touch(self) -> bool:
        """Whether it can be asked now."""
        return self.connection is not None and self.gone is None

    def member(self) -> Member:
        """Its entry in a member list; only after it has joined."""
        assert self.hello is not None and self.join is not None
        return Member(self.name, self.incarnation, self.hello.manager, self.join.ranks)
