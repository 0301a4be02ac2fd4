"""How a job ends, and who keeps its last committed step.

When a house burns down one person carries the money box out, not each of those who ran: so one group is named, and
whoever finds the box later finds one. Below the minimum it is the lowest slot of those who hold the newest entry that
the promises name. Nobody can commit anything else in its place: all that promised are in no lower epoch any more, and
whoever did not is left out. So what it keeps is as final as if an epoch had been activated from there. When all are
asked to leave nobody has promised anything, and members may be one step apart: it is one that stays until the end.

Rejected: that every group saves what it has before it gives up. Several of them would, of different steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Ended, Note
from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.job import STARTED_AGAIN
from lightkeeper.lighthouse.recovery import Conclusion
from lightkeeper.lighthouse.telling import Telling, few

LAGS = "it lags by more than one entry"
MISSING_CHARS_MAX = 500
SILENT_LEASES = 5  # after which one that was told of the end, and has not hung up, is not waited for


class Endings(Telling):
    """A job that ends."""

    # ------------------------------------------------------------ below the minimum

    def _give_up_below_minimum(self, concluded: Conclusion, now: float) -> list[Action]:
        """Nobody came for so long that the groups would soon give up one by one: the job ends, and is kept."""
        wait_s = self._quorum_wait_s(self._enough_come_in(concluded))
        if self.newest is None or self.stood_s is None or wait_s is None or now - self.stood_s < wait_s:
            return []
        if now - self.slept_s < self.patience.lease_s:
            return []  # who has come while this process stood still has yet to be heard
        keeper = self._furthest(concluded)
        reason = self._quorum_lost(concluded, keeper, wait_s)
        return self._stop(reason, False, self.groups[keeper] if keeper else None, quorum_lost=True)

    def _enough_come_in(self, concluded: Conclusion) -> bool:
        """Whether groups heal with which the job could go on."""
        coming = [group for group in self._outside() if group.comes_in and group.name not in concluded.members]
        return self.config is not None and len(concluded.members) + len(coming) >= self.config.minimum

    def _furthest(self, concluded: Conclusion) -> str:
        """The lowest slot of those that hold the newest entry, by the promises; empty if the job has made none."""
        assert self.recovery is not None
        if concluded.entry is None or not concluded.entry.made:
            return ""  # each has what it was started with
        last = {name: self.recovery.promises[name].last for name in concluded.members}
        return next(name for name in concluded.members if last[name] == concluded.entry)

    def _quorum_lost(self, concluded: Conclusion, keeper: str, wait_s: float) -> str:
        assert self.config is not None and self.recovery is not None
        missing = self._who_is_missing(concluded.members) or self.recovery.cause
        names = ", ".join(few(concluded.members))
        left = f"{names} alone was" if len(concluded.members) == 1 else f"only {names} were"
        kept = f"{keeper} keeps the state after step {concluded.first_step - 1}, if its script saves checkpoints"
        return (
            f"{m.QUORUM_LOST}: {missing[:MISSING_CHARS_MAX]}; of at least {self.config.minimum} groups {left} left for "
            f"{wait_s:g} s; {kept if keeper else 'no step was committed since the job began'}; start all groups again, "
            "and the job goes on from there"
        )

    def _who_is_missing(self, staying: tuple[str, ...]) -> str:
        """Who is not there, and why: members of the newest epoch, and whoever was lost or has left before it."""
        assert self.newest is not None
        why = self._members_without(staying)
        for group in self.groups.values():
            if group.name in staying or group.name in self.newest.groups or group.gone is None:
                continue
            if group.gone.detected_by != "refused":
                left = group.gone.detected_by == "left"
                why.setdefault(group.gone.cause if left else f"lost: {group.gone.cause}", []).append(group.name)
        coming = [group.name for group in self._outside() if group.name not in staying]
        return _in_words({**why, **({"had not caught up": coming} if coming else {})})

    def _why_without(self, staying: tuple[str, ...]) -> str:
        """Who of the newest epoch is left out, and why, whatever began the recovery; empty if nobody is."""
        return _in_words(self._members_without(staying))

    def _members_without(self, staying: tuple[str, ...]) -> dict[str, list[str]]:
        why: dict[str, list[str]] = {}
        for member in self.newest.members if self.newest else ():
            if member.group in staying:
                continue
            group = self._member(member.group)
            if group is None:  # another incarnation of it is here
                reason = f"lost: {STARTED_AGAIN}"
            elif group.gone is None:
                reason = f"left out: {LAGS}"
            else:
                reason = group.gone.cause if group.gone.detected_by == "left" else f"lost: {group.gone.cause}"
            why.setdefault(reason, []).append(member.group)
        return why

    # ------------------------------------------------------------ asked to leave

    def _furthest_in_touch(self) -> Group | None:
        """The lowest slot of the members in touch that are furthest on, by their promises or else by their beats.

        Who leaves by a planned change may have left, and the others be in that epoch: one that stays, if there is any.
        """

        def step(group: Group) -> int:
            promise = None if self.recovery is None else self.recovery.promises.get(group.name)
            if promise is not None:
                return 0 if promise.last is None else promise.last.step + 1
            here = self.newest is not None and group.beat is not None and group.beat.epoch == self.newest.epoch.number
            return group.beat.step if here and group.beat is not None else 0

        here = [group for group in self._members() if group.in_touch]
        changes = (*self.prepared, *self.foreign)
        stay = [g for g in here if all(planned.slot_of(g.name, g.incarnation) is not None for planned in changes)]
        return max(stay or here, key=step, default=None)

    # ------------------------------------------------------------ the end

    def _stop_as_asked(self) -> list[Action]:
        reasons = {group.leaving for group in self._members() if group.leaving}
        self.told_to_stop = True
        reason = "all groups asked to leave: " + "; ".join(sorted(reasons))
        return self._stop(reason, ok=True, keeper=self._furthest_in_touch())

    def _nobody_left(self) -> list[Action]:
        if self.newest is None or not self.reigns or self._may_live() or self._may_have_switched():
            return []
        causes = "; ".join(f"{g.name}: {g.gone.cause}" for g in self._members() if g.gone)
        return self._forget(f"no group is left ({causes})" if causes else "every group was started again")

    def _forget(self, reason: str) -> list[Action]:
        """The job has no living member: the next epoch is a first one."""
        self.ended = reason
        self._break_off(ok=False)
        fences: list[Action] = []
        for group in self.groups.values():  # gone for the job, and still here: nobody will speak to them again
            if group.connection is not None and group.gone is not None:
                fences += self._fence(group, group.gone.cause)
        self._clear()
        self.groups = {g.name: g for g in self.groups.values() if g.in_touch}
        for group in self.groups.values():  # they wait for the next first epoch
            fences += self._send(group, m.Outside()) if group.parked is not None else []
            group.parked = None
            self.config = self.config or group.hello
            if self.reference is None and group.join is not None:
                self.reference = (group.name, group.join)
        return [Ended(reason), Note("job_stopped", {"reason": reason, "ok": False}), *fences]

    def _break_off(self, ok: bool) -> None:
        if self.newest is not None and not ok:
            self.broken_off = self.newest.epoch

    def _same_error_everywhere(self, error: m.UserError) -> list[Action]:
        """The same exception in all groups at one step is the job's bug: say so and do not heal."""
        members = self._members()
        if not members or any(
            g.gone is None or g.name not in self.errors or not self.errors[g.name].alike(error) for g in members
        ):
            return []
        alone = self.config is not None and self.config.groups == 1
        who = "an exception" if alone else "the same exception in all groups"
        message = error.message.strip().partition("\n")[0]  # the rank has printed the rest
        what = f"{error.kind}: {message} ({error.where})"
        return self._stop(f"{who} at step {error.step}, a bug of the job: {what}", ok=False)

    def _stop(self, reason: str, ok: bool, keeper: Group | None = None, quorum_lost: bool = False) -> list[Action]:
        keep, self.keeper = ("", None) if keeper is None else (keeper.name, (keeper.name, keeper.incarnation))
        self.stopped = m.Stop(reason, ok, keep, quorum_lost)
        self._break_off(ok)
        told = {"reason": reason, "ok": ok, **({"keep": keep} if keep else {})}
        return [Ended(reason, ok), Note("job_stopped", told), *self._end(self._ticked_s)]

    def _last_word(self, group: Group) -> m.Stop:
        """What a group is told of the end. One that was started again since has nothing to keep."""
        assert self.stopped is not None
        return self.stopped if (group.name, group.incarnation) == self.keeper else replace(self.stopped, keep="")

    def _end(self, now: float) -> list[Action]:
        """The job has stopped: tell whoever still waits, and forget it once nobody is there or may return."""
        assert self.stopped is not None
        actions: list[Action] = []
        for name in self.errors:  # each of these groups raised: tell them that they all did
            group = self.groups[name]
            if not self.stopped.ok and not group.told_to_stop:
                actions += self._send(group, self._last_word(group))
                group.told_to_stop = True
        for group in self.groups.values():
            waits = group.failed is not None or not self.stopped.ok or self.recovery is not None or self.told_to_stop
            waits = waits or self._member(group.name) is None  # a joiner
            hears = group.in_touch or (group.connection is not None and self._given_up(group))
            if hears and waits and not group.told_to_stop:
                actions += self._send(group, self._last_word(group))
                group.told_to_stop = True  # it has heard it when its stream ends and it does not return
        if all(self._is_away(group, now) for group in self.groups.values()):
            self.ended = self.stopped.reason
            self._clear()
            self.groups.clear()
        return actions

    def _given_up(self, group: Group) -> bool:
        """Whether it is gone, and nobody has told it: it neither left in good order nor was fenced."""
        told = group.gone is None or group.gone.detected_by == "left" or group.incarnation in self.fenced
        return not told

    def _is_away(self, group: Group, now: float) -> bool:
        """Whether nobody waits any more for one that was told of the end.

        A keeper beats while it saves; that its host is gone, a stream may take long to show.
        """
        lost = self.stopped is not None and self.stopped.quorum_lost
        leases = 1 if group.connection is None else SILENT_LEASES if lost else math.inf
        return group.gone is not None or group.heard < now - leases * self.bounds.lease_s


def _in_words(why: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(few(names))} {reason}" for reason, names in why.items())
