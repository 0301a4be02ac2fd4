"""Which entry of each step is the run's, who committed it, and which groups were there to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightkeeper.events.schema import Activated, Committed, Event, FaultInjected, GroupLost
from lightkeeper.lighthouse.messages import FIRST_EPOCH

T = TypeVar("T", bound=Event)


@dataclass
class Lineage:
    """Which entry of each step is the run's, and who committed it.

    Attributes:
        epoch_of: step to the (epoch, term) in the name of its entry.
        commits: step to the commits of that entry, all groups and ranks.
        discarded: commits under another name: thrown away.
        first_step: where the run began: 0, or the step that its groups were resumed at.
    """

    epoch_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    commits: dict[int, list[Committed]] = field(default_factory=dict)
    discarded: list[Committed] = field(default_factory=list)
    first_step: int = 0

    @property
    def last_step(self) -> int:
        """Highest step of the lineage, -1 if there is none."""
        return max(self.epoch_of, default=-1)


def pick(events: Iterable[Event], kind: type[T]) -> list[T]:
    """The events of one kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def lineage(events: Sequence[Event]) -> Lineage:
    """The entry of the highest epoch, for each step.

    A job that begun again from a checkpoint (or from nothing) has thrown away what was committed from there on.
    """
    begins = {
        (epoch.first_step, (epoch.epoch, epoch.term))
        for epoch in pick(events, Activated)
        if epoch.cause.startswith(FIRST_EPOCH)
    }
    result = Lineage(first_step=min((step for step, _ in begins), default=0))
    commits = pick(events, Committed)
    undone = {
        (step, name)
        for step, name in {(commit.step, (commit.epoch, commit.term)) for commit in commits}
        if any(step >= first and name < begun for first, begun in begins)
    }
    for commit in commits:
        name = (commit.epoch, commit.term)
        if (commit.step, name) not in undone:
            result.epoch_of[commit.step] = max(result.epoch_of.get(commit.step, name), name)
    for commit in commits:
        if (commit.epoch, commit.term) == result.epoch_of.get(commit.step):
            result.commits.setdefault(commit.step, []).append(commit)
        else:
            result.discarded.append(commit)
    return result


def live_groups(events: Sequence[Event]) -> set[str]:
    """Groups that committed the last step of the lineage."""
    line = lineage(events)
    return {commit.group for commit in line.commits.get(line.last_step, [])}


def lost_groups(events: Sequence[Event]) -> set[tuple[str, str]]:
    """(group, incarnation) of every group that was held to be gone or was hit by an injected fault."""
    kinds = (GroupLost, FaultInjected)
    return {(event.group, event.incarnation) for event in events if isinstance(event, kinds)}


def settled_steps(events: Sequence[Event]) -> int:
    """Steps that every member of the newest epoch has committed: of a run that goes on, the later ones are open."""
    line, members, last = lineage(events), members_at(events), dict[str, int]()
    for commits in line.commits.values():
        for commit in commits:
            last[commit.group] = max(last.get(commit.group, -1), commit.step)
    return 1 + min((last.get(group, -1) for group in members(line.last_step)), default=line.last_step)


def lost_incarnations(events: Sequence[Event]) -> set[tuple[str, str]]:
    """Groups that were lost, each with the incarnation that was, where that is known."""
    return {name for name in lost_groups(events) if name[1]}


# --- samples ------------------------------------------------------------------------------------------------


def members_at(events: Sequence[Event]) -> Callable[[int], set[str]]:
    """A function from a step to the members of the epoch it was committed in."""
    line = lineage(events)
    members = {(event.epoch, event.term): set(event.members) for event in pick(events, Activated)}

    def at(step: int) -> set[str]:
        return members.get(line.epoch_of.get(step, (-1, 0)), set())

    return at
