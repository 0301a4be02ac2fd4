"""How a job's membership changes: by recoveries, and by planned changes.

`_consider` is called after every event and does whatever the state asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Activated, Close, Note, Promised
from lightkeeper.lighthouse.endings import LAGS, Endings
from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.names import Epoch, Member, Membership, speeds_in
from lightkeeper.lighthouse.recovery import (
    Conclusion,
    Contradiction,
    Recovery,
    conclude,
    most_blamed,
    newest_known,
    of_one_history,
    unheard,
)
from lightkeeper.lighthouse.silence import Look
from lightkeeper.lighthouse.speeds import changed, why

RECOVERIES_MAX = 3
DEAL_S = 0.25
WHY_CHARS_MAX = 200


class Changes(Endings):
    """A job that changes by recoveries and planned changes."""

    # ------------------------------------------------------------ what follows from the state

    def _consider(self, now: float) -> list[Action]:
        """After every event: begins, restarts or concludes a recovery, or prepares a planned change."""
        actions: list[Action] = []
        if self.stopped is not None:
            return self._end(now)
        actions += self._let_strangers_go() + self._take_over() + self._judge(now)
        cause = self._cause(now)
        if self.recovery is None and cause is None:
            return actions + self._park(now) + self._heal(now) + self._plan(now)
        if self.newest is None and not self._may_start(now):
            self.recovery = None  # a group went away before the first epoch: wait for all again
            return actions
        asked = frozenset(g.name for g in self._participants())
        if not asked or not (self.newest is None or self._may_live()):  # followers cannot speak for who is gone
            ended = self._nobody_left()
            if ended or not asked:
                return actions + ended
        if self.recovery is None or asked != self.recovery.asked or self.recovery.epoch.term != self.term:
            actions += self._ask(asked, cause or (self.recovery.cause if self.recovery else ""), now)
        assert self.recovery is not None
        if self.recovery.complete:
            actions += self._activate(now)
        if self.recovery is not None and self.stopped is None:
            actions += self._park(now)
            if self.recovery.complete:  # it stands, below the minimum
                actions += self._heal(now)
        return actions

    def _judge(self, now: float) -> list[Action]:
        """Who is gone, and who is asked for a sign of life, by a lighthouse that reigns: others may have them."""
        actions: list[Action] = []
        if self.newest is None:
            actions += self._judge_waiting(now)
        if not self.reigns:
            return actions
        members, waited = self._members(), None if self.recovery is None else self.recovery.missing
        look = Look(members, waited, self.patience, now)
        if look.nobody_waits:
            return actions
        for group in members:
            if group.gone is None and (gone := look.verdict(group)) is not None:
                group.gone = gone
                actions.append(self._lost_note(group))
                look = Look(members, waited, self.patience, now)  # there is one less to wait
        for group in look.to_ask():
            group.asked(now)
            actions += self._send(group, m.Ask())
        return actions

    def _judge_waiting(self, now: float) -> list[Action]:
        """Who waits for the first epoch and falls silent is not counted on; if it lives it comes on another stream."""
        actions: list[Action] = []
        for group in self._joined():
            silent_s = now - group.heard
            if group.connection is not None and silent_s > self.patience.away_s:
                group.gone = Gone(f"silent for {silent_s:.1f} s before it was a member", "lease")
                actions.append(Close(group.connection))
                group.hangs_up()
        return actions

    # ------------------------------------------------------------ recovery

    def _ask(self, asked: frozenset[str], cause: str, now: float) -> list[Action]:
        self.highest += 1
        first, since = self.recovery is None, now if self.recovery is None else self.recovery.since
        epoch = Epoch(self.highest, self.term)
        self.recovery = Recovery(epoch, cause, since, asked)
        self._said_s = now  # nothing of it is repeated yet, and nobody is complained of
        base = None if self.newest is None else self.newest.epoch
        actions: list[Action] = [Promised(self.highest)]
        actions.append(
            Note(
                "prepared",
                {"epoch": epoch, "base": base, "members": sorted(asked), "change": "recovery", "why": cause},
            )
        )
        for name in sorted(asked):
            actions += self._send(self.groups[name], m.Prepare(epoch, base))
        return actions + (self._last_phases(now) if first else [])

    def _activate(self, now: float) -> list[Action]:
        assert self.recovery is not None
        recovery, promises = self.recovery, self.recovery.promises
        top = newest_known(self.newest, promises)
        if top is not None and (self.newest is None or top.epoch != self.newest.epoch):
            mine = [planned for planned in self.prepared if planned.epoch == top.epoch]
            learnt = self._planned_is_in_force(mine[0]) if mine else self._learn_newest(top)
            return learnt + self._consider(now)
        if unheard(self.newest, promises) is not None or not self._may_leave_out():
            return []
        if any(group.gone is None and group.name not in recovery.asked for group in self._members()):
            return []  # silent, but not yet long enough to be left out
        candidates = self._candidates()
        if self.newest is None:
            joined = {name: join.fingerprint for name in candidates if (join := self.groups[name].join) is not None}
            candidates = of_one_history(candidates, promises, joined)
        assert self.config is not None
        try:
            concluded = conclude(candidates, promises, self._speeds)
        except Contradiction as error:
            return self._stop(f"the job contradicts itself and must not go on: {error}", ok=False)
        starts = self.newest is None and len(self._joined()) >= self.config.minimum  # the others heal from these
        if len(concluded.members) < self.config.minimum and not starts:
            return self._stand_below_minimum(recovery.asked, concluded, now)
        members = tuple(self.groups[name].member() for name in concluded.members)
        base = None if self.newest is None else self.newest.epoch
        membership = Membership(recovery.epoch, members, base, speeds_in(self._speeds(concluded.members)))
        self.activation = m.Activate(
            membership,
            concluded.first_step,
            concluded.total,
            concluded.shares,
            concluded.donors,
            concluded.entry,
            self._why_without(concluded.members) or recovery.cause,
        )
        left_out = [group for group in self._members() if group.name not in concluded.members]
        promotions = self._promotions(membership, concluded.first_step)
        self.newest, self.prepared, self.recovery, self.reigns = membership, [], None, True
        self.unbuilt_s, self.unbuilt_times, self.shrunk, self.stood_s = None, 0, False, None
        self._said_s = now
        actions: list[Action] = [Activated(membership), self._activated_note(), *promotions]
        actions += self._repeat_activation()
        for group in left_out:
            if group.gone is None and group.beat is not None and group.beat.epoch == 0:
                continue  # it was taken in and had not switched yet: it follows on as a joiner
            if group.gone is not None and group.gone.late:
                continue  # it has ended, as it was asked to
            actions += self._fence(group, group.gone.cause if group.gone else LAGS)
        for group in self.groups.values():
            group.failed = None
        if base is None:  # who joins is told at once: members may make many steps until the next tick
            return actions + self._park(now) + self._heal(now)
        return actions + self._count_recovery()

    def _stand_below_minimum(self, asked: frozenset[str], concluded: Conclusion, now: float) -> list[Action]:
        """The recovery waits for more groups, without those who asked to leave.

        If all of them have, the job ends; and if nobody comes for as long as the groups would bear it.
        """
        self.stood_s = now if self.stood_s is None else self.stood_s
        if all(group.leaving or group.gone is not None for group in self._members()) and self.newest is not None:
            return self._stop_as_asked()
        let_go = self._let_go_below_minimum(asked)
        return let_go + self._consider(now) if let_go else self._give_up_below_minimum(concluded, now)

    def _count_recovery(self) -> list[Action]:
        """Three recoveries in a row without a commit: leave out whom most failures name, then stop.

        Also if too few would be left: they would wait for somebody who can only fail again.
        """
        self.recoveries_without_commit += 1
        if self.recoveries_without_commit <= RECOVERIES_MAX or self.newest is None:
            return []
        blamed = most_blamed(self.suspects, self.own_failures, self.newest.groups, RECOVERIES_MAX)
        fewest = 1 if self.config is None else max(1, self.config.minimum)
        if blamed is None or len(self.newest.groups) <= fewest:
            return self._stop(
                f"{RECOVERIES_MAX} recoveries in a row without a commit; first cause: {self.first_failure}",
                ok=False,
            )
        group = self.groups[blamed]
        how = "alone the cause of" if blamed in self.own_failures else "named by most of"
        group.gone = Gone(
            f"{how} {RECOVERIES_MAX} failed recoveries; first cause: {self.first_failure}",
            "failures",
        )
        self.recoveries_without_commit = 0
        self.suspects.clear()
        self.own_failures.clear()
        return [self._lost_note(group), *self._fence(group, group.gone.cause), *self._consider(self._ticked_s)]

    # ------------------------------------------------------------ planned changes

    def _plan(self, now: float) -> list[Action]:
        """Prepares the newest epoch without those who asked to leave, and with the joiners that have caught up.

        The entry carries the epoch's number alone: so only who reigns, and has all members here, gives numbers out.
        Else a joiner here would take another lighthouse's change of the same number for this one.
        """
        if self.newest is None or not self.reigns or not all(self._here(member) for member in self.newest.members):
            return []
        leavers = self._leavers()
        waits = self._soon(now) and not leavers and not self.prepared
        joiners = [] if waits else self._ready_joiners(now)
        if not leavers and not joiners and not self.prepared:
            return []
        if leavers == set(self.newest.groups):
            if not self._joiners(now) and not self._may_have_switched():
                return self._stop_as_asked()
            leavers.discard(self.newest.groups[0])  # one hands the state on, to those that nobody asked to leave
        staying = tuple(member for member in self.newest.members if member.group not in leavers)
        members = staying + tuple(group.member() for group in sorted(joiners, key=lambda group: group.name))
        latest = self._planned()
        anew = self.unbuilt_s is not None and now >= self.unbuilt_s
        replaces = latest is not None and self._replaces(latest, leavers, joiners)
        if latest is not None and not anew and (latest.members == members or not replaces):
            return []
        if members == self.newest.members and (latest is None or anew):
            return []
        speeds = speeds_in(self._speeds([member.group for member in members]))
        reasons = [f"{name} leaves" for name in sorted(leavers)] + [f"{g.name} joins" for g in joiners]
        return self._prepare_change(members, speeds, "; ".join(reasons), joiners)

    def _plan_shares(self, now: float) -> list[Action]:
        """Nobody comes or goes: other shares for the same members, if a step would end clearly sooner by them.

        It follows no event, but time: a look at the speeds of all costs a deal, and is never urgent.
        """
        if now - self._dealt_s < max(DEAL_S, self.patience.beat_s):
            return []
        self._dealt_s = now
        actions = self._mind_slow(now)
        speeds = None if self._ready_joiners(now) else self._new_speeds()
        if speeds is None:
            return actions
        assert self.newest is not None
        self._quiet = False
        reason = why(self.newest, speeds)
        actions += self._prepare_change(self.newest.members, speeds, reason, ())
        self.reasons = {self.prepared[-1].epoch: reason}
        return actions

    def _prepare_change(
        self, members: tuple[Member, ...], speeds: tuple[int, ...], reason: str, joiners: Sequence[Group]
    ) -> list[Action]:
        assert self.newest is not None
        self.highest, self.unbuilt_s = self.highest + 1, None
        planned = Membership(Epoch(self.highest, self.term), members, self.newest.epoch, speeds)
        self.prepared.append(planned)
        prepare = m.Prepare(planned.epoch, self.newest.epoch, planned, self._why_leavers_leave(planned))
        note = {
            "epoch": planned.epoch,
            "base": self.newest.epoch,
            "members": list(planned.groups),
            "change": "planned",
            "why": reason,
        }
        actions: list[Action] = [Promised(self.highest, planned), Note("prepared", note)]
        for group in [*self._members(), *joiners]:
            actions += self._send(group, prepare)
        return actions

    def _why_leavers_leave(self, planned: Membership) -> str:
        """One reason for all, or each one's."""
        leavers = [group for group in self._members() if group.leaving and planned.slot_of(group.name) is None]
        reasons = {group.leaving for group in leavers}
        told = reasons if len(reasons) == 1 else [f"{group.name}: {group.leaving}" for group in leavers]
        return "; ".join(told)[:WHY_CHARS_MAX]

    def _replaces(self, latest: Membership, leavers: set[str], joiners: Sequence[Group]) -> bool:
        """Whether a planned change under way is worth replacing: it keeps a leaver or a joiner that goes, or it has
        nobody come or go, and now somebody does.
        """
        assert self.newest is not None
        if joiners and latest.members == self.newest.members:
            return True
        gone = [
            member.group
            for member in latest.members
            if self.newest.slot_of(member.group, member.incarnation) is None
            and (not self._here(member) or self.groups[member.group].leaving)
        ]
        return bool(leavers & set(latest.groups)) or bool(gone)

    def _here(self, member: Member) -> bool:
        group = self.groups.get(member.group)
        return group is not None and group.in_touch and group.incarnation == member.incarnation

    def _planned_is_in_force(self, planned: Membership) -> list[Action]:
        """A member shows that the entries have activated this planned epoch."""
        first_step = self._first_step_now()
        promotions = self._promotions(planned, first_step)
        old, self.newest, self.prepared, self.shown = self.newest, planned, [], planned.epoch
        self.activation, self.unbuilt_s, self.unbuilt_times = None, None, 0
        cause, self.reasons = self.reasons.get(planned.epoch, "planned"), {}
        if old is not None:
            self.planned_s = self.planned_s if planned.members == old.members else self._ticked_s
            self.shrunk = len(planned.members) < len(old.members)
            came = [g for g in (self.groups.get(m.group) for m in planned.members) if g and g.name not in old.groups]
            self.heal_s = max((self._ticked_s - group.joined_s for group in came), default=self.heal_s)
            if changed(old, planned):
                self.dealer.in_force()
        for member in old.members if old else ():
            group = self.groups.get(member.group)
            if group is not None and group.incarnation == member.incarnation and self._member(group.name) is None:
                self._has_left(group)
        actions = self._take_in()
        note = Note(
            "activated",
            {
                "epoch": planned.epoch,
                "members": list(planned.groups),
                "first_step": first_step,
                "cause": cause,
                "spares": list(planned.spares),
            },
        )
        return [Activated(planned), note, *promotions, *actions]

    # ------------------------------------------------------------ words

    def _repeat_activation(self) -> list[Action]:
        actions: list[Action] = []
        if self.activation is not None and self.recovery is None and self.newest == self.activation.membership:
            for group in self._members():
                if group.beat is None or group.beat.epoch < self.newest.epoch.number:
                    actions += self._send(group, self.activation)
        return actions

    def _activated_note(self) -> Note:
        assert self.activation is not None
        act = self.activation
        shares = {share.group: list(share.microbatches) for share in act.shares}
        return Note(
            "activated",
            {
                "epoch": act.membership.epoch,
                "members": list(act.membership.groups),
                "first_step": act.first_step,
                "shares": shares,
                "cause": act.cause,
                "spares": list(act.membership.spares),
            },
        )

    def _promotions(self, membership: Membership, step: int) -> list[Action]:
        """Who is a spare in the newest epoch, and works in this one."""
        benched = self.newest.spares if self.newest is not None else ()
        working = [one for one in membership.members if one.group in benched and one.group not in membership.spares]
        about = {"epoch": membership.epoch, "step": step}
        return [Note("promoted", {"group": one.group, "incarnation": one.incarnation, **about}) for one in working]
