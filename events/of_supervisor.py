"""The kinds of events about what is done from outside of a job: nodes, restarts, and who was told."""

from __future__ import annotations

from lightkeeper.events.header import Event


class NodeGone(Event, frozen=True, kw_only=True, tag="node_lost"):
    """A node is gone, as the cluster says."""

    node: str
    reason: str


class NodeLeaving(Event, frozen=True, kw_only=True):
    """A node is to be left in good order, as the cluster says: drained, or preempted soon."""

    node: str
    reason: str


class NodeCame(Event, frozen=True, kw_only=True):
    """A node that was lost, or was to be left, can be used."""

    node: str


class NodeQuarantined(Event, frozen=True, kw_only=True):
    """A node goes into quarantine, by this run or by somebody else; who is at work there stays."""

    node: str
    reason: str
    evidence: str = ""


class NodeReleased(Event, frozen=True, kw_only=True):
    """Somebody has released a node from quarantine."""

    node: str


class NodeChecked(Event, frozen=True, kw_only=True):
    """A node has been through preflight for a group, in so many `seconds`; `problem` is empty if it is fit."""

    node: str
    problem: str
    seconds: float


class BurnedIn(Event, frozen=True, kw_only=True):
    """A node in quarantine has been tried for long; whether it gets work again, and why or why not."""

    node: str
    returns: bool
    reason: str


class GroupStarted(Event, frozen=True, kw_only=True):
    """A group is started on these nodes, for the `start`-th time in this run."""

    nodes: tuple[str, ...]
    start: int


class GroupWaits(Event, frozen=True, kw_only=True):
    """A group has no node; said once for each reason."""

    reason: str


class GroupEnded(Event, frozen=True, kw_only=True):
    """A group's start has ended: on which nodes, with what code, whose fault ("node", "maybe", "job", "nobody").

    `after_s`: seconds since the last of its processes was seen to have ended.
    """

    nodes: tuple[str, ...]
    code: int
    whose: str
    failure: str
    step: int
    reason: str
    after_s: float = 0.0


class JobRestarts(Event, frozen=True, kw_only=True):
    """All groups are ended and start again, from the newest checkpoint; `step` was the newest that was committed."""

    number: int
    step: int
    reason: str


class RunStopping(Event, frozen=True, kw_only=True):
    """Somebody ends the run in good order."""

    reason: str


class RunFailed(Event, frozen=True, kw_only=True):
    """The supervisor gives up, and a human must look: "crash_loop", "budget", "quorum_lost"."""

    failure: str
    reason: str


class RunEnded(Event, frozen=True, kw_only=True):
    """The supervisor ends."""

    code: int
    reason: str


class Notified(Event, frozen=True, kw_only=True):
    """A person was told of `what` happened; `via`: by which notifier. `seconds`: over all `tries`."""

    what: str
    via: str
    summary: str = ""
    seconds: float = 0.0
    tries: int = 1


class NotNotified(Event, frozen=True, kw_only=True):
    """A person was not told, and why not; nothing else follows from that."""

    what: str
    via: str
    reason: str
    summary: str = ""
    tries: int = 0


KINDS: tuple[type[Event], ...] = (
    NodeGone, NodeLeaving, NodeCame, NodeQuarantined, NodeReleased, NodeChecked, BurnedIn,
    GroupStarted, GroupWaits, GroupEnded,
    JobRestarts, RunStopping, RunFailed, RunEnded, Notified, NotNotified,
)  # fmt: skip
KINDS_OF_SUPERVISOR: dict[str, type[Event]] = {
    str(kind.__struct_config__.tag): kind for kind in KINDS
}  # by the names that the machine uses
