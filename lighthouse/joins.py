"""How a group that is not a member comes in: it heals from the members, follows their entries, and is switched in.

A train does not stop for a passenger: somebody runs alongside until the speeds are equal, and steps over. Members copy
their state at a boundary named ahead and go on; the joiner fetches the copy, applies the entries that came after it,
and once it lags by at most one step the next planned epoch has it as a member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Note
from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.job import DEATHS_MAX
from lightkeeper.lighthouse.takeover import TakeOver

AHEAD_S = 0.5
AHEAD_STEPS_MIN = 2
FLAPPING_WINDOW_S = 600.0
BEFORE = -1  # a boundary that an earlier lighthouse named
AGAIN_S = 0.1  # after a first heal that failed
BACKOFF_S = 5.0
BACKOFF_S_MAX = 120.0


class Joins(TakeOver):
    """A job that takes groups in."""

    def _heal(self, now: float) -> list[Action]:
        """Tells joiners where to heal from, and members what to copy for them."""
        if self.newest is None:
            return []
        joiners = self._joiners(now)
        if not joiners and not self._waits_to_join(now):
            return self._release()
        self._name_anew(joiners)
        asking = [group for group in joiners if group.healing is None]
        if not asking or not any(group.in_touch for group in self._members()):
            return []
        actions: list[Action] = []
        if self.copied in (None, BEFORE):
            if (boundary := self._boundary()) is None:
                return []
            self.copied = boundary
            for group in self._members():
                actions += self._send(group, m.Copy(self.newest.epoch, self.copied))
        first = next((g for g in self._members() if g.join is not None), None)
        donors = tuple(group.member() for group in self._members() if group.in_touch and group.join is not None)
        for group in asking:
            group.healing = self.copied
            group.tries += 1
            why = "" if first is None else _unlike(group, first)
            fields = {
                "group": group.name,
                "incarnation": group.incarnation,
                "step": self.copied,
                "attempt": group.tries,
            }
            actions += [Note("healing", fields), *self._send(group, m.Heal(self.copied, donors, why))]
        return actions

    def _park(self, now: float) -> list[Action]:
        """Tells groups that are no members that the job runs, and whether it has a use for them now."""
        if self.newest is None or not (outside := self._outside()):
            return []
        seated = {group.name for group in self._seated(now)}
        actions: list[Action] = []
        for group in outside:
            parked = group.name not in seated
            if parked == group.parked:
                continue
            group.parked, why = parked, self._parked_why(len(seated)) if parked else ""
            if parked:
                fields = {"group": group.name, "incarnation": group.incarnation, "why": why}
                actions.append(Note("parked", fields))
            actions += self._send(group, m.Outside(self.newest, why))
        return actions

    def _waits_to_join(self, now: float) -> bool:
        """Whether somebody still needs the entries: a joiner held back, one that an earlier lighthouse healed and that
        has yet to say so again, or one taken in that has yet to switch.
        """
        number = 0 if self.newest is None else self.newest.epoch.number
        behind = [g for g in self._members() if g.gone is None and (g.beat is None or g.beat.epoch < number)]
        healed = [g for g in self.groups.values() if g.in_touch and g.healing is not None]
        return bool(behind or self._seated(now)) or any(self._member(g.name) is None for g in healed)

    def _name_anew(self, joiners: Sequence[Group]) -> None:
        """A boundary ahead is never reached if the members stand before it, below the minimum."""
        stands = None if self.recovery is None else self._boundary()
        if stands is None or self.copied in (None, BEFORE) or self.copied <= stands:
            return
        for group in joiners:
            if group.healing == self.copied and not group.follows:
                group.healing = None
        self.copied = None

    def _boundary(self) -> int | None:
        """A boundary that no member has passed when the word reaches it; now, if all of them stand.

        None while a member in touch has yet to say, since its stream stands, how far it is: it will within a beat.
        """
        if self.recovery is not None:
            return 1 + max((p.last.step for p in self.recovery.promises.values() if p.last is not None), default=-1)
        members = self._members()
        if any(group.in_touch and group.beat is None for group in members):
            return None
        highest = self._first_step_now()
        pace_s = min((group.pace_s for group in members if group.pace_s > 0), default=AHEAD_S)
        return highest + max(AHEAD_STEPS_MIN, 1 + math.ceil(AHEAD_S / pace_s))

    def _release(self) -> list[Action]:
        """Nobody needs the copy any more."""
        if self.copied is None:
            return []
        self.copied = None
        assert self.newest is not None
        actions: list[Action] = []
        for group in self._members():
            actions += self._send(group, m.Copy(self.newest.epoch, m.RELEASE))
        return actions

    def _joiners(self, now: float) -> Sequence[Group]:
        """Groups that have joined and are to be members, less those held back."""
        if self.newest is None:
            return []
        return [group for group in self._seated(now) if now >= group.admit_s]

    def _ready_joiners(self, now: float) -> list[Group]:
        """Joiners that had to wait for the newest entry: they lag by at most one step."""
        return [group for group in self._joiners(now) if group.follows]

    def _soon(self, now: float) -> bool:
        """Whether the last planned change is so recent that who is ready to join waits for others that soon are."""
        return self.planned_s is not None and now - self.planned_s < self.bounds.admit_interval_s

    def _hold_back(self, group: Group, former: Group | None, now: float) -> None:
        """A group that died twice within ten minutes is admitted after a growing back-off."""
        if former is None:
            return
        died = (now,) if former.gone is not None and former.gone.detected_by != "left" else ()
        group.deaths = (*(t for t in former.deaths if now - t < FLAPPING_WINDOW_S), *died)
        if len(group.deaths) >= DEATHS_MAX:
            group.admit_s = now + min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (len(group.deaths) - DEATHS_MAX))

    def _say_held_back(self, group: Group, now: float) -> list[Action]:
        held_s = group.admit_s - now
        if held_s <= 0:
            return []
        minutes = FLAPPING_WINDOW_S / 60
        why = f"lost {len(group.deaths)} times within {minutes:.0f} minutes: held back for {held_s:.0f} s"
        return self._send(group, m.Waiting((group.name,), why, 0))


def _unlike(group: Group, other: Group) -> str:
    """How the states differ with which both were started, in words; empty if they do not."""
    if group.join is None or other.join is None or group.join.fingerprint == other.join.fingerprint:
        return ""
    if group.join.step != other.join.step:
        return f"{group.name} comes with the state before step {group.join.step}"
    return f"{group.name} comes with another state than {other.name}"
