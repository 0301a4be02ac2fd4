"""What the supervisor's machine knows of nodes and of groups."""

from __future__ import annotations

from dataclasses import dataclass, field

WAITING, CHECKING, AT_WORK, PAUSED, ENDING, DONE = "waiting", "checking", "at work", "paused", "ending", "done"


@dataclass
class Node:
    """A node.

    Attributes:
        group: which has it; "" if it is free.
        excluded: why it gets no work; "" if it may.
        strikes: ends of groups there for which it may be to blame.
        failures: ends of groups there, whosever fault they were.
        lost: whether the cluster says that it is gone.
        leaving: why it is to be left, as the cluster says; "" if it is not.
        burn_in: whether it is to be burned in, or is just now.
        burn_in_at: not before, in seconds.
    """

    group: str = ""
    excluded: str = ""
    strikes: int = 0
    failures: int = 0
    lost: bool = False
    leaving: str = ""
    burn_in: bool = False
    burn_in_at: float = 0.0

    @property
    def fit(self) -> bool:
        """Whether it may get work: it is there, stays, and is not in quarantine."""
        return not (self.excluded or self.lost or self.leaving)

    @property
    def free(self) -> bool:
        """Whether a group may have it."""
        return self.fit and not self.group

    @property
    def may_come(self) -> bool:
        """Whether a group may have it some time, by what is known."""
        return self.burn_in or not self.excluded


@dataclass
class Group:
    """A group.

    Attributes:
        state: one of the states above.
        nodes: which it has, in order.
        unchecked: those of them that are still in preflight.
        starts: how often it was started.
        start: the number of its newest start among those of all groups.
        failures: ends in a row without a good time at work.
        since: when it entered its state, in seconds.
        until: when its pause is over.
        waits: why it has no node, as it was said; "" if it has.
        out: when the lighthouse said that the job goes on without it; None if it has not since its start.
    """

    state: str = WAITING
    nodes: tuple[str, ...] = ()
    unchecked: set[str] = field(default_factory=set)
    starts: int = 0
    start: int = 0
    failures: int = 0
    since: float = 0.0
    until: float = 0.0
    out: float | None = None
    waits: str = ""
