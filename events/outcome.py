"""What was done about an incident, and what it cost those who stayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from lightkeeper.events.incidents import Cluster
from lightkeeper.events.lineage import pick
from lightkeeper.events.of_supervisor import JobRestarts, RunEnded, RunFailed
from lightkeeper.events.reader import seconds_between
from lightkeeper.events.schema import (
    Committed,
    Event,
    Fenced,
    GroupLost,
    Healed,
    JobStopped,
    Recovered,
    Rejoined,
    UserError,
)
from lightkeeper.events.summary import NORMAL_STEPS
from lightkeeper.lighthouse.messages import QUORUM_LOST

_ALL_RAISED = "the same exception in all groups"


@dataclass(frozen=True)
class Cost:
    """What an incident cost.

    Attributes:
        stalls_s: by group that stayed, seconds that it stood in the step, for the one that was gone and for the
            recovery; what it stands in other steps is taken off.
        further: microbatches that were orphaned and computed by those who stayed.
        recomputed: microbatches that those who stayed computed twice.
        steps_lost: commits of those who stayed that were thrown away.
        share: of everybody's time, 0 to 1, while it lasts; of a slow group.
    """

    stalls_s: dict[str, float] = field(default_factory=dict)
    further: int = 0
    recomputed: int = 0
    steps_lost: int = 0
    share: float = 0.0


def what_was_done(cluster: Cluster, events: Sequence[Event], guilty: set[str], all_alike: bool) -> tuple[str, ...]:
    """In words, in the order in which it was done.

    Args:
        cluster: the incident.
        events: the run.
        guilty: the groups it is told of.
        all_alike: whether all groups did the same: nothing was done to one for the sake of the others.
    """
    done = []
    activated, lost = cluster.activated, cluster.lost
    if activated is not None:
        out = sorted(guilty - set(activated.members)) if activated.members else []
        done += [f"{', '.join(out)} left out from step {activated.first_step}"] if out else []
    fenced = sorted({event.group for event in pick(cluster.events, Fenced)} & set(lost))
    if fenced and not all_alike:
        done.append(f"{', '.join(fenced)} fenced")
    recovered = pick(cluster.events, Recovered)
    if recovered:
        groups = sorted({event.group for event in recovered})
        done.append(f"step {recovered[0].step} done by {', '.join(groups)}")
    done += [told for group in sorted(lost) if (told := _back(cluster, events, group))]
    stops = [event.reason for event in pick(cluster.events, JobStopped)]
    if (quorum := cluster.lost_quorum) is not None:
        keeps = f", and {quorum.keep} alone was to keep its last step" if quorum.keep else ""
        done.append(f"{QUORUM_LOST}: the job ended{keeps}")
    elif stops:
        done.append(f"the job stopped: {stops[0] if all_alike else _stopped_for(cluster, stops[0])}")
    elif activated is None and not cluster.closed:
        done.append(_by_the_supervisor(events[cluster.start :]) or "nothing yet: it is not over")
    return tuple(done)


def _by_the_supervisor(after: Sequence[Event]) -> str:
    """What the supervisor did first: it began the whole job again, or ended the run; empty if neither."""
    for event in after:
        if isinstance(event, JobRestarts):
            return f"the whole job was started again: {event.reason}"
        if isinstance(event, RunFailed):
            return f"the run failed: {event.reason}"
        if isinstance(event, RunEnded):
            return f"the run ended (exit code {event.code}): {event.reason}"
    return ""


def _stopped_for(cluster: Cluster, reason: str) -> str:
    """The lighthouse's words; of the exception of the only group that was left it knows that all had it."""
    raised = {event.group for event in pick(cluster.events, UserError)}
    if len(raised) == 1 and reason.startswith(_ALL_RAISED):
        return f"{raised.pop()} raised, and no other group was left"
    return reason


def _back(cluster: Cluster, events: Sequence[Event], group: str) -> str:
    """How a lost group came back, if it did before it was lost again."""
    former, healed = cluster.lost[group], False
    gone = [event for event in pick(cluster.events, GroupLost) if event.group == group]
    for event in events[cluster.start :]:
        if event.group != group or event.incarnation in ("", former):
            continue
        if isinstance(event, GroupLost):
            return f"{group} came back and was lost again"
        healed = healed or isinstance(event, Healed)
        if isinstance(event, Rejoined):
            after = f", {seconds_between(gone[0], event):.1f} s after its loss" if gone else ""
            return f"{group} {'healed and ' if healed else ''}rejoined at step {event.step}{after}"
        if isinstance(event, Committed) and event.live:
            return f"{group} is back since step {event.step}"
    return ""


def costs(cluster: Cluster, events: Sequence[Event], epoch_of: dict[int, tuple[int, int]]) -> Cost:
    """What those who stayed paid.

    Args:
        cluster: the incident.
        events: the run.
        epoch_of: of its lineage, the (epoch, term) of each step's entry.
    """
    stalls: dict[str, float] = {}
    further: set[tuple[str, int, int]] = set()
    for event in pick(cluster.events, Recovered):
        stalls[event.group] = max(stalls.get(event.group, 0.0), event.stall_s)
        further |= {(event.group, event.step, k) for k in event.further}
    if cluster.activated is None:
        return Cost(stalls, len(further))
    epoch, step, stayed = cluster.activated.epoch, cluster.activated.first_step, set(cluster.activated.members)
    own = [c for c in pick(events, Committed) if c.group in stayed and c.rank == 0 and c.live]
    twice = {
        c.group: c.computed - len(c.microbatches)
        for c in own
        if (c.step, c.epoch) == (step, epoch) and c.computed is not None
    }
    thrown = {(c.group, c.step) for c in own if c.step >= step and (c.epoch, c.term) != epoch_of[c.step]}
    for group in stayed & set(cluster.members):
        stood = _stood([c for c in own if c.group == group], step, epoch)
        if stood > stalls.get(group, 0.0):
            stalls[group] = round(stood, 4)
    return Cost(stalls, len(further), sum(max(0, more) for more in twice.values()), len(thrown))


def _stood(commits: Sequence[Committed], step: int, epoch: int) -> float:
    """Waiting in the step that was recovered, less the median of the ten before it."""
    during = [c.wait_s for c in commits if (c.step, c.epoch) == (step, epoch)]
    before = [c.wait_s for c in commits if c.step < step][-NORMAL_STEPS:]
    return during[0] - median(before) if during and before else 0.0
