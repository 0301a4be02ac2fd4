"""What the run's events say of a group's end, for `attribution`."""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.errors import RunFolderError
from lightkeeper.events.of_checkpoints import StopRequested
from lightkeeper.events.reader import read_run
from lightkeeper.events.schema import Committed, Event, Evidence, Finished, GroupLost, JobStopped, Left, UserError
from lightkeeper.events.signals import VICTIMS_SAY, class_and_line
from lightkeeper.events.verdict import Incident, incidents
from lightkeeper.lighthouse.messages import QUORUM_LOST
from lightkeeper.supervisor.attribution import GAVE_UP, STOPPED, End
from lightkeeper.words import shown


def end_of(run_folder: str, group: str, code: int | None, since: float, lost: str, asked: bool) -> End:
    """How a group's start ended.

    Args:
        run_folder: whose events are read.
        group: its name.
        code: of its launcher; None if nobody knows.
        since: wall seconds at which it was started.
        lost: why a node of it is gone; "" if none is.
        asked: whether the supervisor asked it to leave.
    """
    try:
        events = [event for event in read_run(run_folder).events if event.wall >= since]
    except RunFolderError:
        events = []
    return judged(events, group, code, lost, asked)


def judged(events: Sequence[Event], group: str, told: int | None, lost: str, asked: bool) -> End:
    """The same, of events since the group was started; what is said late of its start before is left out."""
    started = {event.incarnation for event in events if event.group == group and event.process != "lighthouse"}
    events = [e for e in events if not (isinstance(e, GroupLost) and e.group == group and e.incarnation not in started)]
    own = [event for event in events if event.group == group]
    code = -9 if told is None else told
    stopped = [event for event in events if isinstance(event, JobStopped)]
    early = any(isinstance(event, StopRequested) for event in events)
    finished = code == 0 and not early and any(isinstance(event, Finished) for event in own)
    quorum_lost = [event for event in stopped if event.reason.startswith(QUORUM_LOST)]
    quorum = bool(quorum_lost) and code != 0
    left = code == 0 and (early or any(isinstance(e, Left) for e in own) or any(event.ok for event in stopped))
    found = _incident(events, group)
    kept = (e for e in reversed(own) if isinstance(e, Evidence) and e.log_class)
    classified, line = next(map(class_and_line, kept), ("", ""))
    raised = next((e for e in reversed(own) if isinstance(e, UserError)), None)
    cause = lost or (found.culprit.cause if found is not None else "")
    if not cause and raised is not None:
        cause = f"{raised.type}: {raised.message}"
    if cause and line and code > 0 and classified not in VICTIMS_SAY and line not in cause:
        cause = f"{cause}: {shown(line)}"
    told_by = {STOPPED: stopped, GAVE_UP: quorum_lost}.get(code, [])
    if not cause and told_by:
        cause = told_by[-1].reason
    return End(
        code=code, seen=told is not None, finished=finished, quorum=quorum,
        asked=asked or (left and not finished), node_lost=bool(lost),
        kind="" if found is None else found.culprit.kind, classified=classified,
        step=_reached(own) if found is None else found.step,
        cause=cause, evidence=found.evidence[0] if found is not None and found.evidence else "",
        confidence=0.0 if found is None else found.culprit.confidence,
    )  # fmt: skip


def _reached(own: Sequence[Event]) -> int:
    """The step that it was in, by what it committed; -1 if nothing."""
    return max((event.step + 1 for event in own if isinstance(event, Committed)), default=-1)


def _incident(events: Sequence[Event], group: str) -> Incident | None:
    """The newest that holds this group guilty."""
    found = [one for one in incidents(events) if one.culprit.group == group and one.culprit.kind != "slow"]
    return found[-1] if found else None
