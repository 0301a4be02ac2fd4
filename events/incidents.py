"""Which events of a run belong to one incident.

An incident opens with the first sign that something is wrong: somebody lost, an exception, a stuck rank, a failed
reduce, evidence taken, a recovery that begins. Everything of that kind belongs to it until somebody has committed a
step in the epoch of the recovery; so two groups that die in one step are one incident, also if the second dies while
the others recover from the first. What is said later of an incarnation that is judged gone belongs to the incident in
which it was, however late it comes (a process that raised may take long to end); so does what is said of an epoch that
is over, and the same exception at the same step in another group. Anything else opens the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lightkeeper.events.of_progress import Quarantined, Stuck
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
    Recovered,
    ReduceFailed,
    UserError,
)
from lightkeeper.lighthouse.messages import FIRST_EPOCH, QUORUM_LOST

OPENING = (GroupLost, UserError, Stuck, ReduceFailed, Evidence, Prepared, JobStopped)
LATER = (LastPhases, Recovered, Fenced, Quarantined, ProcessEnded, OperatorFenced)
ORDERLY = ("left", "refused")  # who is gone by request, or was never taken on
EVIDENCE_S_MAX = 30.0  # evidence of a survivor may be written so long after the others went on
_RECOVERY = re.compile(r"a recovery prepared e(\d+)")  # what evidence of a survivor was taken for
_ENDED = re.compile(r"\brank \d+ (was killed by|exited \d|has been stopped|has made no progress)")
_ASKED = (2, 15)  # signals by which a person or a scheduler ends a job
_KILLED = tuple(code for s in range(1, 65) if s not in _ASKED for code in (-s, 128 + s))
_LOST = re.compile(r"([\w.,\- ]+?) lost: ")  # in the cause of an epoch; several are parted by "; "


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

    @property
    def lost_quorum(self) -> JobStopped | None:
        """How the job ended, if it did for want of groups."""
        stops = (event for event in self.events if isinstance(event, JobStopped))
        return next((stop for stop in stops if stop.reason.startswith(QUORUM_LOST)), None)

    def about(self, event: Event) -> bool:
        """Whether an event is about an incarnation that this incident is about."""
        lost = self.lost
        return event.group in lost and event.incarnation in ("", lost[event.group])

    def gone(self) -> set[tuple[str, str]]:
        """Groups that it was the end of, with their incarnations; not who was stuck and went on."""
        gone = {(e.group, e.incarnation) for e in self.events if isinstance(e, GroupLost | UserError)}
        if self.activated is not None:
            gone |= {name for name in self.lost.items() if name[0] not in self.activated.members}
        return gone


def clusters(events: Sequence[Event]) -> list[Cluster]:
    """All incidents of a run, in order; what never became one (evidence alone) is left out."""
    found: list[Cluster] = []
    members: tuple[str, ...] = ()
    newest = (-1, -1)
    steps_told = any(isinstance(event, Committed | Recovered) for event in events)
    for place, event in enumerate(events):
        last = found[-1] if found else None
        if isinstance(event, Activated):
            if (event.epoch, event.term) < newest:
                continue  # a manager that says late what the others are past
            newest, out = (event.epoch, event.term), left_out(event, members)
            if out and last is not None and _without(last, out):
                last.closed = False
            elif out and (last is None or last.closed):  # nobody who would have said it wrote here
                last = Cluster(place, members)
                found.append(last)
            if last is not None and not last.closed and event.cause != "planned":
                last.events += [event] if out else []
                last.activated, last.closed = event, not steps_told
            members = event.members or members
        elif _is_sign(event):
            home = _home(found, event)
            if home is None and (last is None or _opens(last, event, members)):
                home = Cluster(place, members)
                found.append(home)
            elif home is None and last is not None:
                home = last
                last.closed &= not _same_exception(last, event)  # it recovered from the first one's, and did the same
            assert home is not None
            home.events.append(event)
            home.closed = home.closed or (isinstance(event, GroupLost | UserError) and _no_member(event, members))
        elif isinstance(event, LATER):
            _told_later(found, event)
        elif last is not None and isinstance(event, Committed) and not last.closed:
            last.closed = _recovered(last, event) or _went_on(last, event)
    return [cluster for cluster in found if any(_makes_one(event) for event in cluster.events)]


def _makes_one(event: Event) -> bool:
    return not isinstance(event, (Evidence, *LATER)) or tells_of_an_end(event)


def left_out(event: Activated, members: tuple[str, ...]) -> dict[str, str]:
    """Members that an epoch leaves out because they are lost, each with the reason: ``g1, g3 lost: reason; ...``."""
    told: dict[str, str] = {}
    for part in event.cause.split("; "):
        if found := _LOST.match(part):
            told.update(dict.fromkeys(found[1].split(", "), part[found.end() :]))
    return {group: why for group, why in told.items() if group in members and group not in event.members}


def _without(last: Cluster, out: Collection[str]) -> bool:
    """Whether an incident is about those whom an epoch leaves out, and they were not left out before."""
    stayed = last.activated is None or set(out) <= set(last.activated.members)
    return stayed and set(out) <= {group for group, _ in last.gone()}


def _home(found: Sequence[Cluster], event: Event) -> Cluster | None:
    """The incident, over or not, that an event belongs to by name: by its incarnation, or by the recovery it is of."""
    recovery = _RECOVERY.match(event.reason) if isinstance(event, Evidence) else None
    for cluster in reversed(found):
        if recovery is not None:
            epochs = {e.epoch for e in cluster.events if isinstance(e, Prepared | Activated | Recovered)}
            epochs |= {cluster.activated.epoch} if cluster.activated is not None else set()
            if int(recovery[1]) in epochs:
                return cluster
        elif event.incarnation and (event.group, event.incarnation) in cluster.gone():
            return cluster
    return None


def _told_later(found: Sequence[Cluster], event: Event) -> None:
    """What does not open an incident is of the one that it names, or of the last while that lasts."""
    if not found:
        return
    last, home = found[-1], _home(found, event)
    if home is not None or last.about(event):
        (home or last).events.append(event)
    elif not last.closed or isinstance(event, Recovered):
        last.events.append(event)
    if isinstance(event, Recovered):
        last.closed = last.closed or _recovered(last, event)


def _opens(last: Cluster, event: Event, members: tuple[str, ...]) -> bool:
    """Whether a sign is the first of another incident than the last one."""
    if last.closed:
        return not _same_exception(last, event) and _is_new(last, event)
    gone = {group for group, _ in last.gone()}
    if last.activated is None and gone and members and not gone & set(members):
        return event.group not in gone  # nobody recovers from what it was about: they went on without it before
    only_kept = all(isinstance(other, Evidence) for other in last.events)
    return only_kept and event.wall - last.events[-1].wall > EVIDENCE_S_MAX


def _same_exception(last: Cluster, event: Event) -> bool:
    """Whether a group raised what another one raised at the same step: the job's bug, told by one after the other."""
    errors = [other for other in last.events if isinstance(other, UserError)]
    return isinstance(event, UserError) and (event.type, event.step) in {(e.type, e.step) for e in errors}


def tells_of_an_end(event: Event) -> bool:
    """Whether a manager says of its own group that it broke: by its evidence, or by its exit code."""
    if isinstance(event, Evidence):
        return _ENDED.search(event.reason) is not None
    own = isinstance(event, ProcessEnded) and event.child is None and event.process.startswith("manager ")
    return own and isinstance(event, ProcessEnded) and event.exit_code in _KILLED


def _is_sign(event: Event) -> bool:
    if isinstance(event, ProcessEnded):
        return tells_of_an_end(event)
    if not isinstance(event, OPENING):
        return False
    if isinstance(event, GroupLost):
        return event.detected_by not in ORDERLY
    if isinstance(event, Prepared):
        return event.change == "recovery" and not event.why.startswith(FIRST_EPOCH)
    return not (isinstance(event, JobStopped) and event.ok)


def _no_member(event: Event, members: tuple[str, ...]) -> bool:
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
        if last.activated is not None and event.group in set(last.members) - set(last.activated.members):
            return False
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
