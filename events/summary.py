"""Rules over the event log of a run. Pure functions: a list of events in, a finding out.

The lineage decides what counts: for each step, the entry of the highest epoch that anybody committed. What an
evicted group committed alone under a lower epoch is not in it. A rule that lacks what it needs says so and
does not hold: no check passes because nothing was recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from lightkeeper.events.lineage import Lineage, lineage, live_groups, lost_groups, lost_incarnations, members_at, pick
from lightkeeper.events.reader import seconds_between
from lightkeeper.events.schema import (
    Adopted,
    Committed,
    Copied,
    Diverged,
    Event,
    FaultInjected,
    Finished,
    GroupLost,
    Healed,
    Parked,
    ProcessStarted,
    Recovered,
    Rejoined,
    SettingsDiffer,
)
from lightkeeper.words import shown

NORMAL_STEPS = 10  # a normal iteration is the median of this many before the fault
NAMED_MAX = 5
PACE_STEPS_MIN = 3  # fewer iterations than this do not tell a pace


@dataclass(frozen=True)
class Finding:
    """The outcome of one rule: whether it holds, its figure if it has one, and why not in words."""

    holds: bool
    why: str = ""
    value: float | int | None = None


@dataclass(frozen=True)
class Stall:
    """How long one survivor stood in the step of a recovery.

    Attributes:
        group: the survivor.
        step: the step of its longest iteration from the fault on.
        longest_s: that iteration.
        normal_s: median iteration of the ten steps before.
        inherited_s: computing the microbatches it had more than in the step before.
    """

    group: str
    step: int
    longest_s: float
    normal_s: float
    inherited_s: float

    @property
    def stood_s(self) -> float:
        """Longest iteration less the normal one less the inherited work, not below zero."""
        return max(0.0, self.longest_s - self.normal_s - self.inherited_s)


@dataclass(frozen=True)
class Rejoin:
    """How a group became a member of a job that ran: one that was lost and started again, or one that came late.

    Attributes:
        group: its name.
        incarnation: its new start.
        step: the first step it was a member of.
        after_s: from its new start (or, where nobody wrote that down, from its joining) until then; of one that was
            no member before, or was parked, from the beginning of its heal: before that nobody wanted it.
        since: which of these, in words.
        bytes: state fetched, over all tries and ranks.
        fetch_s: the longest fetch of one rank's state.
        bytes_per_s: of the fetches together.
        pause_s: what the copy cost a member's training thread at a boundary, at most; None: nobody said.
        replayed: entries applied after the copy, without a share in them.
        survivors: the members' longest iteration from the copy until the step after the rejoin.
        again: whether it was a member before; False: a spare that was parked, or a group that was started late.
    """

    group: str
    incarnation: str
    step: int
    after_s: float
    since: str
    bytes: int
    fetch_s: float
    bytes_per_s: float | None
    pause_s: float | None
    replayed: int
    survivors: tuple[Stall, ...] = ()
    again: bool = True


def samples_exactly_once(events: Sequence[Event], steps: int | None = None) -> Finding:
    """Every microbatch of every committed step is in the run exactly once.

    Over the groups that committed a step within the lineage, each of its M microbatches stands once. A group
    that was killed between its vote and its event has no line; its microbatches are taken as consumed only if
    that group is known as lost and every commit of the entry says that the entry counted M.

    Args:
        events: the run.
        steps: number of steps of the whole run, of which those before it was resumed were done elsewhere; None: up to
            the last one committed.
    """
    line = lineage(events)
    wanted = range(line.first_step, line.last_step + 1 if steps is None else steps)
    if not wanted:
        return Finding(False, "no step was committed")
    consumed = 0
    members = members_at(events)
    wrote = {event.group for event in events if event.process != "lighthouse"}
    for step in wanted:
        commits = line.commits.get(step)
        if not commits:
            return Finding(False, f"step {step} was never committed", consumed)
        why = _step_is_whole(step, commits, members(step), lost_groups(events), wrote)
        if why:
            return Finding(False, why, consumed)
        consumed += commits[0].total
    return Finding(True, "", consumed)


def _step_is_whole(
    step: int, commits: list[Committed], members: set[str], lost: set[tuple[str, str]], wrote: set[str]
) -> str:
    totals = {commit.total for commit in commits}
    if len(totals) != 1 or totals == {0}:
        return f"step {step}: its number of microbatches is not told alike: {sorted(totals)}"
    total = totals.pop()
    by_group: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for commit in commits:
        if commit.live:  # a replay consumes nothing
            by_group[commit.group].add(commit.microbatches)
    torn = [group for group, shares in by_group.items() if len(shares) > 1]
    if torn:
        return f"step {step}: the ranks of {torn[0]} name different microbatches"
    count = Counter(k for shares in by_group.values() for share in shares for k in share)
    twice = sorted(k for k, times in count.items() if times > 1)
    if twice:
        return f"step {step}: microbatches {twice} were consumed more than once"
    alien = sorted(k for k in count if not 0 <= k < total)
    if alien:
        return f"step {step}: microbatches {alien} are not of this step (M = {total})"
    missing = sorted(set(range(total)) - set(count))
    if not missing:
        return ""
    silent = {group for group, _ in lost} & members - set(by_group)
    if silent and all(commit.counted == total for commit in commits):
        return ""
    if unheard := sorted(members - wrote):
        few = ", ".join(unheard[:NAMED_MAX]) + (f" and {len(unheard) - NAMED_MAX} more" if unheard[NAMED_MAX:] else "")
        return f"step {step}: {few}, of its members, wrote no events here (start all groups with --run-folder)"
    return f"step {step}: microbatches {missing} were consumed by nobody"


# --- faults -------------------------------------------------------------------------------------------------


def fault_fired(events: Sequence[Event], fault: str | None = None) -> Finding:
    """A fault was injected (of this name, if one is given)."""
    found = [event for event in pick(events, FaultInjected) if fault is None or event.fault == fault]
    return Finding(bool(found), "" if found else f"no fault {fault or ''} was injected".replace("  ", " "), len(found))


def detected_after(events: Sequence[Event], fault: FaultInjected | None = None) -> Finding:
    """Seconds from the (first) injected fault to the first report that this group is gone."""
    fault = fault or next(iter(pick(events, FaultInjected)), None)
    if fault is None:
        return Finding(False, "no fault was injected")
    for lost in pick(events, GroupLost):
        if lost.group == fault.group and _same_incarnation(lost, fault):
            after = seconds_between(fault, lost)
            if after >= 0:
                return Finding(True, "", after)
    blamed = sorted({lost.group for lost in pick(events, GroupLost)})
    return Finding(False, f"{fault.group} was hit, nobody reported it lost (reported: {blamed or 'nobody'})")


def _same_incarnation(one: Event, other: Event) -> bool:
    return not one.incarnation or not other.incarnation or one.incarnation == other.incarnation


def blamed(events: Sequence[Event]) -> Finding:
    """Only groups that were hit by a fault were reported lost or fenced."""
    hit = {fault.group for fault in pick(events, FaultInjected)}
    wrong = sorted({lost.group for lost in pick(events, GroupLost)} - hit)
    return Finding(not wrong, f"reported lost without a fault: {', '.join(wrong)}" if wrong else "", len(wrong))


def stalls(events: Sequence[Event], fault: FaultInjected | None = None) -> list[Stall]:
    """How long each survivor stood: its longest iteration from the fault on, against the ten steps before.

    Looks at the step of the fault and the two after it. The inherited time is (new share - old share) times
    the median time of one microbatch in the steps before.
    """
    fault = fault or next(iter(pick(events, FaultInjected)), None)
    if fault is None:
        return []
    by_group = _by_group(lineage(events), live_groups(events) - {fault.group})
    found = [_stall(group, commits, fault.step) for group, commits in sorted(by_group.items())]
    return [stall for stall in found if stall is not None]


def _by_group(line: Lineage, groups: set[str]) -> dict[str, list[Committed]]:
    """Live commits of rank 0 within the lineage, by group, in the order of the steps."""
    by_group: dict[str, list[Committed]] = defaultdict(list)
    for step in sorted(line.commits):
        for commit in line.commits[step]:
            if commit.group in groups and commit.live and commit.rank == 0:
                by_group[commit.group].append(commit)
    return by_group


def _stall(group: str, commits: list[Committed], step: int) -> Stall | None:
    before = [c for c in commits if c.step < step and c.seconds > 0][-NORMAL_STEPS:]
    during = [c for c in commits if step <= c.step <= step + 2]
    if not before or not during:
        return None
    longest = max(during, key=lambda c: c.seconds)
    each = [(c.seconds - c.wait_s) / len(c.microbatches) for c in before if c.microbatches]
    more = len(longest.microbatches) - len(before[-1].microbatches)
    inherited = max(0, more) * median(each) if each else 0.0
    return Stall(group, longest.step, longest.seconds, median(c.seconds for c in before), inherited)


def rejoins(events: Sequence[Event]) -> list[Rejoin]:
    """Every group that became a member while the job ran, in the order of the rejoins."""
    line = lineage(events)
    found = []
    healed = (e for e in events if isinstance(e, Healed | Rejoined))
    for group, incarnation in dict.fromkeys((e.group, e.incarnation) for e in healed):
        own = [event for event in events if (event.group, event.incarnation) == (group, incarnation)]
        live = (commit for commit in pick(own, Committed) if commit.live)  # named in a recovery: no word of its own
        member = next(iter(pick(own, Rejoined)), None) or next(live, None)
        if member is not None:
            found.append(_rejoin(events, line, own, member))
    return found


def _rejoin(events: Sequence[Event], line: Lineage, own: Sequence[Event], rejoined: Rejoined | Committed) -> Rejoin:
    group, healed = rejoined.group, pick(own, Healed)
    started, again = _started(events, own[0], group), _was_member(events, own[0])
    after_s, since = seconds_between(started, rejoined), "it asked to join"
    if isinstance(started, ProcessStarted):
        since = "its new start"
    if healed and (not again or any(isinstance(event, Parked) for event in own)):
        after_s, since = seconds_between(healed[0], rejoined) + healed[0].seconds, "it began to heal"
    seconds = sum(event.seconds for event in healed)
    size = sum(event.bytes for event in healed)
    copies = [
        copy
        for copy in pick(events, Copied)
        if copy.group != group and seconds_between(started, copy) >= 0 and copy.step <= rejoined.step
    ]
    first = min([*(copy.step for copy in copies), *(event.step for event in healed)], default=rejoined.step)
    replayed = {c.step for c in pick(own, Committed) if not c.live}
    others = _by_group(line, {c.group for step in line.commits.values() for c in step} - {group})
    stalls = [_longest(name, commits, first, rejoined.step + 1) for name, commits in sorted(others.items())]
    return Rejoin(
        group=group,
        incarnation=rejoined.incarnation,
        step=rejoined.step,
        after_s=after_s,
        since=since,
        bytes=size,
        fetch_s=max((event.seconds for event in healed), default=0.0),
        bytes_per_s=size / seconds if seconds > 0 else None,
        pause_s=max((copy.pause_s for copy in copies), default=None),
        replayed=len(replayed),
        survivors=tuple(stall for stall in stalls if stall is not None),
        again=again,
    )


def _former(events: Sequence[Event], first: Event) -> list[Event]:
    """What is known of earlier incarnations of a group, before the first word of this one."""
    earlier = (e for e in events if e.group == first.group and e.incarnation not in ("", first.incarnation))
    return [event for event in earlier if seconds_between(event, first) >= 0]


def _was_member(events: Sequence[Event], first: Event) -> bool:
    former = _former(events, first)
    return bool(pick(former, GroupLost)) or any(commit.live for commit in pick(former, Committed))


def _started(events: Sequence[Event], first: Event, group: str) -> Event:
    """Who started it may have written that down; else the first thing said of it."""
    starts = [e for e in pick(events, ProcessStarted) if e.group == group and seconds_between(e, first) >= 0]
    lost = [e for e in pick(events, GroupLost) if e.group == group and seconds_between(e, first) >= 0]
    ends = [*lost, *_former(events, first)]  # the lighthouse, which says who is lost, may write elsewhere
    starts = [e for e in starts if all(seconds_between(end, e) >= 0 for end in ends)]
    return starts[0] if starts else first


def _longest(group: str, commits: list[Committed], first: int, last: int) -> Stall | None:
    """The longest of the iterations `first` to `last`, against the ten before them (of the same epoch, if known)."""
    earlier = [c for c in commits if c.step < first and c.seconds > 0]
    alike = [c for c in earlier if c.epoch == earlier[-1].epoch]
    before = [c.seconds for c in (alike if len(alike) >= PACE_STEPS_MIN else earlier)][-NORMAL_STEPS:]
    during = [c for c in commits if first <= c.step <= last]
    if not before or not during:
        return None
    longest = max(during, key=lambda c: c.seconds)
    return Stall(group, longest.step, longest.seconds, median(before), 0.0)


def lost_in_words(events: Sequence[Event]) -> str:
    """Who was lost, why and at which step; empty if nobody was."""
    told = []
    for lost in pick(events, GroupLost):
        step = _lost_at(events, lost)
        told.append(f"{lost.group} ({shown(lost.cause)}{f', step {step}' if step >= 0 else ''})")
    return ", ".join(dict.fromkeys(told))


def _lost_at(events: Sequence[Event], lost: GroupLost) -> int:
    """Its step when last seen; by its own log if whoever called it lost never heard of a step."""
    if lost.step > 0 or lost.phase:
        return lost.step
    own = (c for c in pick(events, Committed) if c.group == lost.group and _same_incarnation(c, lost))
    return max((commit.step + 1 for commit in own), default=lost.step)


def steps_lost(events: Sequence[Event]) -> Finding:
    """Committed steps whose work was thrown away by a group that stayed; must be 0."""
    stayed = live_groups(events)
    if not stayed:
        return Finding(False, "no step was committed")
    line = lineage(events)
    gone = lost_incarnations(events)  # what they threw away is no work of a group that stayed
    kept = [c for c in line.discarded if c.group in stayed and (c.group, c.incarnation) not in gone]
    lost = {(commit.group, commit.step) for commit in kept}
    again: Counter[tuple[str, str, int, int]] = Counter()
    for step, commits in line.commits.items():
        again.update((c.group, c.incarnation, c.rank, step) for c in commits if c.live)
    lost |= {(group, step) for (group, _, _, step), times in again.items() if times > 1}
    again_steps = sorted({step for _, step in lost})
    return Finding(not lost, f"steps done again: {again_steps}" if lost else "", len(again_steps))


def recomputed_by_survivors(events: Sequence[Event]) -> Finding:
    """Microbatches for which a group that stayed ran forward and backward more than once; must be 0."""
    stayed, gone = live_groups(events), lost_incarnations(events)
    line = lineage(events)
    live = (c for step in line.commits.values() for c in step if c.group in stayed and c.live)
    commits = [c for c in live if (c.group, c.incarnation) not in gone]
    if not commits:
        return Finding(False, "no live commit was recorded")
    if any(commit.computed is None for commit in commits):
        return Finding(False, "forward passes were not counted")
    extra = sum(max(0, (commit.computed or 0) - len(commit.microbatches)) for commit in commits)
    return Finding(extra == 0, f"{extra} microbatches were computed again" if extra else "", extra)


def recovery_ran(events: Sequence[Event]) -> Finding:
    """At least one rank repeated a reduce after a failure, or adopted an entry."""
    count = len(pick(events, Recovered)) + len(pick(events, Adopted))
    return Finding(count > 0, "" if count else "no recovery was recorded", count)


# --- state --------------------------------------------------------------------------------------------------


def fingerprints_equal(events: Sequence[Event]) -> Finding:
    """Ranks with the same index hold the same bits, at every step of the lineage that has fingerprints.

    The end of the run must have one from every live group: of its last commit, or of its `finished`.
    """
    line = lineage(events)
    if line.last_step < 0:
        return Finding(False, "no step was committed")
    seen: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)  # (steps done, rank) -> group -> fingerprint
    for commits in line.commits.values():
        for commit in commits:
            if commit.fingerprint:
                seen[commit.step + 1, commit.rank][commit.group] = commit.fingerprint
    differing = ""
    for finished in pick(events, Finished):
        if finished.fingerprint:
            rank = int(finished.process.rpartition("/")[2] or 0)
            known = seen[finished.step, rank].setdefault(finished.group, finished.fingerprint)
            if known != finished.fingerprint:
                differing = f"{finished.group}: its state changed after its last commit"
    compared = sum(len(by_group) for by_group in seen.values())
    for (steps, rank), by_group in sorted(seen.items()):
        if len(set(by_group.values())) > 1:
            return Finding(False, f"after {steps} steps, rank {rank}: fingerprints differ: {by_group}", compared)
    if unlike := pick(events, SettingsDiffer):
        differing = f"in step {unlike[0].step} the optimizers have different settings, say {_who(unlike)}"
    elif diverged := pick(events, Diverged):
        differing = f"at the end the groups do not hold the same bits, say {_who(diverged)}"
    if differing:
        return Finding(False, differing, compared)
    told = {group for (steps, _), by_group in seen.items() if steps > line.last_step for group in by_group}
    without = sorted(live_groups(events) - told)
    if without:
        return Finding(False, f"at the end: no fingerprint from {', '.join(without)}", compared)
    return Finding(True, "", compared)


def _who(events: Iterable[Event]) -> str:
    return ", ".join(sorted({event.group for event in events}))


def one_lineage(events: Sequence[Event]) -> Finding:
    """No incarnation went on from an entry that was thrown away (invariant I1)."""
    line = lineage(events)
    for commit in line.discarded:
        for step in range(commit.step + 1, line.last_step + 1):
            for later in line.commits.get(step, []):
                if (later.group, later.incarnation, later.live) == (commit.group, commit.incarnation, True):
                    why = f"{commit.group} built on step {commit.step} of epoch {commit.epoch}"
                    return Finding(False, why)
    return Finding(True)


def final_loss(events: Sequence[Event]) -> float | None:
    """Loss of the last step of the lineage, None if nobody told it."""
    line = lineage(events)
    losses = [c.loss for c in line.commits.get(line.last_step, []) if c.loss is not None]
    return losses[0] if losses else None


def goodput(events: Sequence[Event]) -> Finding:
    """Share of the elapsed time that went into steps at their normal pace, by the group that was there longest.

    Per stretch of steps under one epoch: the number of iterations times their median; the sum of these over the time
    from the first commit to the last. A stretch too short to know its own pace takes that of the one before. Time
    that nobody trained in, a stall or an outage, is in the elapsed time only.
    """
    line = lineage(events)
    live = _by_group(line, live_groups(events))
    if not live:
        return Finding(False, "no step was committed")
    own = max(live.values(), key=len)
    elapsed = seconds_between(own[0], own[-1])
    if len(own) < 2 or elapsed <= 0:
        return Finding(False, "fewer than two commits")
    stretches: dict[tuple[int, int], list[float]] = defaultdict(list)
    for earlier, later in pairwise(own):
        stretches[later.epoch, later.term].append(seconds_between(earlier, later))
    good, pace = 0.0, median(seconds_between(a, b) for a, b in pairwise(own))
    for intervals in stretches.values():
        pace = median(intervals) if len(intervals) >= PACE_STEPS_MIN else pace
        good += pace * len(intervals)
    return Finding(True, "", min(1.0, good / elapsed))
