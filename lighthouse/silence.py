"""Who is gone: a verdict on silence.

A neighbour who does not answer the door may be out, asleep, or simply have a broken bell. Nobody breaks the door in
for that alone; but if the whole stairwell waits for them and the postman has brought no sign of life either, somebody
must decide. So a member is never called gone for being silent: only if somebody *waits* for it as well. Either a
member has found the epoch broken (then a broken stream is enough: kernels close the sockets of the dead within
milliseconds), or somebody has been standing in a reduce for a lease. A member one of whose ranks is stopped by a signal
cannot put in its part: there it is enough that somebody stands at all.

In a large house nobody rings every door five times a second. There members beat seldom, so their silence says little;
but who begins to stand says so at once, and then those are asked, five times a second, who have not said that they
stand as well, and only an ask that stays unanswered is silence. One witness is asked with them: that somebody stands
must be as fresh as the silence that it is held against.

Rejected: evicting on the lease alone (as heartbeat time-outs do), since a lost control link of a group that goes on
training would then cost an eviction.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightkeeper.lighthouse.group import Gone, Group

STANDING_MS_MIN = 20
OFTEN_MAX = 64  # so many groups may beat at the shortest interval: some 320 messages a second
OVERDUE_BEATS = 2.0
PATIENT = 0.5  # of what the one that is stood for bears
ASKED_SHARE = 0.65  # of the lease, since it takes somebody a while to say that it stands, and then to be asked
NAMED_MAX = 8
BEFORE_FORMING = ("recover", "vote", "before", "reduce", "closing")  # where a rank of an epoch that is over may hang
ASKED_MAX = 32  # in one look: with two looks to an interval no more than `OFTEN_MAX` groups cause


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a job of this size bears what; in seconds.

    Attributes:
        beat_s: how often a manager beats by itself.
        asks: whether silence is counted from an ask on; in a small job, where all beat often, from the last word.
        ask_s: how often one that is waited for is asked.
        lease_s: how long the silence of one in touch is borne.
        away_s: how long one whose stream is broken is waited for.
    """

    beat_s: float
    asks: bool
    ask_s: float
    lease_s: float
    away_s: float

    @classmethod
    def of(cls, groups: int, lease_s: float, beat_s: float) -> Patience:
        """That of a job of so many groups, where a small one has this lease and beat.

        The beat grows with the number of groups, so that their beats cost no more than those of a small job. To come
        back after their streams broke, all at once, takes so many groups some milliseconds each.
        """
        grown = max(1.0, groups / OFTEN_MAX)
        asks = grown > 1.0
        away_s = lease_s + 0.0025 * lease_s * max(0, groups - OFTEN_MAX)
        return cls(beat_s * grown, asks, beat_s, lease_s * (ASKED_SHARE if asks else 1.0), away_s)


def stands(group: Group) -> bool:
    """Whether it said last that it stands in a reduce. A normal reduce of some milliseconds is not standing."""
    return group.beat is not None and group.beat.waiting_ms >= STANDING_MS_MIN


def overdue(group: Group) -> bool:
    """Whether a rank of it lives and has made no progress for longer than its manager bears."""
    return group.beat is not None and group.beat.overdue is not None


def _patient_s(group: Group) -> float:
    """How long another one must have stood for this one, which is overdue: when something that all share answers again
    after a while, somebody is the first to get on.
    """
    return PATIENT * group.beat.borne_ms / 1000 if group.beat is not None else 0.0


def silent(group: Group, patience: Patience, now: float, times: int = 1) -> bool:
    """Whether one in touch has been silent for longer than is borne, or so many times as long."""
    since = group.asked_s if patience.asks else group.heard
    return since is not None and now - since > patience.lease_s * times


class Look:
    """One look at all members: who among them is gone, and whom to ask for a sign of life.

    Args:
        members: all members of the newest epoch.
        waited: groups that were asked for a promise and have not given it; None if there is no recovery.
        patience: what is borne for how long.
        now: monotonic seconds.
    """

    def __init__(self, members: Sequence[Group], waited: Sequence[str] | None, patience: Patience, now: float) -> None:
        self.members, self.patience, self.now = members, patience, now
        self.waited = None if waited is None else frozenset(waited)
        self._here = sum(g.gone is None for g in members)
        self._failed = sum(g.failed is not None for g in members)
        working = [g for g in members if g.gone is None and g.beat is not None and g.beat.microbatch_us]
        late = [g for g in working if overdue(g)]
        self._all_overdue = len(late) == len(working) > 1  # nobody's fault: they wait for one thing
        self._few = 2 * sum(g.in_touch for g in members) < len(members)
        standing = [g for g in members if g.gone is None and stands(g) and self._fresh(g)]
        self._standing = heapq.nlargest(2, standing, key=_waiting_ms)

    @property
    def nobody_waits(self) -> bool:
        """Whether nobody can be gone, and nobody needs to be asked."""
        return self.waited is None and not self._failed and not self._standing

    def verdict(self, group: Group) -> Gone | None:
        """Whether this member must be left out now, and why."""
        if group.gone is not None:
            return group.gone
        if self._here <= 1:
            return None  # nobody is left to wait
        epoch_is_over = self.waited is not None or self._failed > (group.failed is not None)
        stands_s = self._standing_s(group)
        if not epoch_is_over and stands_s == 0.0:
            return None
        phase, step = group.where
        times = 2 if self._few else 1
        bound_s = self.patience.lease_s * times
        stopped_s = 0.0 if group.beat is None else group.beat.stopped_ms / 1000
        if stopped_s > self.patience.lease_s:
            return Gone(
                f"{_stopped(group)} been stopped for {stopped_s:.1f} s",
                "frozen",
                phase,
                step,
                since_s=stopped_s,
                rank=_stopped_rank(group),
            )
        if overdue(group) and not self._all_overdue and (stands_s >= _patient_s(group) or self._forms(group)):
            return _without_progress(group)
        if (behind_s := self._behind_s(group)) > 0.0:
            return _left_behind(group, behind_s)
        if not epoch_is_over and stands_s < bound_s:
            return None  # others may still commit, and each commit proves that it lives
        silent_s = self.now - group.heard
        if group.connection is None:
            if epoch_is_over and not self._few and group.hello is not None:
                return Gone("its manager's stream broke and a member found the epoch broken", "stream", phase, step)
            if silent_s > self.patience.away_s * times:
                return Gone(
                    f"its manager's stream broke and did not come back within {silent_s:.1f} s", "lease", phase, step,
                    since_s=silent_s,
                )  # fmt: skip
        elif silent(group, self.patience, self.now, times):
            return Gone(f"its manager has been silent for {silent_s:.1f} s", "lease", phase, step, since_s=silent_s)
        return None

    def to_ask(self) -> list[Group]:
        """Whom to ask now: those for whom somebody waits, longest silence first, and one who waits.

        Who begins to stand is followed by the others that stand, each with its own word; so they are given a moment.
        """
        witness = self._standing[0] if self._standing else None
        if not self.patience.asks or (witness is None and self.waited is None):
            return []
        due = [g for g in self.members if g.in_touch and self._due(g)]
        if witness is not None and not self._given_a_moment(witness):
            due = [g for g in due if g is witness]
        elif self.waited is not None:
            due = [g for g in due if g.name in self.waited]
        else:
            due = [g for g in due if g is witness or self._overdue(g) or not _stands_with(g, witness)]
        asked = heapq.nsmallest(ASKED_MAX, due, key=_heard)
        if witness is not None and witness in due and witness not in asked:
            asked.append(witness)
        return asked

    def _given_a_moment(self, witness: Group) -> bool:
        said_s, ask_s = _waiting_ms(witness) / 1000, self.patience.ask_s
        return said_s >= ask_s and said_s + self.now - witness.heard >= 2.0 * ask_s

    def _overdue(self, group: Group) -> bool:
        return self.now - group.heard > OVERDUE_BEATS * self.patience.beat_s

    def _standing_s(self, group: Group) -> float:
        """How long the longest of the others has been standing, as it said itself."""
        return next((_waiting_ms(g) / 1000 for g in self._standing if g is not group), 0.0)

    def _forms(self, group: Group) -> bool:
        """Whether it does not come to the epoch that all others wait to form with it: then nobody stands."""
        late = None if group.beat is None else group.beat.overdue
        return self.waited is None and self._failed > 0 and late is not None and late.phase in BEFORE_FORMING

    def _behind_s(self, group: Group) -> float:
        """For how long it has not committed a step that another one, which stands in a later one, has; 0 if that is
        borne. It had put in its part: it may even look as if it stood.
        """
        leader = next((g for g in self._standing if g is not group), None)
        mine, its = group.beat, None if leader is None else leader.beat
        if leader is None or its is None or mine is None or not mine.borne_ms:
            return 0.0
        if group.connection is None or self._overdue(group):
            return 0.0  # of one that was not heard lately it is not known where it is
        if any(doing.phase == "recover" for doing in mine.ranks):
            return 0.0  # it may wait for another group, whose rank does not come to form the epoch with it
        if (mine.epoch, mine.step) >= (its.epoch, its.step):
            return 0.0
        behind_s = self.now - max(group.moved_s, leader.moved_s)
        return behind_s if behind_s > mine.borne_ms / 1000 else 0.0

    def _fresh(self, group: Group) -> bool:
        return self.now - group.heard <= self.patience.lease_s

    def _due(self, group: Group) -> bool:
        quiet_s = 1.5 * self.patience.ask_s if group.asked_s is None else self.patience.ask_s
        return self.now - max(group.heard, group.asked_again_s) >= quiet_s


def _stands_with(group: Group, witness: Group | None) -> bool:
    """Whether it said that it stands in the reduce in which the witness stands."""
    if witness is None or witness.beat is None or group.beat is None or not stands(group):
        return False
    return (group.beat.epoch, group.beat.step) == (witness.beat.epoch, witness.beat.step)


def _stopped_ranks(group: Group) -> list[int]:
    return sorted(rank for doing in group.beat.ranks if doing.stopped_ms for rank in doing.ranks) if group.beat else []


def _stopped_rank(group: Group) -> int:
    stopped = _stopped_ranks(group)
    return stopped[0] if len(stopped) == 1 else -1


def _stopped(group: Group) -> str:
    """``rank 1 has``, or ``ranks 0, 1 have``."""
    stopped = _stopped_ranks(group)
    if len(stopped) > 1:
        return f"ranks {', '.join(map(str, stopped[:NAMED_MAX]))}{' and more' if stopped[NAMED_MAX:] else ''} have"
    return f"rank {stopped[0]} has" if stopped else "a rank has"


def _without_progress(group: Group) -> Gone:
    assert group.beat is not None and group.beat.overdue is not None
    late, step = group.beat.overdue, group.beat.overdue.step
    idle_s, borne = late.idle_ms / 1000, f"{late.deadline_ms / 1000:.1f} s are borne"
    cause = (
        f"rank {late.rank} lives and has made no progress in {late.phase} of step {step} for {idle_s:.1f} s ({borne})"
    )
    return Gone(cause, "progress", late.phase, step, rank=late.rank, since_s=idle_s)


def _left_behind(group: Group, behind_s: float) -> Gone:
    phase, step = group.where
    cause = f"it lives and has not committed step {step}, which the others have, for {behind_s:.1f} s"
    return Gone(cause, "progress", phase, step, since_s=behind_s)


def _waiting_ms(group: Group) -> int:
    return group.beat.waiting_ms if group.beat is not None else 0


def _heard(group: Group) -> float:
    return group.heard
