"""How a group that is not a member yet comes in, and what members copy for it.

A joiner's ranks take the members' state, vote "healed", apply entry after entry, and vote "followed" on each. The entry
that activates a planned epoch makes the group a member, and so does a recovery that names it.
"""

from __future__ import annotations

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import Action, Tell, ToRanks
from lightkeeper.manager.ends import Ends
from lightkeeper.manager.plans import change_in_words, plan_for


class Joins(Ends):
    """A group that comes in, and lets others in."""

    # ------------------------------------------------------------ a planned change

    def _prepare_planned(self, planned: Membership) -> list[Action]:
        latest = self.prepared[-1].epoch.number if self.prepared else 0
        if planned.epoch.number <= max(self.promised, latest):
            return []
        if any(planned.base == prepared.epoch for prepared in self.prepared):
            self.deferred = planned  # its base is in force for others already, and here with the next entry
            return []
        if not self.following and (self.known is None or planned.base != self.known.epoch):
            return []
        self.prepared.append(planned)
        self.built = set()
        if planned.slot_of(self.settings.group, self.incarnation) is None:
            self.built = set(range(self.settings.ranks))  # who leaves has nothing to build
            return []
        return [ToRanks(local.Build(plan=plan_for(planned, self.settings.group, -1, (), 0, planned=True)))]

    def _switch(self, activates: int) -> list[Action]:
        """A planned epoch comes into force by the entry; what was prepared on it meanwhile is taken up."""
        if not activates:
            return []
        (planned,) = [p for p in self.prepared if p.epoch.number == activates]  # all members had built it
        actions: list[Action] = []
        if self.known is not None:
            self.joiners = frozenset(planned.groups) - frozenset(self.known.groups)
            actions = self._say_change(self.known, planned)
        self.why_planned = {number: why for number, why in self.why_planned.items() if number > activates}
        self.known, self.prepared, self.built, self.activation = planned, [], set(), None
        self.promised = max(self.promised, activates)
        self.following = False
        deferred, self.deferred = self.deferred, None
        return actions if deferred is None else actions + self._prepare_planned(deferred)

    def _say_change(self, known: Membership, planned: Membership) -> list[Action]:
        """A line in the logs of those who stay, if somebody came, left or was promoted by the entry."""
        if planned.slot_of(self.settings.group, self.incarnation) is None:
            return []  # it says so itself
        line = change_in_words(known, planned, self.step, self.why_planned.get(planned.epoch.number, ""))
        return [ToRanks(local.Say(line=line), 0)] if line else []

    # ------------------------------------------------------------ a joiner

    def _heal(self, heal: m.Heal, now: float) -> list[Action]:
        if self.following and not self.lost:
            return []  # from an earlier lighthouse's word: it has a state, and goes on from it
        self.source, self.lost_why, self.parked = heal, "", False
        self.votes.clear()
        donors = ", ".join(member.group for member in heal.donors)
        why = f"{heal.why}: it takes theirs" if heal.why else "joining"
        line = f"{why}; the state before step {heal.step} comes from {donors}"
        actions: list[Action] = [ToRanks(local.Say(line=line), 0)]
        actions += [ToRanks(local.Instead(source=self._source_for(rank)), rank) for rank in sorted(self.fetching)]
        return actions + self._heal_answers()

    def _heal_answers(self) -> list[Action]:
        return self._answer_waiting(self._heal_answer)

    def _joiner_votes(self, rank: int, vote: local.Vote) -> list[Action]:
        """A rank of a group that is no member yet has healed, or applied an entry, or cannot go on."""
        if self.known is not None and vote.epoch < self.known.epoch.number:
            return self._answer_waiting(self._recover)  # it was named in a recovery
        if vote.outcome == "lost":
            self.source, self.following, self.lost = None, False, True
            self.torn, self.lost_why = self.torn or vote.torn, vote.error
            return [Tell(m.Lost(vote.error))]
        if self.lost and vote.outcome != "healed":
            return self._answer_waiting(self._heal_answer)  # another rank needs a fresh copy: all of them take it
        self.votes[rank] = vote
        self.torn = self.torn or vote.outcome == "healed"  # until all ranks have the same state
        if len(self.votes) < self.settings.ranks:
            return []
        if len({(v.step, v.entry) for v in self.votes.values()}) > 1:
            return self._catch_up()
        self.lost, self.torn, self.lost_why = False, False, ""
        return self._follow(self.votes[0])

    def _catch_up(self) -> list[Action]:
        """Ranks that took the copy of an earlier boundary, or found no entry where others did, follow by themselves."""
        lowest, highest = (pick(vote.step for vote in self.votes.values()) for pick in (min, max))
        if lowest == highest:
            self.votes.clear()
            self.source, self.following, self.lost = None, False, True
            self.lost_why = f"its ranks have come to step {lowest} by different entries"
            return [Tell(m.Lost(self.lost_why))]
        self.lost = False  # all have a state, if not one and the same
        behind = [rank for rank, vote in self.votes.items() if vote.step == lowest]
        for rank in behind:
            del self.votes[rank]
        answer = local.Answer(verdict="go", epoch=0, step=lowest)
        return self._answer_waiting(lambda rank: answer if rank in behind else None)

    def _follow(self, vote: local.Vote) -> list[Action]:
        actions: list[Action] = []
        if vote.outcome in ("healed", "followed"):
            assert vote.entry is not None or vote.step == 0
            self.last, self.healed = None, True
            if vote.entry is not None:
                number, term, lighthouse = vote.entry
                self.last = Entry(Epoch(number, Term(term, lighthouse)), vote.step - 1)
            self.step, self.total, self.share, self.following = vote.step, vote.next_total, (), True
            standing = [p.epoch.number for p in self.prepared if p.epoch.number > self.promised]
            if vote.activates in standing:
                actions = self._switch(vote.activates)
        number = 0 if self.known is None else self.known.epoch.number
        answer = local.Answer(verdict="go", epoch=number, step=self.step)
        self.votes.clear()
        return actions + self._answer_waiting(lambda rank: answer)

    # ------------------------------------------------------------ a member, for joiners

    def _copy(self, copy: m.Copy, now: float) -> list[Action]:
        """Copies for joiners: at a boundary ahead, or now if the ranks stand at it; `RELEASE` ends it."""
        if copy.step == m.RELEASE:
            self.copy_at = None
            return [ToRanks(local.Release())]
        self.copy_at = copy.step
        if copy.step > self.step:
            return [ToRanks(local.Touch())]
        return self._copy_if_standing()

    def _copy_if_standing(self) -> list[Action]:
        """All ranks stand at the boundary that was named: they copy, and go on standing."""
        if self.copy_at != self.step or set(self.waiting) != set(range(self.settings.ranks)):
            return []
        self.copy_at = None
        return [ToRanks(local.Answer(verdict="copy", step=self.step))]
