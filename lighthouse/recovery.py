"""A recovery: ask all in touch for a promise, and conclude from the promises what the next epoch does first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightkeeper.lighthouse.deal import deal_rest
from lightkeeper.lighthouse.messages import Donor, Promise, Share
from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, origin


class Contradiction(RuntimeError):
    """The promises contradict each other: an invariant does not hold, and the job must stop."""


@dataclass(slots=True)
class Recovery:
    """One try; a death or a return before `Activate` starts another with a higher number.

    Attributes:
        cause: why the epoch before it ended.
        since: when the first try began (monotonic seconds).
        asked: groups that were sent `Prepare`.
        promises: group to its promise.
    """

    epoch: Epoch
    cause: str
    since: float
    asked: frozenset[str]
    promises: dict[str, Promise] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all that were asked have promised."""
        return len(self.promises) == len(self.asked)

    @property
    def missing(self) -> tuple[str, ...]:
        """Groups that were asked and have not promised."""
        return tuple(sorted(self.asked - self.promises.keys()))


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What `Activate` says, but for the membership's epoch.

    Attributes:
        members: groups of the next epoch in slot order.
        behind: promisers that lag by more than one entry: they heal as joiners.
    """

    members: tuple[str, ...]
    behind: tuple[str, ...]
    first_step: int
    total: int
    shares: tuple[Share, ...]
    donors: tuple[Donor, ...]
    entry: Entry | None


def newest_known(logged: Membership | None, promises: Mapping[str, Promise]) -> Membership | None:
    """The newest membership that log or promises name (a planned one is activated by the entries alone)."""
    named = [promise.known for promise in promises.values() if promise.known is not None]
    if logged is not None:
        named.append(logged)
    return max(named, key=lambda membership: membership.epoch, default=None)


def unheard(newest: Membership | None, promises: Mapping[str, Promise]) -> Membership | None:
    """An epoch that may be in force and of which no member has promised, or None if there is none.

    Args:
        newest: result of `newest_known`.
        promises: group to its promise; only those of the incarnations in the memberships count.
    """
    if newest is None:
        return None
    prepared = [p for promise in promises.values() for p in promise.prepared if p.base == newest.epoch]
    for membership in (newest, *prepared):
        if membership.members and not any(_speaks_for(membership, member, promises) for member in membership.members):
            return membership
    return None


def _speaks_for(membership: Membership, member: Member, promises: Mapping[str, Promise]) -> bool:
    """Whether a member's promise tells what its epoch may have committed.

    A joiner that a planned change names, and that has not applied the entry which does so, knows of nothing: alone it
    would go on from a step that is final.
    """
    promise = promises.get(member.group)
    return promise is not None and (promise.known is not None or membership.base is None)


def of_one_history(
    candidates: Sequence[str], promises: Mapping[str, Promise], fingerprints: Mapping[str, str]
) -> list[str]:
    """Who begins a job: those whose state is furthest on, if it is one and the same; the others heal from these.

    Joiners outlive the members that they followed, each with the entries that it got: of these the newest one counts.
    The others bring a state of their own, perhaps from a checkpoint: of these the one with most steps behind it counts.
    A checkpoint holds final steps only, so if it is further on than every entry, nothing final is given up for it.

    Args:
        candidates: promisers, in slot order.
        promises: group to its promise, for every candidate.
        fingerprints: of the states with which they joined, by group.
    """
    last = {group: promises[group].last or origin(0) for group in candidates}
    made = max((entry for entry in last.values() if entry.made), key=lambda e: (e.epoch, e.step), default=None)
    brought = max((entry for entry in last.values() if not entry.made), key=lambda e: e.step, default=None)
    newest = made if brought is None or (made is not None and made.step >= brought.step) else brought
    begin = [group for group in candidates if last[group] == newest]
    if newest is None or newest.made:
        return begin
    # no entry names these states: one is known by its fingerprint, or if others gave it, by who holds it
    state = {group: group if promises[group].healed else f"as {fingerprints[group]}" for group in begin}
    return [group for group in begin if state[group] == state[begin[0]]]


def conclude(
    candidates: Sequence[str],
    promises: Mapping[str, Promise],
    speeds: Callable[[Sequence[str]], Sequence[int]] | None = None,
) -> Conclusion:
    """What the next epoch does first.

    Args:
        candidates: promisers that may be members, in slot order.
        promises: group to its promise, for every candidate.
        speeds: gives the relative speeds of the members among them, in slot order; None: all alike.

    Raises:
        Contradiction: if two groups committed different entries for the newest step, or two promise to hold the
            same microbatch, or they disagree on the number of microbatches.
    """
    last = {group: _last_step(promises[group]) for group in candidates}
    high = max(last.values())
    members = tuple(group for group in candidates if last[group] >= high - 1)
    behind = tuple(group for group in candidates if last[group] < high - 1)
    ahead = [group for group in members if last[group] == high]
    entries = {promises[group].last for group in ahead}
    if len(entries) > 1:
        raise Contradiction("two entries for one step: " + "; ".join(sorted(str(entry) for entry in entries)))
    totals = {promises[group].total for group in ahead}
    if len(totals) > 1:
        raise Contradiction(f"groups disagree on the microbatches of step {high + 1}: {sorted(totals)}")
    (total,) = totals
    try:
        by = () if speeds is None else speeds(members)
        shares = deal_rest(total, {group: promises[group].held for group in ahead}, members, by)
    except ValueError as error:
        raise Contradiction(str(error)) from error
    there = set(ahead)
    late = [group for group in members if group not in there]
    donors = tuple(Donor(group, ahead[i % len(ahead)]) for i, group in enumerate(late))
    return Conclusion(
        members,
        behind,
        high + 1,
        total,
        tuple(Share(group, shares[group]) for group in members),
        donors,
        next(iter(entries)),
    )


def most_blamed(suspects: Counter[str], own: Counter[str], among: Sequence[str], times: int) -> str | None:
    """The group to leave out after failures in a row, if one stands out.

    Args:
        suspects: how often groups were named by others.
        own: how often groups failed and named nobody but themselves.
        among: the members.
        times: number of failures in a row: who alone failed by itself, and that often, stands out.
    """
    if len(own) == 1:
        ((group, count),) = own.items()
        if count >= times and group in among:
            return group
    ranked = [(count, group) for group, count in suspects.items() if group in among]
    ranked.sort(key=lambda item: (-item[0], item[1]))
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return ranked[0][1]


def _last_step(promise: Promise) -> int:
    return -1 if promise.last is None else promise.last.step
