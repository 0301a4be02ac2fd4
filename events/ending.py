"""Which of the runs in a folder is judged, and how it ended. Pure functions over the events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightkeeper.events.lineage import pick
from lightkeeper.events.of_supervisor import RunEnded
from lightkeeper.events.schema import (
    Activated,
    Event,
    Finished,
    GroupLost,
    JobStopped,
    ProcessEnded,
    ProcessStarted,
    ReduceFailed,
)
from lightkeeper.lighthouse.messages import FIRST_EPOCH
from lightkeeper.manager import exits

_WORDS = {
    0: "ended in good order",
    exits.REFUSED: "refused",
    exits.FENCED: "left out",
    exits.GAVE_UP: "gave up",
    exits.STOPPED: "stopped",
    exits.ORPHANED: "lost its manager",
}


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        ended: whether it has; only the steps that all members have committed are settled before that.
        finished: whether it came to its last step.
        well: whether it goes on, finished, or was asked to end.
        words: who ended how, if it ended before its last step.
        broken_off: members without an end in the log, which nobody was there to call lost: killed with all they had.
    """

    ended: bool
    finished: bool = False
    well: bool = True
    words: str = ""
    broken_off: tuple[str, ...] = ()


def newest_run(events: Sequence[Event]) -> tuple[list[Event], int]:
    """The events since the job began last, and how often it has begun in this folder.

    A job that is begun anew, by a person or by a supervisor that starts all groups again, has a first epoch again, with
    new incarnations of its groups. What earlier ones still say afterwards, and what the lighthouse said before, is not
    of the last run.
    """
    starts = _first_epochs(events)
    if len(starts) < 2:
        return list(events), len(starts) or 1
    begun, members = starts[-1]
    own = set(members.items())
    start = next(i for i, event in enumerate(events) if i == begun or (event.group, event.incarnation) in own)
    former = {(event.group, event.incarnation) for event in events[:start] if event.incarnation}
    kept = [
        event
        for i, event in enumerate(events[start:], start)
        if ((event.group, event.incarnation) not in former if event.incarnation else i >= begun)
    ]
    return kept, len(starts)


def runs(events: Sequence[Event]) -> list[list[Event]]:
    """All runs of the folder, each as `newest_run` has it, the first one first."""
    rest, found = list(events), list[list[Event]]()
    for _ in range(newest_run(events)[1] - 1):
        kept, _ = newest_run(rest)
        found.append(kept)
        own = set(map(id, kept))
        rest = [event for event in rest if id(event) not in own]
    return [rest, *reversed(found)]


def _first_epochs(events: Sequence[Event]) -> list[tuple[int, dict[str, str]]]:
    """Where in the log the job begins, each time, and the incarnations of its members there."""
    starts: list[tuple[int, dict[str, str]]] = []
    name: tuple[int, int] | None = None
    for i, event in enumerate(events):
        if not isinstance(event, Activated) or not event.cause.startswith(FIRST_EPOCH):
            continue
        members = starts[-1][1] if starts else {}
        other = bool(event.group) and members.get(event.group, event.incarnation) != event.incarnation
        if (event.epoch, event.term) != name or other:
            members, name = {}, (event.epoch, event.term)
            starts.append((i, members))
        if event.group:
            members[event.group] = event.incarnation
    return starts


@dataclass
class _Group:
    """The newest incarnation of one group: its exit code, and the place of its last word in the log."""

    incarnation: str
    exit_code: int | None = None
    last: int = -1


@dataclass
class _Ends:
    groups: dict[str, _Group] = field(default_factory=dict)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)  # group to incarnation and cause
    suspected: dict[str, int] = field(default_factory=dict)  # group to the place of the last report about it
    gave_up: int = -1  # the place of the last end of a group that gave up


def ending(events: Sequence[Event]) -> Ending:
    """How the run ended, if it did.

    It has if somebody wrote so, or if every member of the newest epoch has ended. A member whose log breaks off counts
    as ended only if another one has seen it go, or has waited for it until it gave up.
    """
    if pick(events, Finished):
        return Ending(True, finished=True)
    activated = max(pick(events, Activated), key=lambda event: (event.epoch, event.term), default=None)
    members = sorted(activated.members) if activated is not None else []
    ends = _ends(events)
    told = {name: _how_it_ended(name, ends) for name in members}
    stops = pick(events, JobStopped)
    broken_off = tuple(
        name
        for name in members
        if told[name] and name not in ends.lost and (name not in ends.groups or ends.groups[name].exit_code is None)
    )
    if stops and stops[-1].ok:
        return Ending(True, words=f"was ended on request: {stops[-1].reason}")
    if not stops and (not members or not all(told.values()) or len(broken_off) == len(members)):
        return _by_the_supervisor(events)
    each: dict[str, list[str]] = {}
    for name, how in told.items():
        if how:
            each.setdefault(how, []).append(name)
    words = "; ".join(f"{', '.join(names)} {how}" for how, names in each.items())
    if not stops and set(each) == {_WORDS[0]}:
        return Ending(True, words=f"was ended on request: {words}")
    reason = stops[-1].reason if stops else words
    return Ending(True, well=False, words=f"ended without finishing: {reason}", broken_off=broken_off)


def _by_the_supervisor(events: Sequence[Event]) -> Ending:
    """What the last supervisor said at its end, if it has ended: its groups may never have become members."""
    own = [event for event in events if isinstance(event, RunEnded | ProcessStarted) and event.process == "supervisor"]
    if not own or not isinstance(own[-1], RunEnded):
        return Ending(False)
    if own[-1].code:
        return Ending(True, well=False, words=f"ended without finishing: {own[-1].reason}")
    return Ending(True, words=f"was ended on request: {own[-1].reason}")


def _ends(events: Sequence[Event]) -> _Ends:
    ends, seen = _Ends(), set[tuple[str, str]]()
    for place, event in enumerate(events):
        name = event.group
        if isinstance(event, GroupLost):
            ends.lost[name] = event.incarnation, event.cause
        elif event.process.startswith(("manager ", "rank ")):
            if (name, event.incarnation) not in seen:
                seen.add((name, event.incarnation))
                ends.groups[name] = _Group(event.incarnation)
                ends.lost.pop(name, None)
            group = ends.groups[name]
            if group.incarnation != event.incarnation:
                continue
            group.last = place
            if isinstance(event, ReduceFailed):
                ends.suspected.update(dict.fromkeys(event.suspects, place))
            elif isinstance(event, ProcessEnded) and event.process.startswith("manager ") and event.child is None:
                group.exit_code = event.exit_code if event.rank is None else group.exit_code
                ends.gave_up = place if group.exit_code == exits.GAVE_UP else ends.gave_up
    return ends


def _how_it_ended(name: str, ends: _Ends) -> str:
    """Empty if it may still be there."""
    group = ends.groups.get(name)
    if group is not None and group.exit_code is not None:
        code = group.exit_code
        if code > 128:  # as a shell tells a signal
            return exits.describe_exit(128 - code).removeprefix("was ")
        how = _WORDS.get(code)
        return how if how and code == 0 else f"{how} (exit code {code})" if how else exits.describe_exit(code)
    if name in ends.lost:
        return f"lost ({ends.lost[name][1]})"
    last = -1 if group is None else group.last
    if ends.suspected.get(name, -1) > last or ends.gave_up > last:
        return "killed (its log breaks off)"
    return ""
