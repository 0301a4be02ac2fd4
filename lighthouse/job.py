"""One job's state, and the questions that its state answers. Nothing here changes anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.admission import View
from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.names import EVEN, Epoch, Member, Membership, Term
from lightkeeper.lighthouse.recovery import Recovery
from lightkeeper.lighthouse.silence import Patience, stands
from lightkeeper.lighthouse.slow import SlowGroup, Slows
from lightkeeper.lighthouse.spares import MEMBER, RESERVE, at_work, parked_words
from lightkeeper.lighthouse.speeds import Dealer, usual

CALLS_S = 5.0  # within which a manager has tried all its addresses
MAY_NOT = (
    "this lighthouse may not leave anybody out until they come, or `lightkeeper fence --group NAME` says that they are "
    "gone"
)
MAY_TRAIN = (
    "they may be training without this lighthouse; if they are gone, say so with `lightkeeper fence --group NAME`"
)
NOBODY_CALLS = (
    "nobody of this job is in touch with this lighthouse: it cannot use your word; name the one that the groups talk to"
)
REFUSAL_CHARS_MAX = 300
DEATHS_MAX = 2  # within ten minutes, before a group is held back
KNOWN_BY = ("manager", "operator", "left")  # who says that a group is gone and knows it
STARTED_AGAIN = "its process ended and the group was started again"  # before anybody missed it


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lighthouse's times for a small job, in seconds.

    Attributes:
        lease_s: how long a silence is borne when somebody waits.
        beat_s: how often a manager beats.
        admit_interval_s: for so long after a planned change nobody else is taken in.
    """

    lease_s: float = 2.0
    beat_s: float = 0.2
    admit_interval_s: float = 1.0

    def patience(self, groups: int) -> Patience:
        """The times of a job of so many groups."""
        return Patience.of(groups, self.lease_s, self.beat_s)


@dataclass(frozen=True, slots=True)
class Death:
    """The word of somebody who knows that the processes of an incarnation are gone.

    Attributes:
        reason: one line for the person on call.
        since: when it was said (monotonic seconds).
        epoch: number of the newest epoch known here when the operator said it; None: its own manager said it.
    """

    reason: str
    since: float
    epoch: int | None


@dataclass(frozen=True, slots=True)
class Fencing:
    """What the operator's word that the processes of a group are gone would mean.

    Attributes:
        incarnation: whose processes it would be about, empty if the group is not known.
        heard_s: seconds since it was heard, if it may well be alive.
        gone_s: seconds since somebody who knows said the same, None if nobody did.
        refused: why the word is of no use here, empty if it is taken.
    """

    incarnation: str = ""
    heard_s: float | None = None
    gone_s: float | None = None
    refused: str = ""


class Job:
    """Members of one job, as the lighthouse knows them.

    Args:
        job: the job's id.
        term: the reigning lighthouse's term.
        history: what the log knows of the job.
        bounds: lease and beat.
        now: monotonic seconds at the lighthouse's start.
    """

    def __init__(self, job: str, term: Term, history: JobHistory, bounds: Bounds, now: float) -> None:
        self.job, self.term, self.bounds = job, term, bounds
        self.highest = history.highest
        self.groups: dict[str, Group] = {}
        self.visits: dict[str, tuple[str, float]] = {}  # group: incarnation and time of its last call as a standby's
        self.told_term = term  # which those in touch were asked to acknowledge
        self.called_s: float | None = None  # since when all that a take-over needs have called
        self.fenced: dict[str, str] = {}  # incarnations that are to be fenced should they come, and why
        self.dead: dict[str, Death] = {}  # those that are, by the word of somebody who knows
        self.ended = ""  # how the job ended last
        self.broken_off = history.broken_off
        self._said_s = now
        self._ticked_s = now
        self.slept_s = -math.inf  # until when this process itself stood still last
        self._dealt_s = now  # when it was looked whether the shares are right
        self._quiet = False  # whether the last look found that nothing can change by itself
        self._clear()
        self._remember(history)
        for member in self.newest.members if self.newest else ():
            self.groups[member.group] = Group(member.group, member.incarnation, heard=now)

    def _clear(self) -> None:
        """No epoch is in force, and nothing is under way; epoch numbers and fenced incarnations are remembered."""
        self.newest: Membership | None = None
        self.prepared: list[Membership] = []  # planned changes on the newest epoch
        self.foreign: list[Membership] = []  # the same, prepared by another lighthouse, or by one whose log is lost
        self.unbuilt_s: float | None = None  # the newest of them could not be built: not prepared anew before
        self.unbuilt_times = 0
        self.planned_s: float | None = None  # when somebody came or went by a planned change
        self.reigns = True
        self.shown: Epoch | None = None  # the newest that a manager has shown to be in force for it
        self.config: m.Hello | None = None
        self.reference: tuple[str, m.Join] | None = None
        self.recovery: Recovery | None = None
        self.activation: m.Activate | None = None
        self.recoveries_without_commit = 0
        self.suspects: Counter[str] = Counter()
        self.own_failures: Counter[str] = Counter()  # of those who named nobody but themselves
        self.first_failure = ""
        self.errors: dict[str, m.UserError] = {}
        self.stopped: m.Stop | None = None
        self.keeper: tuple[str, str] | None = None  # the group, and incarnation, that keeps the last committed step
        self.told_to_stop = False
        self.stood_s: float | None = None  # since when it stands below its minimum
        self.copied: int | None = None
        self.dealer, self.slows = Dealer(), Slows()
        self.slow: dict[str, SlowGroup] = {}  # groups that are called slow
        self.heal_s = 0.0  # how long the last one that came in took from its join on
        self.reasons: dict[Epoch, str] = {}  # for new shares, of `prepared`
        self.shrunk = False  # whether somebody left by the newest epoch, perhaps below the minimum
        self.refused = ("", "")  # who was turned away last, and why: those that wait for more groups wait for it

    def _remember(self, history: JobHistory) -> None:
        """What the log says is in force."""
        self.newest, self.prepared, self.reigns = history.membership, list(history.prepared), history.reigns

    @property
    def patience(self) -> Patience:
        """How long this job bears what."""
        return self.bounds.patience(self.config.groups if self.config is not None else 1)

    def waiting(self, now: float) -> tuple[tuple[str, ...], str, float]:
        """For whom the job waits, why, and since how many seconds; empty if it does not wait."""
        if self.recovery is not None:
            since_s = now - self.recovery.since
            if self.recovery.missing:
                return self.recovery.missing, "their promise", since_s
            if not self._may_leave_out():
                missing = self._unanswered()
                return missing, self._why_not(missing), since_s
            silent = tuple(g.name for g in self._members() if g.gone is None and g.name not in self.recovery.asked)
            if silent:
                return silent, "silent; they are left out once their lease has passed", since_s
            minimum, wait_s = self.config.minimum if self.config else 0, self._quorum_wait_s()
            until = f"; the job ends when there have been fewer for {wait_s:g} s" if wait_s is not None else ""
            return ("any group",), f"at least {minimum} groups{until}", since_s
        joined = self._joined()
        if self.newest is None and self.config is not None and joined:
            more = self.config.groups - sum(map(counts, joined))
            whom = f"{more} more group{'s' if more > 1 else ''}"
            since_s = now - min(group.joined_s for group in joined)
            needs = f"the first epoch needs {self.config.groups}"
            refused = self.refused[1][:REFUSAL_CHARS_MAX]
            return (whom,), f"{needs}; refused: {refused}" if refused else needs, since_s
        return self._waiting_for_members(now)

    def _quorum_wait_s(self, coming_in: bool = False) -> float | None:
        """For how long those who stand in a recovery bear it below the minimum: each may say something else.

        While enough come in they bear it for longer: half-way to where each would give up by itself.
        """
        told = []
        for name in () if self.recovery is None else self.recovery.asked:
            hello = self.groups[name].hello if name in self.groups else None
            if hello is not None and (wait_s := hello.quorum_wait_s) is not None:
                longer = coming_in and wait_s > 0  # 0 is meant as it is said
                told.append((wait_s + max(wait_s, hello.outage_budget_s or 0.0)) / 2 if longer else wait_s)
        return min(told, default=None)

    def is_member(self, name: str) -> bool:
        """Whether the incarnation of a group that was heard last is a member of the newest epoch."""
        return self._member(name) is not None

    def _waiting_for_members(self, now: float) -> tuple[tuple[str, ...], str, float]:
        """Nobody has asked for a recovery, but members are not here."""
        if self.newest is None or self.stopped is not None:
            return (), "", 0.0
        calling = any(self._called(name, now) for name in self.newest.groups)
        if not self.reigns and calling and (missing := self._unanswered()):
            return (
                missing,
                self._why_not(missing),
                now - max((g.heard for n in missing if (g := self.groups.get(n))), default=now),
            )
        if self._outside() and not any(group.in_touch for group in self._members()):
            silent = [group.name for group in self._members() if group.gone is None]
            silent += [name for name in self._may_have_switched() if name not in silent]
            since_s = now - max((self.groups[name].heard for name in silent if name in self.groups), default=now)
            return tuple(silent), MAY_TRAIN, since_s
        return (), "", 0.0

    def _cause(self, now: float) -> str | None:
        """Why a recovery is needed, or None."""
        if self.newest is None:
            return self._begins() if self._may_start(now) else None
        members = self._members()
        for group in members:
            if group.gone is not None:
                return f"{group.name}: {group.gone.cause}"
        if len(members) < len(self.newest.members):
            names = [member.group for member in self.newest.members if self._member(member.group) is None]
            return f"{', '.join(names)}: {STARTED_AGAIN}"
        for group in members:
            if group.failed is not None:
                return f"{group.name} reported: {group.failed.error}"
        minimum = self.config.minimum if self.config is not None else 0
        if self.shrunk and self.reigns and len(self.newest.members) < minimum:
            return f"groups have left; the job goes on with at least {minimum}"
        return None

    def _begins(self) -> str:
        """Why there is a first epoch; after an earlier one, how that job ended."""
        before = f": the job before it ended ({self.ended})" if self.ended and self.broken_off is not None else ""
        return f"{m.FIRST_EPOCH}{before}"

    def _may_start(self, now: float) -> bool:
        if self.config is None or (self.config.start_window_s <= 0 and len(self.groups) < self.config.groups):
            return False  # said without a look at every group: asked whenever one of them comes
        joined = [group for group in self._joined() if counts(group)]
        if not joined:
            return False
        window_s = self.config.start_window_s
        word = window_s > 0 and now - min(group.joined_s for group in joined) >= window_s
        return len(joined) >= self.config.groups or (word and len(joined) >= self.config.minimum)

    def _participants(self) -> list[Group]:
        """All in touch that may be asked for a promise: members of the newest epoch, or all that joined (which state
        each of these holds now, its promise tells).

        Below the minimum also joiners that have healed from the standing members.
        """
        if self.newest is None:
            return sorted(self._seated(self._ticked_s), key=lambda group: group.name)
        members = [group for group in self._members() if group.in_touch]
        if self.config is None or len(members) >= self.config.minimum:
            return members
        others = [g for g in self._outside() if g.follows]
        return members + sorted(others, key=lambda group: group.name)

    def _candidates(self) -> list[str]:
        """Promisers in slot order."""
        assert self.recovery is not None
        names = sorted(self.recovery.asked)
        if self.newest is not None:
            members = [g for g in self.newest.groups if g in self.recovery.asked and self._member(g) is not None]
            there = set(members)
            names = members + [g for g in names if g not in there]
        return names

    def _may_leave_out(self) -> bool:
        """Leaving out somebody who is silent takes a lighthouse that reigns."""
        return self.reigns or self.newest is None

    def _unanswered(self) -> tuple[str, ...]:
        """Who has not acknowledged this term, and of whom nobody who knows has said that they are fenced."""
        missing = []
        for member in self._needed():
            group = self.groups.get(member.group)
            mine = group is not None and group.incarnation == member.incarnation
            obeys = mine and group is not None and group.acknowledged == self.term
            dead = mine and group is not None and group.gone is not None and group.gone.detected_by == "manager"
            if not obeys and not dead and member.incarnation not in self.dead:
                missing.append(member.group)
        return tuple(missing)

    def _needed(self) -> tuple[Member, ...]:
        """Whose word a take-over needs: all members of each epoch that may be in force.

        An epoch that was logged, and that nobody has shown to know, may never have been told; then the one that its
        members know may have been taken over meanwhile, and another lighthouse have gone on from there.
        """
        needed = {member.incarnation: member for member in self.newest.members} if self.newest else {}
        todo = list(needed.values()) if self.newest and self.shown != self.newest.epoch else []
        while todo:
            member = todo.pop()
            group = self.groups.get(member.group)
            if group is None or group.incarnation != member.incarnation or group.hello is None:
                continue
            more = [other for other in _known(group.hello) if other.incarnation not in needed]
            needed.update({other.incarnation: other for other in more})
            todo += more
        return tuple(needed.values())

    def _needs(self, hello: m.Hello) -> bool:
        """Whether a take-over needs this manager's word."""
        return any(member.incarnation == hello.incarnation for member in self._needed())

    def _why_not(self, missing: tuple[str, ...]) -> str:
        again = [name for name in missing if (g := self.groups.get(name)) and g.in_touch and self._member(name) is None]
        if not again:
            return MAY_NOT
        names = ", ".join(again)
        return (
            f"the earlier processes of {names} may still live; `lightkeeper fence --group NAME` says that they are gone"
        )

    def _called(self, name: str, now: float) -> bool:
        """Whether a group is in touch, or has called so lately that it will again."""
        group, visit = self.groups.get(name), self.visits.get(name)
        if group is not None and group.in_touch:
            return True
        return visit is not None and now - visit[1] <= self.bounds.lease_s + CALLS_S

    def _settled(self) -> bool:
        """Whether only an event can change anything here, and no passing of time: all are members, and all is well."""
        if self.newest is None or self.recovery is not None or self.stopped is not None or not self.reigns:
            return False
        if self.prepared or self.copied is not None:
            return False
        members = self._members()
        if len(self.groups) - sum(bool(group.parked) for group in self._outside()) != len(members):
            return False
        number = self.newest.epoch.number
        return all(
            group.in_touch
            and group.failed is None
            and not group.leaving
            and group.beat is not None
            and group.beat.epoch == number
            and not group.beat.stopped_ms
            and group.beat.overdue is None
            and not stands(group)
            for group in members
        )

    def _may_live(self) -> list[Group]:
        """Members that may still train: nobody who knows has said that they are gone. Silence proves nothing."""
        return [g for g in self._members() if g.gone is None or g.gone.detected_by not in KNOWN_BY]

    def _may_have_switched(self) -> dict[str, str]:
        """Incarnation by group of those that a planned change takes in, no members here, that may train in it."""
        found = {}
        for member in (one for planned in (*self.prepared, *self.foreign) for one in planned.members):
            inside = self.newest is not None and self.newest.slot_of(member.group, member.incarnation) is not None
            if inside or member.incarnation in self.dead or member.incarnation in self.fenced:
                continue
            group = self.groups.get(member.group)
            silent = group is not None and group.incarnation == member.incarnation and not group.in_touch
            if group is None or (silent and not known_gone(group)):
                found[member.group] = member.incarnation
        return found

    def _leavers(self) -> set[str]:
        return {group.name for group in self._members() if group.leaving}

    def _planned(self) -> Membership | None:
        """The newest planned change on the newest epoch; it replaces those before it unless their flags were faster."""
        return self.prepared[-1] if self.prepared else None

    def _speed(self, name: str) -> int:
        """Relative speed by which a group is dealt work in the next epoch: as it was; the usual one for a newcomer."""
        if self.newest is None:
            return EVEN
        slot = self.newest.slot_of(name)
        return usual(self.newest.speeds) if slot is None else self.newest.speed_of(slot)

    def _new_speeds(self) -> tuple[int, ...] | None:
        """Speeds by which the members' work is to be dealt from now on, if others than before, and if all is quiet."""
        if self.newest is None or self.config is None or not self.config.by_speed or len(self.newest.members) < 2:
            return None
        if self.recovery is not None or self.stopped is not None or not self.reigns:
            return None
        members, number = self._members(), self.newest.epoch.number
        quiet = self.copied is None and not self.prepared and len(members) == len(self.newest.members)
        beats = [g.beat for g in members if g.in_touch and not g.leaving and g.failed is None and g.beat is not None]
        if not quiet or len(beats) < len(members) or any(beat.epoch != number or beat.stopped_ms for beat in beats):
            return None
        step, total = max(beat.step for beat in beats), max(beat.total for beat in beats)
        return self.dealer.look(step, self.newest, [beat.microbatch_us for beat in beats], total)

    def _speeds(self, names: Sequence[str]) -> tuple[int, ...]:
        """Relative speed of each group of the next epoch, given in slot order; 0 for its spares."""
        assert self.config is not None
        members = {name for name in names if self._member(name) is not None}
        worked = {name for name in members if self._speed(name)}
        promoted = usual(() if self.newest is None else self.newest.speeds)  # how fast it is shows once it works
        last = {n for n in names if (hello := self.groups[n].hello) is not None and hello.role not in ("", MEMBER)}
        working = at_work(names, self.config.members, worked, set(names) - members, last)
        return tuple((self._speed(name) or promoted) if name in working else 0 for name in names)

    # ------------------------------------------------------------ who is taken in

    def _outside(self) -> list[Group]:
        """Groups in touch that have joined, are no members, and have not asked to leave.

        Who takes itself for a member is none of them: whether it is left out may have to show first.
        """
        joined = (group for group in self._joined() if group.in_touch and not group.leaving)
        return [group for group in joined if self._member(group.name) is None and not was_member(group)]

    def _seated(self, now: float) -> list[Group]:
        """Those of them for whom the job has a use: as many as are missing, first come first.

        Who heals already is one of them whatever happens; who is held back for flapping is the last.
        """
        outside, begins = self._outside(), self.newest is None
        if self.config is None or not outside:
            return []
        staying = sum(group.gone is None and not group.leaving for group in self._members())
        outside = [group for group in outside if not begins or counts(group) or group.comes_in]
        outside = sorted(outside, key=lambda g: (not g.comes_in, self._flaps(g, now), g.joined_s, g.name))
        return outside[: max(self.config.groups - staying, sum(group.comes_in for group in outside))]

    def _flaps(self, group: Group, now: float) -> bool:
        """Whether it is held back because it died again and again."""
        return len(group.deaths) >= DEATHS_MAX and now < group.admit_s

    def _parked_why(self, coming_in: int) -> str:
        assert self.config is not None
        here = sum(group.gone is None for group in self._members()) + coming_in
        return parked_words(here, self.config.members, self.config.spares)

    def _first_step_now(self) -> int:
        """How far the members are, as far as is known: a beat may be from before they were told where to begin."""
        first = 0 if self.activation is None else self.activation.first_step
        return max((first, *(g.beat.step for g in self._members() if g.beat)))

    def _view(self) -> View:
        return View(self.config, self.groups, self.newest, self.stopped, self.patience, self.bounds.lease_s)

    def _members(self) -> list[Group]:
        """Groups of the newest epoch's incarnations, in slot order."""
        if self.newest is None:
            return []
        found = ((self.groups.get(member.group), member.incarnation) for member in self.newest.members)
        return [group for group, incarnation in found if group is not None and group.incarnation == incarnation]

    def _member(self, name: str) -> Group | None:
        group = self.groups.get(name)
        if group is None or self.newest is None or self.newest.slot_of(name, group.incarnation) is None:
            return None
        return group

    def _joined(self) -> list[Group]:
        return [g for g in self.groups.values() if g.join is not None and g.gone is None]

    def _others_joined(self, name: str) -> bool:
        return any(g.name != name and g.gone is None and g.join is not None for g in self.groups.values())


def was_member(group: Group) -> bool:
    """Whether it came as a member of the epoch that it knows."""
    known = None if group.hello is None else group.hello.known
    return known is not None and known.slot_of(group.name, group.incarnation) is not None


def known_gone(group: Group) -> bool:
    """Whether somebody who knows has said that it is gone."""
    return group.gone is not None and group.gone.detected_by in KNOWN_BY


def _known(hello: m.Hello) -> tuple[Member, ...]:
    return () if hello.known is None else hello.known.members


def counts(group: Group) -> bool:
    """Whether it is one of the groups that the job is configured for, as far as it says."""
    return group.hello is None or group.hello.role != RESERVE
