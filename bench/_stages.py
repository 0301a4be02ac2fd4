"""Where the time of a restart goes, by the events of a supervised run. Pure.

Each stage ends at a moment that somebody wrote down; of several groups the last one counts, of the detection the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightkeeper.events.lineage import pick
from lightkeeper.events.of_checkpoints import CheckpointLoaded
from lightkeeper.events.of_supervisor import GroupEnded, GroupStarted, NodeChecked
from lightkeeper.events.schema import Committed, Event, GroupLost, Joined, ProcessStarted, Rejoined


def group_restart(events: Sequence[Event], group: str, killed: float, imported: float) -> dict[str, float]:
    """Seconds of each stage of a group that was killed and healed.

    Args:
        events: the run's, from the kill on.
        group: its name.
        killed: when, in seconds since 1970.
        imported: when its new rank had imported what it needs.
    """
    own = [event for event in events if event.group == group]
    back = pick(own, Rejoined)[0]
    return _between(killed, {
        **_until_started(events, [group]),
        "import": imported,
        "rendezvous": _last(pick(own, Joined)),
        "heal": back.wall,
        "first step": next(e.wall for e in pick(own, Committed) if e.live and e.step >= back.step),
    })  # fmt: skip


def job_restart(
    events: Sequence[Event], groups: Sequence[str], killed: float, imported: Mapping[str, float]
) -> dict[str, float]:
    """The same of a job whose groups were all killed, and which went on from a checkpoint.

    Args:
        events: the run's, from the kill on.
        groups: all of them.
        killed: when, in seconds since 1970.
        imported: by group, when its new rank had imported what it needs.
    """
    loaded = _last(pick(events, CheckpointLoaded))
    begun = [next(e.wall for e in pick(events, Committed) if e.group == group and e.wall > loaded) for group in groups]
    return _between(killed, {
        **_until_started(events, groups),
        "import": max(imported.values()),
        "load": loaded,
        "rendezvous": _last(pick(events, Joined)),
        "first step": max(begun),
    })  # fmt: skip


def _until_started(events: Sequence[Event], groups: Sequence[str]) -> dict[str, float]:
    ended = [e for e in pick(events, GroupEnded) if e.group in groups]
    lost = [e.wall for e in pick(events, GroupLost) if e.group in groups]
    checked = [e for e in pick(events, NodeChecked) if e.group in groups]
    managers = [f"manager {group}" for group in groups]
    return {
        "detect": min([*lost, *(e.wall - e.after_s for e in ended)]),
        "tear down": _last(ended),
        "allocate": max(e.wall - e.seconds for e in checked),
        "preflight": _last([e for e in pick(events, GroupStarted) if e.group in groups]),
        "launch": _last([e for e in pick(events, ProcessStarted) if e.process in managers]),
    }


def _last(events: Sequence[Event]) -> float:
    return max(event.wall for event in events)


def _between(begin: float, moments: Mapping[str, float]) -> dict[str, float]:
    """Seconds from each moment to the next, and of all."""
    seconds, before = {}, begin
    for stage, moment in moments.items():
        seconds[stage] = round(moment - before, 3) + 0.0  # no -0.0
        before = moment
    return {**seconds, "all": round(before - begin, 3)}
