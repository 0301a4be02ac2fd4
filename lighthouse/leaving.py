"""Groups that ask to leave, or are asked to: who is let go at once, who by a planned change, and what became of it.

A member hands over its share by a planned change (`changes.py`). Who is no member is missed by nobody and may go at
once, unless an epoch is prepared with it that may come into force any moment. Who stands in a recovery that waits for
further groups would wait for ever: it goes, and the others go on standing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Note
from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.joins import Joins


@dataclass(frozen=True, slots=True)
class Drained:
    """What has become of an operator's request that a group leaves.

    Attributes:
        incarnation: which of its incarnations the request is about.
        here: whether it is still there.
        left: whether it has left in good order.
        how: how it went, or who is asked.
        refused: why the group cannot be asked; empty if it is.
    """

    incarnation: str = ""
    here: bool = False
    left: bool = False
    how: str = ""
    refused: str = ""


class Leaves(Joins):
    """A job that lets groups go."""

    def drain(self, name: str, by: str, now: float, deadline_s: float | None = None) -> tuple[list[Action], Drained]:
        """The operator asks a group to leave.

        Args:
            name: the group.
            by: who says so.
            now: monotonic seconds.
            deadline_s: seconds after which it ends at once; None: it takes as long as it takes.

        Returns:
            What follows from it, and what has become of it so far.
        """
        if (gone := self.groups.get(name)) is not None and gone.gone is not None and gone.gone.has_left:
            return [], self.drained(name, gone.incarnation)  # another operator was faster
        group, refused = self._may_drain(name, now)
        if group is None or refused:
            return [], Drained(refused=refused)
        self._quiet = False
        first = group.drain is None and not group.leaving
        group.drain = m.Drain(f"drained by {by}", 0 if deadline_s is None else max(1, round(1000 * deadline_s)))
        group.drain_by_s = None if deadline_s is None else now + deadline_s
        fields = {"group": name, "incarnation": group.incarnation, "by": by, "deadline_s": deadline_s}
        note = [Note("operator_drained", fields)] if first else []
        return [*note, *self._send(group, group.drain)], self.drained(name, group.incarnation)

    def drained(self, name: str, incarnation: str) -> Drained:
        """What has become of it; changes nothing."""
        group = self.groups.get(name)
        if group is None or group.incarnation != incarnation:
            how = f"the job has ended: {self.ended}" if group is None and self.ended else "its processes are gone"
            return Drained(incarnation, left=group is None and bool(self.ended), how=how)
        if group.gone is not None:
            return Drained(incarnation, left=group.gone.has_left, how=group.gone.cause)
        if self.stopped is not None and self.stopped.ok:
            return Drained(incarnation, left=True, how=self.stopped.reason)
        return Drained(incarnation, here=True, how=group.leaving and f"leaving: {group.leaving}")

    def _may_drain(self, name: str, now: float) -> tuple[Group | None, str]:
        group = self.groups.get(name)
        if group is None:
            known = ", ".join(sorted(self.groups)) or "none"
            return None, f"job {self.job} has no group {name} here; it has {known}"
        if group.gone is not None:
            return None, f"{name} is not there any more: {group.gone.cause}"
        if group.connection is None:
            silent_s = now - group.heard
            return None, (
                f"{name} has not been in touch with this lighthouse for {silent_s:.1f} s, so its manager cannot be "
                "asked; if its processes are gone, say so with `lightkeeper fence`"
            )
        return group, ""

    def _remind(self, group: Group, now: float) -> list[Action]:
        """On a new stream: it may not have heard that it is to leave."""
        if group.drain is None or group.leaving:
            return []
        if group.drain_by_s is not None:
            group.drain = m.Drain(group.drain.reason, max(1, round(1000 * (group.drain_by_s - now))))
        return self._send(group, group.drain)

    def _leave(self, group: Group, leave: m.Leave, now: float) -> list[Action]:
        group.leaving = leave.reason or "asked to leave"
        return []

    def _let_strangers_go(self) -> list[Action]:
        """Who is no member, and is not named in a change that may come into force, is not waited for."""
        actions: list[Action] = []
        for group in self.groups.values():
            if not group.leaving or not group.in_touch or self._member(group.name) is not None:
                continue
            if not any(p.slot_of(group.name, group.incarnation) is not None for p in (*self.prepared, *self.foreign)):
                actions += self._let_go(group, "before it was a member")
        return actions

    def _let_go(self, group: Group, when: str) -> list[Action]:
        group.gone = Gone(f"left {when}: {group.leaving}", "left")
        return self._send(group, m.Stop(f"asked to leave {when}: {group.leaving}", ok=True))

    def _let_go_below_minimum(self, names: Iterable[str]) -> list[Action]:
        """A recovery waits for more groups; who has asked to leave does not wait with it."""
        leaving = [self.groups[name] for name in names if self.groups[name].leaving]
        actions: list[Action] = []
        for group in leaving:
            actions += self._let_go(group, "while the job stood below its minimum")
        return actions

    def _has_left(self, group: Group, step: int | None = None) -> None:
        """By an epoch that is in force without it."""
        when = "" if step is None else f" before step {step}"
        group.gone = Gone(f"left{when}: {group.leaving}", "left")
