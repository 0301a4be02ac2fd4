"""A group while no lighthouse is in touch: what it asks the other members, what it says, and when it gives up.

Without a lighthouse nobody is left out. So who stands asks the only ones that can know anything, the other members'
managers: whether the epoch still stands, if it slept itself; and who of them does not answer, if it is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager import local
from lightkeeper.manager.actions import Action, AskMembers, Tell, ToRanks
from lightkeeper.manager.answers import SAY_AFTER_S
from lightkeeper.manager.standing import Word, doubts
from lightkeeper.manager.votes import Votes

ASK_MEMBERS_S = 1.0  # the lighthouse is asked first, and the members as often while there is no answer
NAMED_MAX = 8


class Outages(Votes):
    """A group that may be without a lighthouse."""

    def _mind_clock(self, now: float) -> list[Action]:
        """A gap longer than the lease in this process's own clock: it was frozen, and may have been left out."""
        gap_s, self._clock = now - self._clock, now
        if gap_s <= self.lease_s or self.known is None or self.suspended:
            return []
        self.suspended, self._slept_s, self._doubtful = True, gap_s, ""
        self._ask_members_s = now + ASK_MEMBERS_S
        return [Tell(m.Query(self.known.epoch))]

    def _ask_members(self, now: float) -> list[Action]:
        """No lighthouse has said whether the epoch stands, or who is awaited: perhaps the other members can."""
        if self.known is None or (self.in_touch and not self.suspended):
            return []
        stands_s = self._stands_in_reduce_s()
        if stands_s <= SAY_AFTER_S:
            self._reduce_told_s = SAY_AFTER_S
        if self._unheard[0] != self.step:
            self._unheard = (self.step, "")
        asks = not self.in_touch and stands_s > self._reduce_told_s
        if asks:
            budget_s = self.settings.outage_budget_s
            self._reduce_told_s = min(2 * stands_s, budget_s) if stands_s < budget_s else stands_s + ASK_MEMBERS_S
            self._tell_who_answers = True
        if self.suspended and now >= self._ask_members_s:
            self._ask_members_s, asks = now + ASK_MEMBERS_S, True
        return [AskMembers(self.known)] if asks else []

    def members_say(self, membership: Membership, words: Mapping[str, Word], now: float) -> list[Action]:
        """What the other members' managers answered; whoever did not is missing."""
        if membership != self.known:
            return []
        silent = [name for name in membership.groups if name != self.settings.group and name not in words]
        actions = self._say_who_is_awaited(silent, now)
        if not self.suspended or self.ending is not None or self.promised > membership.epoch.number:
            return actions
        doubtful = doubts(membership, tuple(self.prepared), self.settings.group, words)
        if doubtful:
            others = [name for name in doubtful if name not in silent]
            said = [f"no answer from {_few(silent)}"] if silent else []
            said += [f"the word of {_few(others)} does not show it"] if others else []
            self._doubtful = "; ".join(said)
            return actions
        self.suspended = False
        return actions + self._decide()

    def _say_who_is_awaited(self, silent: list[str], now: float) -> list[Action]:
        """The ranks stand in a reduce, and nobody is there who could leave anybody out."""
        stands_s = self._stands_in_reduce_s()
        if not self._tell_who_answers or self.in_touch or stands_s <= SAY_AFTER_S:
            return []
        self._tell_who_answers = False
        self._unheard = (self.step, _few(silent))
        who = f"no answer from the manager of {_few(silent)}" if silent else "the managers of all members answer"
        line = f"step {self.step} stands in its reduce since {stands_s:.0f} s: {self._away()}, and {who}"
        if silent and min(stands_s, now - self.away_since) > self.settings.outage_budget_s:
            return self._give_up(f"{line}; that is longer than the outage budget")
        return [ToRanks(local.Say(line=line))]

    def _stands_in_reduce_s(self) -> float:
        """How long the ranks have been waiting for others; of a spare, which stands for all steps, beyond the usual."""
        stands_s = max((view.waiting_s for view in self._views.values()), default=0.0)
        spare = self.known is not None and self.settings.group in self.known.spares
        return max(0.0, stands_s - self._beats.unusual_ms / 1000) if spare else stands_s

    def _also_unheard(self) -> str:
        """Whose manager did not answer before this step's reduce broke: others may have given up on it first."""
        step, names = self._unheard
        return f"; no answer from the manager of {names}" if names and step == self.step else ""

    def _away(self) -> str:
        says = f" (one was reached: {self.standby})" if self.standby else ""
        return f"the lighthouse at {self.settings.lighthouse} is away{says}"

    def _why_it_stands(self) -> str:
        """For a person who reads the log of any rank while no lighthouse is there to decide."""
        others = [name for name in self.suspects if name != self.settings.group]
        broke = f"the connection to {', '.join(others)} broke, and " if others else ""
        if self.failure and not others:
            broke = "a reduce failed, and "
        if not self.suspended:
            return f"{broke}{self._away()}{self._also_unheard()}"
        doubtful = f" ({self._doubtful})" if self._doubtful else ""
        slept = (
            f"this manager itself stood still for {self._slept_s:.0f} s and asks the other members whether its epoch"
        )
        return f"{slept} still stands{doubtful}; {self._away()}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
