"""One verdict for each incident of a run: who, why, how sure, what was done, what it cost. Pure functions over events.

All signals of an incident are weighed together (`events/signals.py`); nobody is blamed by one number alone. Among those
who are held guilty the first in causal order is the culprit: the one whose trouble began first. The others are told
beside it. Who only noticed is a victim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightkeeper.events.advice import advice, and_go_on
from lightkeeper.events.ending import runs
from lightkeeper.events.incidents import Cluster, clusters
from lightkeeper.events.lineage import lineage, pick
from lightkeeper.events.of_progress import Slow, SlowEnded, Stuck
from lightkeeper.events.outcome import Cost, costs, what_was_done
from lightkeeper.events.schema import (
    Event,
    Evidence,
    GroupLost,
    JobStopped,
    Prepared,
    ProcessStarted,
    Recovered,
    ReduceFailed,
    UserError,
)
from lightkeeper.events.signals import Signal, signals
from lightkeeper.manager.briefly import briefly

GUILTY = 0.6  # so sure before a group is held guilty; below it one is only the likeliest
SURE_MAX = 0.99
SLOW_FACTOR, SLOW_WAITS, SLOW_FLAPS = 0.6, 0.5, 0.2
CUT, ALIKE = 0.6, 0.8  # how sure that it was the network; that it was something all groups share


@dataclass(frozen=True)
class Culprit:
    """Who is held guilty.

    Attributes:
        group: its name; "" if it is nobody's fault: `kind` says whose then.
        rank: its rank, -1 if not known.
        node: host of that rank (or of its manager), "" if not known.
        kind: "killed", "exit", "exception", "frozen", "silent", "stuck", "inside" (its ranks lost each other),
            "network", "storage", "job", "quorum" (too few groups, and none of them was lost), "operator", "slow",
            "unknown".
        cause: what happened, in words.
        confidence: 0 to 1.
        since: wall time at which it began.
    """

    group: str
    rank: int
    node: str
    kind: str
    cause: str
    confidence: float
    since: float


@dataclass(frozen=True)
class Incident:
    """One incident, judged.

    Attributes:
        culprit: the first in causal order.
        others: further groups held guilty, in that order.
        step: the step it happened in, -1 if nobody said.
        signals: all that was weighed, the heaviest first.
        victims: who only noticed: groups, and ranks of the culprit's group.
        done: what the runtime did, in words.
        cost: what it cost those who stayed.
        evidence: folders below the run's folder.
        advice: what a person should do.
    """

    culprit: Culprit
    step: int
    signals: tuple[Signal, ...]
    others: tuple[Culprit, ...] = ()
    victims: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)
    evidence: tuple[str, ...] = ()
    advice: str = ""

    @property
    def low(self) -> bool:
        """Whether nobody should act on it alone."""
        return self.culprit.confidence < GUILTY

    def groups(self) -> set[str]:
        """Everybody it is about, victims not counted."""
        return {one.group for one in (self.culprit, *self.others) if one.group}


def incidents(events: Sequence[Event]) -> list[Incident]:
    """All incidents of a run, in the order in which they began.

    Args:
        events: the run, in order; several runs in one folder are judged each by itself.

    Returns:
        One verdict each; slow groups are incidents of their own.
    """
    return [incident for own in runs(events) for incident in _incidents(own)]


def _incidents(events: Sequence[Event]) -> list[Incident]:
    """Of one run."""
    line = lineage(events)
    judged = [_judge(cluster, events, line.epoch_of) for cluster in clusters(events)]
    return sorted([*judged, *_slow(events)], key=lambda incident: incident.culprit.since)


def combined(weights: Iterable[float]) -> float:
    """How sure independent signals of these weights make one together: 1 - Π(1 - w), never quite certain."""
    return round(min(SURE_MAX, 1.0 - math.prod(1.0 - weight for weight in weights)), 2)


# --- who ----------------------------------------------------------------------------------------------------


def _judge(cluster: Cluster, events: Sequence[Event], epoch_of: dict[int, tuple[int, int]]) -> Incident:
    found = signals(cluster)
    held = _held(cluster, found, events)
    culprit, others = held[0], tuple(one for one in held[1:] if one.confidence >= GUILTY)
    guilty = {one.group for one in (culprit, *others)}
    step = _step(cluster, culprit.group)
    kept = (event.folder for event in pick(cluster.events, Evidence) if event.folder)
    told = sorted(found, key=lambda signal: (signal.group != culprit.group, -signal.weight))
    do = advice(
        culprit.kind, culprit.node, culprit.cause, told, culprit.group,
        stacks=_has_stacks(cluster, culprit), up=_is_up(cluster, culprit, events),
    )  # fmt: skip
    return Incident(
        culprit=culprit,
        others=others,
        step=step,
        signals=tuple(told),
        victims=_victims(cluster, culprit, guilty),
        done=what_was_done(cluster, events, {group for group in guilty if group}, culprit.kind == "job"),
        cost=costs(cluster, events, epoch_of),
        evidence=tuple(dict.fromkeys(kept)),
        advice=do if cluster.lost_quorum is None else and_go_on(do, cluster.lost_quorum.keep),
    )


def _has_stacks(cluster: Cluster, culprit: Culprit) -> bool:
    kept = [event for event in pick(cluster.events, Evidence) if event.group == culprit.group]
    return any(name.startswith("stacks") for event in kept for name in event.taken)


def _is_up(cluster: Cluster, culprit: Culprit, events: Sequence[Event]) -> bool:
    """Whether those who went on, on the culprit's host, wrote something after it."""
    stayed = cluster.activated.members if cluster.activated is not None else ()
    return bool(culprit.node) and any(
        event.host == culprit.node and event.wall > culprit.since and event.process and event.group in stayed
        for event in events[cluster.start :]
    )


def _held(cluster: Cluster, found: Sequence[Signal], events: Sequence[Event]) -> list[Culprit]:
    """Who is held guilty, the first in causal order first; never empty."""
    nobody = _nobody(cluster, found)
    if nobody is not None:
        return [nobody]
    by_group: dict[str, list[Signal]] = {}
    for signal in found:
        by_group.setdefault(signal.group, []).append(signal)
    all_held = [_culprit(group, own, events) for group, own in by_group.items()]
    guilty = sorted((one for one in all_held if one.confidence >= GUILTY), key=lambda one: one.since)
    return guilty or [max(all_held, key=lambda one: one.confidence)]


def _culprit(group: str, own: Sequence[Signal], events: Sequence[Event]) -> Culprit:
    heaviest = max(own, key=lambda signal: (bool(signal.kind), signal.weight))
    telling = [signal for signal in own if signal.kind and signal.weight >= heaviest.weight / 2] or [heaviest]
    first = min(telling, key=lambda signal: signal.since)
    rank = next((s.rank for s in (heaviest, *sorted(own, key=lambda s: -s.weight)) if s.rank >= 0), -1)
    each = {signal.name: max(s.weight for s in own if s.name == signal.name) for signal in own}
    kind = heaviest.kind or "unknown"
    confidence = combined(each.values())
    return Culprit(group, rank, _node(events, group, rank, first.since), kind, heaviest.detail, confidence, first.since)


def _nobody(cluster: Cluster, found: Sequence[Signal]) -> Culprit | None:
    """Whose fault it is if it is no group's."""
    events, since = cluster.events, cluster.events[0].wall
    lost = pick(events, GroupLost)
    errors = {error.group: error for error in pick(events, UserError)}
    same = {(error.type, error.step) for error in errors.values()}
    if len(errors) > 1 and len(same) == 1 and set(errors) >= set(cluster.members):
        first = next(iter(errors.values()))
        cause = f"all groups raised {first.type} at step {first.step}: {first.message}"
        return Culprit("", -1, "", "job", cause, SURE_MAX, first.wall)
    stuck = {one.group: one for one in pick(events, Stuck)}
    if not lost and not errors and len(stuck) > 1 and set(stuck) >= set(cluster.members):
        slept = next(iter(stuck.values()))
        cause = f"all groups stand still in {slept.phase}: something that they share does not answer (storage?)"
        return Culprit("", -1, "", "storage", cause, ALIKE, min(s.wall - s.since_s for s in stuck.values()))
    if not lost and not errors and not stuck and (nobody := _nothing_died(cluster, found, since)) is not None:
        return nobody
    quorum = cluster.lost_quorum
    if quorum is not None and not lost and not errors and all(signal.weight < GUILTY for signal in found):
        return Culprit("", -1, "", "quorum", quorum.reason, SURE_MAX, since)
    if found:
        return None
    stops = [stop.reason for stop in pick(events, JobStopped)]
    why = next((prepared.why for prepared in pick(events, Prepared) if prepared.why), "")
    return Culprit("", -1, "", "unknown", stops[0] if stops else why or "nobody said why", 0.3, since)


def _nothing_died(cluster: Cluster, found: Sequence[Signal], since: float) -> Culprit | None:
    """A reduce that failed, and the same groups went on: a connection was cut."""
    failed = pick(cluster.events, ReduceFailed)
    strong = any(signal.kind and signal.weight >= GUILTY for signal in found)
    stayed = cluster.activated is not None and set(cluster.activated.members) >= set(cluster.members)
    if not failed or strong or not stayed:
        return None
    ends = sorted({failed[0].group, *failed[0].suspects})
    error = briefly(failed[0].error) or "no error was told"
    cause = f"a connection between groups was cut and nobody died ({', '.join(ends)}): {error}"
    return Culprit("", -1, "", "network", cause, CUT, since)


def _victims(cluster: Cluster, culprit: Culprit, guilty: set[str]) -> tuple[str, ...]:
    if culprit.kind == "job":
        return ()  # all of them did it
    noticed = {event.group for event in cluster.events if isinstance(event, ReduceFailed | Recovered)}
    if cluster.activated is not None:  # all who stood for it
        noticed |= set(cluster.activated.members) & set(cluster.members)
    ranks = {
        f"{event.group} rank {event.rank}"
        for event in pick(cluster.events, ReduceFailed)
        if event.group == culprit.group and event.rank != culprit.rank and culprit.rank >= 0
    }
    return tuple(sorted(noticed - guilty - {""})) + tuple(sorted(ranks))


def _step(cluster: Cluster, group: str) -> int:
    """Where the culprit was; by whoever went on, if nobody knows."""
    own = [event for event in cluster.events if event.group == group or not group]
    steps = [e.step for e in own if isinstance(e, UserError | Stuck | ReduceFailed | GroupLost) and e.step >= 0]
    if cluster.activated is not None:  # a beat may be a step old
        return max([cluster.activated.first_step, *steps[:1]])
    return max(steps, default=max((e.step for e in pick(cluster.events, ReduceFailed)), default=-1))


def _node(events: Sequence[Event], group: str, rank: int, since: float) -> str:
    """The host that the rank, or else the group's manager, wrote from last before it happened."""
    names = [f"rank {group}/{rank}"] if rank >= 0 else []
    for name in (*names, f"manager {group}"):
        hosts = [e.host for e in events if e.process == name and e.host and not isinstance(e, ProcessStarted)]
        before = [e.host for e in events if e.process == name and e.host and e.wall <= since]
        if before or hosts:
            return (before or hosts[:1])[-1]
    return ""


# --- who is slow --------------------------------------------------------------------------------------------


def _slow(events: Sequence[Event]) -> list[Incident]:
    """One incident for each time a group was slow, with the last that was said of it."""
    open_: dict[str, list[Slow]] = {}
    spells: list[tuple[list[Slow], SlowEnded | None]] = []
    for event in events:
        if isinstance(event, Slow):
            if event.group not in open_:
                open_[event.group] = []
                spells.append((open_[event.group], None))
            open_[event.group].append(event)
        elif isinstance(event, SlowEnded) and event.group in open_:
            said = open_.pop(event.group)
            spells = [(one, event if one is said else ended) for one, ended in spells]
    return [_slow_incident(said, ended) for said, ended in spells]


def _slow_incident(said: Sequence[Slow], ended: SlowEnded | None) -> Incident:
    first, last = said[0], said[-1]
    about = {"group": last.group, "rank": last.rank, "since": first.wall}
    factor = f"{last.factor:.2f} times the median's time for a microbatch, over {last.steps} steps"
    weighed = [Signal("compute time", SLOW_FACTOR, factor, kind="slow", **about)]  # type: ignore[arg-type]
    if last.wait_s < last.others_wait_s:
        waits = f"waits {last.wait_s:.2g} s a step for the others, they {last.others_wait_s:.2g} s"
        weighed.append(Signal("waits least", SLOW_WAITS, waits, **about))  # type: ignore[arg-type]
    if last.flaps:
        flaps = f"it was slow {last.flaps} times before"
        weighed.append(Signal("was slow before", SLOW_FLAPS, flaps, **about))  # type: ignore[arg-type]
    sure = combined(signal.weight for signal in weighed)
    culprit = Culprit(last.group, last.rank, last.node, "slow", f"slow: {factor}", sure, first.wall)
    done = ["asked to leave" if last.done == "asked to leave" else last.done or "reported"]
    if ended is not None:
        done.append(f"as fast as the others again at step {ended.step}")
    return Incident(
        culprit=culprit, step=first.step, signals=tuple(weighed), done=tuple(done), cost=Cost(share=last.costs),
        advice=advice("slow", last.node, "", (), last.group),
    )  # fmt: skip
