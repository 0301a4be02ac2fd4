"""Which events of a run belong to one incident.

An incident opens with the first sign that something is wrong: somebody lost, an exception, a stuck rank, a failed
reduce, evidence taken, a recovery that begins. Everything of that kind belongs to it until somebody has committed a
step in the epoch of the recovery; so two groups that die in one step are one incident, also if the second dies while
the others recover from the first. Afterwards what is still said of the same incarnations, or of the epoch that is over,
belongs to it too, and anything else opens the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightkeeper.events.schema import (
    Activated,
    Committed,
    Event,
    Evidence,
    Fenced,
    GroupLost,
    JobStopped,
    LastPhases,
    OperatorFenced,
    Prepared,
    ProcessEnded,
    Quarantined,
    Recovered,
    ReduceFailed,
    Stuck,
    UserError,
)
from lightkeeper.lighthouse.messages import FIRST_EPOCH

OPENING = (GroupLost, UserError, Stuck, ReduceFailed, Evidence, Prepared, JobStopped)
LATER = (LastPhases, Recovered, Fenced, Quarantined, ProcessEnded, OperatorFenced)
ORDERLY = ("left", "refused")  # who is gone by request, or was never taken on
EVIDENCE_S_MAX = 30.0  # evidence of a survivor may be written so long after the others went on


@dataclass
class Cluster:
    """The events of one incident.

    Attributes:
        start: place of its first event in the run.
        events: in order.
        members: groups of the epoch in which it happened, as far as that is known.
        activated: the epoch in which the others went on; of several recoveries the last.
        closed: whether it is over; what follows belongs to it only by name.
    """

    start: int
    members: tuple[str, ...] = ()
    events: list[Event] = field(default_factory=list)
    activated: Activated | None = None
    closed: bool = False

    @property
    def lost(self) -> dict[str, str]:
        """Group to the incarnation that was lost, or raised, or was stuck."""
        kinds = (GroupLost, UserError, Stuck)
        return {event.group: event.incarnation for event in self.events if isinstance(event, kinds)}

    def about(self, event: Event) -> bool:
        """Whether an event is about an incarnation that this incident is about."""
        lost = self.lost
        return event.group in lost and event.incarnation in ("", lost[event.group])


def clusters(events: Sequence[Event]) -> list[Cluster]:
    """All incidents of a run, in order; what never became one (evidence alone) is left out."""
    found: list[Cluster] = []
    members: tuple[str, ...] = ()
    steps_told = any(isinstance(event, Committed | Recovered) for event in events)
    for place, event in enumerate(events):
        last = found[-1] if found else None
        if isinstance(event, Activated):
            members = event.members or members
            if last is not None and not last.closed and event.cause != "planned":
                last.activated, last.closed = event, not steps_told
        elif isinstance(event, OPENING) and _is_sign(event):
            if last is None or (last.closed and _is_new(last, event)):
                last = Cluster(place, members)
                found.append(last)
            last.events.append(event)
            last.closed = last.closed or (isinstance(event, GroupLost) and _no_member(event, members))
        elif last is not None and isinstance(event, LATER) and not (last.closed and isinstance(event, LastPhases)):
            last.events.append(event)
            last.closed = last.closed or (isinstance(event, Recovered) and _recovered(last, event))
        elif last is not None and isinstance(event, Committed) and not last.closed:
            last.closed = _recovered(last, event) or _went_on(last, event)
    return [cluster for cluster in found if any(not isinstance(event, (Evidence, *LATER)) for event in cluster.events)]


def _is_sign(event: Event) -> bool:
    if isinstance(event, GroupLost):
        return event.detected_by not in ORDERLY
    if isinstance(event, Prepared):
        return event.change == "recovery" and not event.why.startswith(FIRST_EPOCH)
    return not (isinstance(event, JobStopped) and event.ok)


def _no_member(event: GroupLost, members: tuple[str, ...]) -> bool:
    """Whether nobody recovers from its loss: a joiner's."""
    return bool(members) and event.group not in members


def _is_new(last: Cluster, event: Event) -> bool:
    """Whether a sign that comes after an incident was over belongs to another one."""
    if last.about(event):
        return False
    epoch = last.activated.epoch if last.activated is not None else -1
    if isinstance(event, ReduceFailed):
        return event.epoch >= epoch
    if isinstance(event, Prepared):
        return event.epoch > epoch
    if isinstance(event, JobStopped):
        return not any(isinstance(other, JobStopped) for other in last.events)
    if isinstance(event, Evidence):
        failed = {other.group for other in last.events if isinstance(other, ReduceFailed)}
        return event.group not in failed or event.wall - last.events[-1].wall > EVIDENCE_S_MAX
    return True


def _recovered(last: Cluster, event: Committed | Recovered) -> bool:
    """Whether a step was committed in the epoch of the recovery."""
    return last.activated is not None and (event.epoch, event.term) >= (last.activated.epoch, last.activated.term)


def _went_on(last: Cluster, commit: Committed) -> bool:
    """Whether a rank that was stuck, and for which nobody stood, has gone on by itself."""
    if any(not isinstance(event, Stuck | Evidence) for event in last.events):
        return False
    stuck = [event for event in last.events if isinstance(event, Stuck)]
    return any((s.group, s.rank) == (commit.group, commit.rank) and commit.step >= s.step for s in stuck)
