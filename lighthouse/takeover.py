"""Which lighthouse decides, when there may be several: a reign is held, lost, and taken over.

A captain's mate does not take the wheel because the bridge is silent: the captain may be talking to the other half of
the crew through a pipe that the mate cannot hear. The mate asks every sailor in turn to obey him from now on. Once all
have said so, nobody is left who would follow the captain, wherever he is. A sailor who has gone overboard cannot say
it; then somebody who saw it must: his own manager, or the operator.

So a lighthouse that does not reign needs, of every member of the newest epoch, the acknowledgement of its own term as
it stands, or the word that the member is fenced. A `Hello` is none yet: the stream may break before the manager has
read the `Welcome`, and it would go on obeying another.

A manager that has other addresses is sent on until all that are needed have called here, and those before this
lighthouse in the list have had a lease each: else the members of one job would settle at several lighthouses, none of
which may decide anything.

Rejected: a majority of the members (decided by the law of this project, with its example); acknowledging whichever
lighthouse answers first, which splits the members of a job whose first lighthouse is merely out of reach for some.
"""

from __future__ import annotations

from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Activated, Close, Note, Send, Superseded
from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.job import CALLS_S, Death, Job, counts
from lightkeeper.lighthouse.names import Member, Membership, Term
from lightkeeper.lighthouse.spares import RESERVE
from lightkeeper.lighthouse.speeds import Dealer

FENCED_KEPT_MAX = 10_000
VISITS_MAX = 10_000
ON_ITS_WAY = "it was on its way out when this lighthouse first heard of it"
OVER = "the job that it was in has ended, and nobody goes on from there; start this group again"
LEFT_OUT = "the job has gone on without it under another lighthouse"
COULD_NOT_FOLLOW = "it lost the entries before the one that made it a member"


class TakeOver(Job):
    """A job whose lighthouse may not be the only one."""

    def _lose_reign(self) -> list[Action]:
        """Somebody obeys, or knows, what is not in this log; that this happened must outlive a restart."""
        if not self.reigns:
            return []
        self.reigns = False
        return [] if self.newest is None else [Superseded()]

    def _obeys_another(self, hello: m.Hello, acknowledged: Term) -> bool:
        """Whether what a manager acknowledged last shows that another lighthouse may reign.

        A lower term, of one whose word a take-over does not need, is no news once all whose word it needs obey this
        term: who meets that has to take a higher one.
        """
        if acknowledged.lighthouse == self.term.lighthouse and acknowledged <= self.term:
            return False
        settled = self.newest is not None and not self._unanswered()
        return acknowledged > self.term or self._needs(hello) or not settled

    def _learn_newest(self, newest: Membership) -> list[Action]:
        """An epoch that another lighthouse, or another's `Prepare`, put in force."""
        actions = self._lose_reign() + self._void_words(newest)
        self.newest, self.reigns, self.prepared, self.shown = newest, False, [], newest.epoch
        self.shrunk, self.dealer = False, Dealer()
        self.highest = max(self.highest, newest.epoch.number)
        self.visits.clear()  # who called before it knew the epoch may have found another lighthouse since
        self._expect(newest)
        return actions + self._fence_left_out() + self._take_in()

    def _take_in(self) -> list[Action]:
        """An entry has made them members: from now on they have to go on, and who lost the entries before it cannot."""
        actions: list[Action] = []
        for group in self._members():
            if group.beat is None or not group.beat.epoch:
                group.moved_s = self._ticked_s
            if group.gone is None and self.newest is not None and group.lost_in >= self.newest.epoch.number:
                group.gone = Gone(COULD_NOT_FOLLOW, "manager", "follow", 0)
                actions.append(self._lost_note(group))
        return actions

    def _lost_note(self, group: Group) -> Note:
        assert group.gone is not None
        gone = group.gone
        self.first_failure = self.first_failure or f"{group.name}: {gone.cause}"
        fields = {
            "group": group.name,
            "incarnation": group.incarnation,
            "cause": gone.cause,
            "detected_by": gone.detected_by,
            "phase": gone.phase,
            "step": gone.step,
        }
        more = {"rank": gone.rank} if gone.rank >= 0 else {}
        return Note("group_lost", {**fields, **more, **({"since_s": gone.since_s} if gone.since_s else {})})

    def _expect(self, newest: Membership) -> None:
        """Its members may have yet to call; what is known here of their earlier incarnations tells nothing of them."""
        for member in newest.members:
            former = self.groups.get(member.group)
            if former is None or (former.incarnation != member.incarnation and not former.in_touch):
                deaths = () if former is None else former.deaths
                self.groups[member.group] = Group(member.group, member.incarnation, heard=self._ticked_s, deaths=deaths)

    def _fence_left_out(self) -> list[Action]:
        actions: list[Action] = []
        for group in self.groups.values():
            if not group.in_touch or group.hello is None:
                continue
            if self._leaves(group.hello):
                group.gone = Gone(ON_ITS_WAY, "left")
            elif self._left_out(group.hello):
                actions += self._fence(group, LEFT_OUT)
        return actions

    def _take_over(self) -> list[Action]:
        """Reigns once every member of the newest epoch has acknowledged this term, or is known to be fenced."""
        if self.reigns or self.newest is None or self._unanswered():
            return []
        self.reigns = True
        for group in self._members():
            if not group.in_touch:  # sent on, perhaps: leases count from the start of a reign
                group.hears(self._ticked_s)
        note = Note("took_over", {"epoch": self.newest.epoch, "members": list(self.newest.groups)})
        actions: list[Action] = [Activated(self.newest), note, *self._fence_left_out()]
        for group in self._members():
            actions += self._answer_query(group)
        return actions

    def _answer_query(self, group: Group) -> list[Action]:
        """Whether the epoch of a member that was frozen still stands is known only to who reigns."""
        query = group.query
        if query is None or not self.reigns or self.newest is None or self._member(group.name) is None:
            return []
        group.query = None
        planned = self.activation is None and query.epoch == self.newest.base  # its own entry brings it there
        stands = query.epoch >= self.newest.epoch or planned
        return self._send(group, m.Stands(query.epoch)) if stands else []

    def _welcome(self, group: Group) -> list[Action]:
        """Asks for its obedience to this term; again after the term has risen."""
        if group.connection is None or group.welcomed == self.term:
            return []
        group.welcomed = self.term
        assert group.hello is not None
        patience = self.bounds.patience(group.hello.groups)
        welcome = m.Welcome(self.term, round(patience.lease_s * 1000), round(patience.beat_s * 1000))
        return [Send(group.connection, welcome)]

    def _welcome_anew(self) -> list[Action]:
        """Another job, or another manager of this one, has made the term rise."""
        actions: list[Action] = []
        if self.told_term == self.term:
            return actions
        self.told_term = self.term
        for group in self.groups.values():
            if group.in_touch and group.welcomed is not None:
                actions += self._welcome(group)
        return actions

    # ------------------------------------------------------------ a standby

    def _sends_on(self, hello: m.Hello, now: float) -> str:
        """Why a manager that has other addresses is to try those; empty if it is taken in."""
        member = self._needs(hello)
        if not hello.place or self.stopped is not None:
            return ""
        if self.reigns and self.newest is not None and (member or any(g.in_touch for g in self._members())):
            return ""
        if hello.role == RESERVE and not member:
            return f"standby: no job runs here that {hello.group} could be a reserve of"
        self.visits[hello.group] = (hello.incarnation, now)
        while len(self.visits) > VISITS_MAX:
            self.visits.pop(next(iter(self.visits)))
        missing = self._uncalled(now) if member else self._too_few(hello, now)
        if missing:
            self.called_s = None
            what = "takes over" if self.newest is not None else "it knows no such job, and begins one"
            return f"standby: {what} once it has heard {missing}"
        self.called_s = now if self.called_s is None else self.called_s
        if now - self.called_s < (hello.place - 1) * self.bounds.lease_s:
            return "standby: all have called; those before it in the list of addresses have a lease each"
        return ""

    def is_nothing(self, now: float) -> bool:
        """Whether nobody is in touch or called lately, and no epoch is in force or was ever promised."""
        if self.newest is not None or self.highest > 0 or any(group.in_touch for group in self.groups.values()):
            return False
        return not any(self._called(name, now) for name in self.visits)

    def _uncalled(self, now: float) -> str:
        """Members that have neither called here lately nor are known to be fenced."""
        return ", ".join(name for name in self._unanswered() if not self._called(name, now))

    def _too_few(self, hello: m.Hello, now: float) -> str:
        """A group that is no member comes in where the job is; where there is none, all must have called."""
        names = {hello.group, *self.visits, *self.groups}
        missing = hello.groups - sum(self._called(name, now) for name in names)
        return f"{missing} more group{'s' if missing > 1 else ''}" if missing > 0 else ""

    def _send_members_on(self, now: float) -> list[Action]:
        """A take-over, or a first epoch, that does not come about: who is missing may be elsewhere."""
        if self.newest is None:
            what, missing, first = "begins", self._missing_to_begin(now), 2  # the first of the list keeps those it has
        else:
            what, missing, first = "takes over", "" if self.reigns else self._uncalled(now), 1
        if not missing:
            return []
        actions: list[Action] = []
        for group in self.groups.values():
            if group.in_touch and group.hello is not None and group.hello.place >= first:
                assert group.connection is not None
                refused = m.Refused(f"standby: {what} once it has heard {missing}", retry=True)
                actions += [Send(group.connection, refused), Close(group.connection)]
                group.hangs_up()
                group.hears(now)
        return actions

    def _missing_to_begin(self, now: float) -> str:
        """Who has not come for so long that those here had better look for them; empty if all are here or may come."""
        here = [g.joined_s for g in self.groups.values() if g.in_touch and g.join is not None and counts(g)]
        if self.config is None or not here or len(here) >= self.config.groups:
            return ""
        waited = now - max(here) > self.bounds.lease_s + CALLS_S
        return f"{self.config.groups - len(here)} more groups" if waited else ""

    # ------------------------------------------------------------ who is gone for good

    def _is_over(self, hello: m.Hello) -> bool:
        """Whether it comes from a job that has ended since, before its last step."""
        if hello.known is None or self.broken_off is None or self.stopped is not None:
            return False
        return hello.known.epoch <= self.broken_off

    def _left_out(self, hello: m.Hello) -> bool:
        """Whether it was a member, and another lighthouse has gone on without it."""
        if self.newest is None or hello.known is None or hello.known.epoch >= self.newest.epoch:
            return False
        if not self.reigns and self.shown != self.newest.epoch:
            return False  # what this log says may have been overtaken before anybody was told
        was = hello.known.slot_of(hello.group, hello.incarnation)
        left_out = was is not None and self.newest.slot_of(hello.group, hello.incarnation) is None
        return left_out and not self._leaves(hello)

    def _leaves(self, hello: m.Hello) -> bool:
        """Whether a planned change has it leave, in good order: it needs no more than its peers' last reduce."""
        newest, known = self.newest, hello.known
        if newest is None or known is None or newest.slot_of(hello.group, hello.incarnation) is not None:
            return False
        left = known.slot_of(hello.group, hello.incarnation) is None
        return left or any(planned.epoch == newest.epoch for planned in hello.prepared)

    def _fence(self, group: Group, reason: str) -> list[Action]:
        self._remember_fenced(group.incarnation, reason)
        note = Note("fenced", {"group": group.name, "incarnation": group.incarnation, "reason": reason})
        group.gone = group.gone or Gone(reason, "fenced")
        return [note, *self._send(group, m.Fence(reason))]

    def _is_fenced(self, incarnation: str) -> bool:
        """Whether it is left out for good: by the word of who knows, or by an epoch that stands."""
        if incarnation in self.dead:
            return True
        stands = self.reigns or (self.newest is not None and self.shown == self.newest.epoch)
        return stands and incarnation in self.fenced

    def _stands_left_out(self, hello: m.Hello) -> bool:
        """The same for who comes: by what it has acknowledged, another lighthouse may have taken over."""
        taken = hello.acknowledged is not None and hello.acknowledged.lighthouse != self.term.lighthouse
        shown = self.newest is None or self.shown == self.newest.epoch
        return self._is_fenced(hello.incarnation) and (shown or not taken or hello.incarnation in self.dead)

    def _remember_fenced(self, incarnation: str, reason: str) -> None:
        _keep(self.fenced, incarnation, reason)

    def _remember_word(self, incarnation: str, reason: str, epoch: int | None = None) -> None:
        """Its own word that it is dead outlives its place here: its peers' last words may name it a member yet."""
        _keep(self.dead, incarnation, Death(reason, self._ticked_s, epoch))

    def _remember_dead(self, incarnation: str, reason: str, epoch: int | None = None) -> None:
        self._remember_word(incarnation, reason, epoch)
        _keep(self.fenced, incarnation, reason)

    def _void_words(self, newer: Membership) -> list[Action]:
        """Sets aside the operator's word for members of an epoch that was not known here when it was given.

        The epoch was formed with them, by a lighthouse that had them in touch. If an epoch was formed here on the
        strength of the word, the word stands: what is met now is the other history of which the operator was warned.
        """
        return [action for member in newer.members for action in self._void_word(newer, member)]

    def _void_own_word(self, hello: m.Hello) -> list[Action]:
        """The same for who comes and is itself such a member: before it is fenced for the word."""
        slot = None if hello.known is None else hello.known.slot_of(hello.group, hello.incarnation)
        if slot is None or hello.known is None or hello.died is not None:
            return []
        return self._void_word(hello.known, hello.known.members[slot])

    def _void_word(self, newer: Membership, member: Member) -> list[Action]:
        death = self.dead.get(member.incarnation)
        if death is None or death.epoch is None or newer.epoch.number <= death.epoch:
            return []
        if self.newest is not None and self.newest.epoch.number > death.epoch:
            return []
        del self.dead[member.incarnation]
        self.fenced.pop(member.incarnation, None)
        group = self.groups.get(member.group)
        if group is not None and group.incarnation == member.incarnation and group.gone is not None:
            group.gone = None if group.gone.detected_by == "operator" else group.gone
        fields = {"group": member.group, "incarnation": member.incarnation, "epoch": newer.epoch}
        return [Note("operator_word_void", fields)]

    def _newest_heard_of(self) -> int:
        """Number of the newest epoch that was formed by all that is known here, 0 if there is none."""
        newest = [self.newest] if self.newest is not None else []
        return max((it.epoch.number for it in (*newest, *self.prepared, *self.foreign)), default=0)

    def _somebody_calls(self, incarnation: str, now: float) -> bool:
        """Whether a process of the job, other than this incarnation, is in touch or has called lately."""
        if any(group.in_touch and group.incarnation != incarnation for group in self.groups.values()):
            return True
        return any(self._called(name, now) for name, visit in self.visits.items() if visit[0] != incarnation)

    def _send(self, group: Group, message: m.ToManager) -> list[Action]:
        return [] if group.connection is None else [Send(group.connection, message)]

    def _lives(self, group: Group, now: float) -> float | None:
        """Seconds since a group was heard that may well be alive, else None."""
        visit = self.visits.get(group.name)
        visited_s = visit[1] if visit is not None and visit[0] == group.incarnation else -1.0
        silent_s = now - max(group.heard, visited_s)
        fresh = group.gone is None and (group.connection is not None or silent_s <= self.bounds.lease_s)
        return silent_s if fresh and group.incarnation not in self.fenced else None


def _keep(reasons: dict[str, Any], incarnation: str, reason: Any) -> None:
    reasons[incarnation] = reason
    while len(reasons) > FENCED_KEPT_MAX:
        reasons.pop(next(iter(reasons)))
