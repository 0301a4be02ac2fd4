"""What speaks against whom: the signals of one incident, each with its weight.

A weight says how often such a thing, alone, names the right one. They are set by hand, from the faults that were made
on purpose here; together they count as independent witnesses do (`verdict.combined`). What a member says of others
weighs little, and a failed reduce nothing against the one who reports it: it is usually a victim.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightkeeper.diagnose import confidence_of
from lightkeeper.events.incidents import Cluster, left_out, tells_of_an_end
from lightkeeper.events.of_progress import Quarantined, Stuck
from lightkeeper.events.schema import (
    Activated,
    Event,
    Evidence,
    GroupLost,
    LastPhases,
    ProcessEnded,
    ReduceFailed,
    UserError,
)
from lightkeeper.manager import exits

EXCEPTION, EXIT, STOPPED, DEADLINE, RECORDER, SILENCE, LOG, QUARANTINE, ARRIVAL, NAMED = (
    0.95, 0.9, 0.95, 0.85, 0.8, 0.65, 0.6, 0.5, 0.5, 0.3,
)  # fmt: skip
BROKEN_INSIDE = 0.5  # its ranks lost each other, and none of them died: as likely the network
FAILURES = 0.65  # alone the cause of several recoveries in a row, by what all reported
NAMED_MAX = 0.5
SELF = 0.1  # a reduce failed here and no connection broke: so says a broken group, and one that was told to abort
SILENT_S_MIN, SILENT_TIMES = 1.0, 3.0  # so long, and so many times as long as the others
_STANDS = ("reduce", "vote", "recover", "before", "closing", "wait")
_OWN_ENDS = (0, exits.REFUSED, exits.FENCED, exits.GAVE_UP, exits.STOPPED, exits.ORPHANED)
_RANK = re.compile(r"\branks? (\d+)")
_SECONDS = re.compile(r"(?:for|within) (\d+(?:\.\d+)?) s\b")
_RANK_OF = re.compile(r"\brank (\d+)(?: of ([\w.-]*\w))?")
_SEEN_BY = (
    ("has been stopped", "frozen"), ("no progress", "progress"), ("silent", "lease"), ("stream broke", "stream"),
    ("fenced by", "operator"),
)  # fmt: skip
_CAME_TOO_LATE = ("it could not follow", "it lost the entries before the one that made it a member")
VICTIMS_SAY = ("nccl", "gloo", "rendezvous", "unknown", "cancelled", "stuck")  # classes of a log that mostly tell of
# others; that it is stuck its manager has said, in the log and in an event


@dataclass(frozen=True)
class Signal:
    """One thing that speaks against a group.

    Attributes:
        name: which kind: "exit", "exception", "stopped", "silence", "deadline", "not arrived", "recorder", ...
        weight: 0 to 1.
        detail: what was seen, in words.
        group: against whom.
        rank: which of its ranks, -1 if that is not known.
        since: wall time at which it began.
        kind: what it would mean: "killed", "exit", "exception", "frozen", "silent", "stuck", ...; "" if it only points.
    """

    name: str
    weight: float
    detail: str
    group: str
    rank: int = -1
    since: float = 0.0
    kind: str = ""


def signals(cluster: Cluster) -> list[Signal]:
    """All signals of an incident, in the order in which they began."""
    events = cluster.events
    found = [signal for event in events for signal in _of(event, events)]
    found += _lost_by_others(cluster)
    found += _named(events)
    unique = {(s.name, s.group, s.rank, s.detail): s for s in reversed(found)}  # the first time it was said
    return sorted(unique.values(), key=lambda signal: signal.since)


def _of(event: Event, events: Sequence[Event]) -> list[Signal]:
    if isinstance(event, GroupLost):
        return _lost(event, any(isinstance(e, UserError) and e.group == event.group for e in events))
    if isinstance(event, UserError):
        detail = f"rank {event.rank} raised {event.type}: {event.message}"
        return [Signal("exception", EXCEPTION, detail, event.group, event.rank, event.wall, "exception")]
    if isinstance(event, Stuck):
        raised = any(isinstance(e, UserError) and e.group == event.group for e in events)
        return [] if raised else [_stuck(event)]  # it raised, and its interpreter takes long to end
    if isinstance(event, LastPhases):
        return _phases(event)
    if isinstance(event, Evidence):
        return _evidence(event)
    if isinstance(event, Quarantined) and event.group:
        detail = f"{event.node} was put into quarantine: {event.reason}"
        return [Signal("quarantine", QUARANTINE, detail, event.group, -1, event.wall)]
    if isinstance(event, ProcessEnded) and event.child is not None and event.exit_code not in (*_OWN_ENDS, 1):
        rank = -1 if event.rank is None else event.rank
        detail = f"process {event.child} {exits.describe_exit(event.exit_code)}"
        return [Signal("exit of a process", SILENCE, detail, event.group, rank, event.wall)]
    return []


def _lost(event: GroupLost, raised: bool) -> list[Signal]:
    """What the one who called a group lost had seen of it."""
    found = _RANK.search(event.cause)
    rank = event.rank if event.rank >= 0 else int(found[1]) if found else -1
    seconds = _SECONDS.search(event.cause)
    since = event.wall - (event.since_s or (float(seconds[1]) if seconds else 0.0))
    words = event.cause
    match event.detected_by:
        case "frozen":
            return [Signal("stopped", STOPPED, words, event.group, rank, since, "frozen")]
        case "lease" | "stream":
            return [Signal("silence", SILENCE, words, event.group, rank, since, "silent")]
        case "progress":
            return [Signal("deadline", DEADLINE, words, event.group, rank, since, "stuck")]
        case "failures":
            return [Signal("named by most", FAILURES, words, event.group, rank, since, "failures")]
        case "operator" | "fenced":
            return [Signal("operator", EXIT, words, event.group, rank, since, "operator")]
    if "lost its connection to the other ranks" in words:
        return [Signal("broken inside", BROKEN_INSIDE, words, event.group, rank, since, "inside")]
    if any(part in words for part in _CAME_TOO_LATE):
        return [Signal("could not follow", EXIT, words, event.group, rank, since, "behind")]
    if raised and "raised" in words:
        return []  # said by the exception itself
    kind = "killed" if "was killed by" in words else "exit" if _RANK.match(words) else "gone"
    weight = EXIT if kind != "gone" else SILENCE
    return [Signal("exit", weight, words, event.group, rank, since, kind)]


def _lost_by_others(cluster: Cluster) -> list[Signal]:
    """Losses that no `group_lost` tells of: the lighthouse, which writes it, did not write into this folder.

    Told by the epoch that the others went on in, by the evidence of its own manager, or by that one's exit code.
    """
    known = {event.group for event in cluster.events if isinstance(event, GroupLost)}
    raised = {event.group for event in cluster.events if isinstance(event, UserError)}
    told: dict[str, tuple[str, Event]] = {}
    for event in cluster.events:
        if isinstance(event, Activated):
            told |= {group: (why, event) for group, why in left_out(event, cluster.members).items()}
        elif isinstance(event, Evidence) and tells_of_an_end(event):
            told.setdefault(event.group, (event.reason.removeprefix("left out of the job: "), event))
        elif isinstance(event, ProcessEnded) and tells_of_an_end(event):
            code = event.exit_code if event.exit_code < 0 else 128 - event.exit_code
            told.setdefault(event.group, (f"a rank of it {exits.describe_exit(code)}", event))
    found = []
    for group, (words, event) in told.items():
        by = next((by for part, by in _SEEN_BY if part in words), "manager")
        if group not in known and not (group in raised and by == "manager"):
            found += _lost(GroupLost(group=group, cause=words, detected_by=by, wall=event.wall), group in raised)
    return found


def _stuck(event: Stuck) -> Signal:
    stopped = event.state == "stopped"
    how = f", {event.how}" if event.how else ""
    borne = f"{event.deadline_s:.1f} s are borne{how}{f'; its process: {event.state}' if event.state else ''}"
    detail = f"rank {event.rank} made no progress in {event.phase} for {event.since_s:.1f} s ({borne})"
    name, weight, kind = ("stopped", STOPPED, "frozen") if stopped else ("deadline", DEADLINE, "stuck")
    return Signal(name, weight, detail, event.group, event.rank, event.wall - event.since_s, kind)


def _phases(event: LastPhases) -> list[Signal]:
    """Who had not arrived, where others stood, and who had not been heard of for much longer than they."""
    found = []
    away = {group: _away(words) for group, words in event.phases.items()}
    if any(not words for words in away.values()):
        for group, words in away.items():
            if words:
                rank = int(r[1]) if (r := _RANK.search(words)) else -1
                detail = f"had not arrived: {words}"
                found.append(Signal("not arrived", ARRIVAL, detail, group, rank, event.wall))
    for group, silent_s in event.silent_s.items():
        others = [seconds for other, seconds in event.silent_s.items() if other != group]
        if others and silent_s >= max(SILENT_S_MIN, SILENT_TIMES * max(others)):
            detail = f"unheard of for {silent_s:.1f} s, the others for {max(others):.1f} s at most"
            found.append(Signal("silence", ARRIVAL, detail, group, -1, event.wall - silent_s, "silent"))
    return found


def _away(words: str) -> str:
    """The part of a group's last phases that is neither a reduce nor a wait."""
    parts = [part for part in re.split(r", (?=ranks? )", words) if part]
    return ", ".join(part for part in parts if not any(f"{phase} of step" in part for phase in _STANDS))


def class_and_line(event: Evidence) -> tuple[str, str]:
    """What ``xid (rank 1): NVRM: Xid ...`` says: the class, and the line by which it is known; empty if nothing."""
    head, _, line = event.log_class.partition(": ")
    return head.partition(" ")[0], line


def _evidence(event: Evidence) -> list[Signal]:
    found = _recorder(event)
    cause, line = class_and_line(event)
    weight = round(LOG * confidence_of(line, cause), 2) if cause and cause not in VICTIMS_SAY else 0.0
    if weight:
        rank = int(r[1]) if (r := _RANK.search(event.log_class)) else -1
        found.append(Signal("log", weight, f"last log lines: {event.log_class}", event.group, rank, event.wall, cause))
    return found


def _recorder(event: Evidence) -> list[Signal]:
    """``all_reduce #12 of e1r0: rank 1 of g0 never arrived; rank 0 of g1 waits``; without a group: of its own.

    One that called something else instead is as guilty as one that is missing; that there is no dump of somebody says
    less: it may be that there was no time.
    """
    words = event.recorder.partition(": ")[2] or event.recorder
    weight, about = RECORDER, ""
    if " never arrived" in words or " called " in words:
        about = re.split(r" never arrived| called ", words)[0]
    elif "no dump of " in words:
        weight, about = ARRIVAL, words.partition("no dump of ")[2].partition(";")[0]  # who waits stands after it
    first: dict[str, int] = {}
    for rank, group in _RANK_OF.findall(about):
        first.setdefault(group or event.group, int(rank))
    detail = f"flight recorder: {event.recorder}"
    return [Signal("recorder", weight, detail, group, rank, event.wall) for group, rank in first.items()]


def _named(events: Sequence[Event]) -> list[Signal]:
    """Those whom failed reduces name, once for each group that names them; and those that can name nobody else."""
    by_suspect: dict[str, dict[str, float]] = {}
    for event in events:
        if isinstance(event, ReduceFailed):
            for suspect in event.suspects:
                if suspect != event.group:
                    by_suspect.setdefault(suspect, {}).setdefault(event.group, event.wall)
    alone = [
        Signal("complains of itself", SELF, "its reduce failed, and no connection of it broke", e.group, e.rank, e.wall)
        for e in events
        if isinstance(e, ReduceFailed) and e.suspects == (e.group,)
    ]
    return alone + [
        Signal(
            "named by others", min(NAMED_MAX, NAMED * len(by)), f"named by {', '.join(sorted(by))}", suspect, -1,
            min(by.values()),
        )
        for suspect, by in by_suspect.items()
    ]  # fmt: skip
