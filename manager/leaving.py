"""How a group is asked to leave, and how long it may take: by signals, an operator, a notice of its machine, itself.

A guest who is asked to go finishes the sentence and closes the door; asked by three people at once it is still one
request. Only who is told a second time by the same person leaves in mid-sentence. And if the house is locked (nobody is
there to whom the share could be handed over), the guest does not wait behind the door for ever.
"""

from __future__ import annotations

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, Tell, ToRanks
from lightkeeper.manager.outages import Outages


class Leaving(Outages):
    """A group that may be asked to leave."""

    def asked_to_leave(self, reason: str, now: float, deadline_s: float | None = None, by: str = "") -> list[Action]:
        """The group is asked to leave at a step boundary.

        Args:
            reason: one line for the person on call, for instance ``SIGTERM``.
            now: monotonic seconds.
            deadline_s: seconds from now after which it ends at once; None: it may take as long as a step takes.
            by: the process that got a signal. A second one to the same process ends the group at once; the same
                request often reaches launcher and ranks together. Empty: no signal.
        """
        if self.ending is not None:
            return []
        if by and by in self._signalled:
            return self._leave_at_once(f"was asked to end at once ({reason})")
        self._signalled |= {by} - {""}
        if deadline_s is not None and (self._leave_by_s is None or now + deadline_s < self._leave_by_s):
            self._leave_by_s, self._leave_within_s = now + deadline_s, deadline_s
        if self.leaving or self.stopped is not None:
            return []
        self.leaving, self._asked_s = reason, now
        within = "" if deadline_s is None else f" within {deadline_s:g} s"
        line = f"asked to leave{within} ({reason}): at the next step boundary that all members can agree on"
        return [ToRanks(local.Say(line=line), 0), Tell(m.Leave(reason)), *self._mind_leaving(now)]

    def _drain(self, drain: m.Drain, now: float) -> list[Action]:
        """The operator asks, through the lighthouse."""
        return self.asked_to_leave(drain.reason, now, drain.deadline_ms / 1000 if drain.deadline_ms else None)

    def _mind_leaving(self, now: float) -> list[Action]:
        """A group that is asked to leave, no member and without a lighthouse goes; one that is out of time ends."""
        if not self.leaving or self.ending is not None:
            return []
        late = self._leave_by_s is not None and now >= self._leave_by_s
        if self._left() or self.stopped is not None:  # nobody waits for it any more
            return self._finish(self._stopped_code(), self.leaving) if late else []
        if self.known is None and not self.prepared and not self.in_touch:
            return self._go_as_stranger()
        if late:
            within = f"within {self._leave_within_s:g} s"
            return self._leave_at_once(f"was asked to leave {within} ({self.leaving}) and did not make it")
        away_s = 0.0 if self.in_touch else now - max(self.away_since, self._asked_s)
        if away_s > self.settings.outage_budget_s:
            why = f"the lighthouse at {self.settings.lighthouse} is away for {away_s:.0f} s"
            return self._leave_at_once(f"was asked to leave ({self.leaving}), and {why}")
        return []

    def _go_as_stranger(self) -> list[Action]:
        """No epoch has this group as a member, so nobody misses it."""
        self.stopped = m.Stop(f"asked to leave before it was a member: {self.leaving}", ok=True)
        return self._stop_here()

    def _stop_here(self) -> list[Action]:
        """Ranks that wait are told to stop, others when they vote; some that have yet to come are not waited for."""
        assert self.stopped is not None
        if self.leaving and self.stopped.ok and len(self.registered) < self.settings.ranks:
            return self._finish(0, self.stopped.reason)
        abort = local.Abort(below=1 << 62, reason=self.stopped.reason)
        return [ToRanks(abort), *self._answer_waiting(self._stop_answer)]

    def _leave_at_once(self, cause: str) -> list[Action]:
        """The others recover as from a death, but nobody is to blame for it."""
        self.died = m.Died(cause, -1, "", self.step, asked=True)
        return [Tell(self.died), *self._finish(exits.ASKED, cause)]
