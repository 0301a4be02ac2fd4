"""A verdict for people: at most six lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from lightkeeper.errors import UsageError
from lightkeeper.events.header import Event
from lightkeeper.events.of_checkpoints import CheckpointFailed, CheckpointSaved
from lightkeeper.events.outcome import Cost
from lightkeeper.events.verdict import Culprit, Incident
from lightkeeper.words import shown

LINES_MAX = 6
SIGNALS_MAX, NAMED_MAX, CHARS_MAX, CAUSE_CHARS_MAX = 4, 6, 400, 250
BLIND = (
    "the lighthouse wrote no events here, so what it saw is missing: give it the same --run-folder (if it serves "
    "several jobs, copy its events/lighthouse-*.jsonl into this folder's events)"
)
_WHOSE = {
    "network": "nobody: the network",
    "storage": "nobody alone: all groups",
    "job": "the job itself: all groups",
    "quorum": "nobody: too few groups are left",
    "unknown": "nobody is known",
}


def choose(incidents: Sequence[Incident], which: str) -> Incident:
    """The incident that is asked for; a slow group only if there is no other.

    Args:
        incidents: of a run, in order, at least one.
        which: "last", a step, or a group: the last one with that.

    Raises:
        UsageError: there is none; it names what there is.
    """
    if which == "last":
        found = list(incidents)
    elif which.isdecimal():
        found = [one for one in incidents if one.step == int(which)]
    else:
        found = [one for one in incidents if which in one.groups()]
        found = found or [one for one in incidents if which in one.victims]
    if found:
        return ([one for one in found if one.culprit.kind != "slow"] or found)[-1]
    steps = ", ".join(dict.fromkeys(str(one.step) for one in incidents[-NAMED_MAX:]))
    groups = ", ".join(sorted({group for one in incidents for group in one.groups()})[:NAMED_MAX]) or "no group"
    what = f"step {which}" if which.isdecimal() else f"{which!r}"
    raise UsageError(f"no incident of {what}: there are {len(incidents)}, at step {steps}; about {groups}")


def lines(incident: Incident, all_of_them: Sequence[Incident] = ()) -> list[str]:
    """Who, since when, by what evidence, what was done, what it cost, what to do.

    Args:
        incident: the one that is told.
        all_of_them: of the run; how many others there are is said, and where.
    """
    one = incident.culprit
    doubt = ", which is little: do not act on it alone" if incident.low else ""
    head = f"{_whose(one)}: {_cause(one)} (confidence {one.confidence:.2f}{doubt})"
    told = [head, _since(incident), _evidence(incident)]
    told.append("done: " + ("; ".join(incident.done) or "nothing was necessary"))
    told.append("cost: " + cost_in_words(incident.cost))
    told.append("do: " + incident.advice)
    told = [_short(line) for line in told]
    told[1] += _others([one for one in all_of_them if one is not incident])
    return told


def unsaved(events: Sequence[Event]) -> str:
    """``; 3 saves failed or late since the newest checkpoint, last: ...``; "" if none did."""
    newest = max((i for i, event in enumerate(events) if isinstance(event, CheckpointSaved)), default=-1)
    failed = [event for event in events[newest + 1 :] if isinstance(event, CheckpointFailed)]
    if not failed:
        return ""
    saves = "1 save" if len(failed) == 1 else f"{len(failed)} saves"
    return shown(f"; {saves} failed or late since the newest checkpoint, last: {failed[-1].reason}", CHARS_MAX)


def _others(others: Sequence[Incident]) -> str:
    """``; 2 other incidents: steps 31, 151 (why RUN STEP)``."""
    if not others:
        return ""
    lost = [str(one.step) for one in others if one.culprit.kind != "slow"]
    slow = [str(one.step) for one in others if one.culprit.kind == "slow"]
    where = [f"step{'s' * (len(lost) > 1)} {_newest(lost)}"] if lost else []
    where += [f"slow at step{'s' * (len(slow) > 1)} {_newest(slow)}"] if slow else []
    return f"; {len(others)} other incident{'s' * (len(others) > 1)}: {'; '.join(where)} (why RUN STEP)"


def _whose(one: Culprit) -> str:
    if not one.group:
        return _WHOSE.get(one.kind, "nobody")
    rank = f" rank {one.rank}" if one.rank >= 0 else ""
    return f"{one.group}{rank}{f' on {one.node}' if one.node else ''}"


def _cause(one: Culprit) -> str:
    """Cut, so that how sure that is stays in the line."""
    return shown(" ".join(one.cause.split()), CAUSE_CHARS_MAX)


def _since(incident: Incident) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.culprit.since))
    parts = [f"since {stamp}.{int(incident.culprit.since % 1 * 1000):03d}"]
    if incident.step >= 0:
        parts[0] += f", in step {incident.step}"
    parts += [f"then {_whose(other)}: {_cause(other)} ({other.confidence:.2f})" for other in incident.others]
    if incident.victims:
        parts.append(f"victims: {_few(incident.victims)}")
    return "; ".join(parts)


def _evidence(incident: Incident) -> str:
    whose = incident.culprit.group
    own = [signal for signal in incident.signals if signal.group == whose or not whose]
    first = {(signal.name, signal.group): signal for signal in reversed(own)}  # of each kind the heaviest
    own = [signal for signal in own if first[signal.name, signal.group] is signal]
    told = [
        f"{signal.name} {signal.weight:.2f} ({signal.detail if whose else f'{signal.group}: {signal.detail}'})"
        for signal in own[:SIGNALS_MAX]
    ]
    if len(own) > SIGNALS_MAX:
        told.append(f"{len(own) - SIGNALS_MAX} more")
    told += [f"kept in {_few(incident.evidence)}"] if incident.evidence else []
    return "evidence: " + ("; ".join(told) or "none against any group")


def cost_in_words(cost: Cost) -> str:
    """``g0 stood 0.31 s, g2 0.30 s; 2 orphaned microbatches computed by them; none computed twice, no step lost``."""
    if cost.share:
        return f"{100 * cost.share:.0f} % of everybody's time while it lasts"
    longest = sorted(cost.stalls_s.items(), key=lambda item: -item[1])
    stood = ", ".join(f"{group} stood {stall:.2f} s" for group, stall in longest[:NAMED_MAX]) or "nobody stood"
    stood += f" and {len(longest) - NAMED_MAX} more" if len(longest) > NAMED_MAX else ""
    orphans = f"{cost.further} orphaned microbatches computed by them" if cost.further else "no orphaned microbatches"
    twice = f"{cost.recomputed} computed twice" if cost.recomputed else "none computed twice"
    steps = f"{cost.steps_lost} commits lost" if cost.steps_lost else "no step lost"
    return f"{stood}; {orphans}; {twice}, {steps}"


def json_line(incident: Incident) -> str:
    """The whole verdict as one JSON object."""
    told: dict[str, Any] = msgspec.to_builtins(incident)
    return msgspec.json.encode({**told, "low": incident.low}).decode()


def _newest(steps: Sequence[str]) -> str:
    steps = list(dict.fromkeys(steps))
    return ("..., " if len(steps) > NAMED_MAX else "") + ", ".join(steps[-NAMED_MAX:])


def _few(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _short(line: str) -> str:
    return shown(" ".join(line.split()), CHARS_MAX)
