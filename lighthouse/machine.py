"""One job's membership, as a pure machine: events and `now` in, actions out.

It knows nothing of gRPC, files or clocks. The order of the actions it returns is the order in which they must be
carried out: what is logged stands before what is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Activated, Close, Ended, Note, Promised, Rise, Send
from lightkeeper.lighthouse.admission import View, refusal
from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.names import Epoch, Membership, Term
from lightkeeper.lighthouse.recovery import (
    Contradiction,
    Recovery,
    conclude,
    most_blamed,
    newest_known,
    unheard,
)
from lightkeeper.lighthouse.signature import differences
from lightkeeper.lighthouse.silence import verdict

REPEAT_S = 1.0
RECOVERIES_MAX = 3
FENCED_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lighthouse's times, in seconds.

    Attributes:
        lease_s: how long a silence is borne when somebody waits.
        beat_s: how often a manager beats.
    """

    lease_s: float = 2.0
    beat_s: float = 0.2


class JobMachine:
    """Members of one job.

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
        self.newest = history.membership
        self.planned: Membership | None = next(iter(history.prepared[-1:]), None)
        self.reigns = True
        self.groups: dict[str, Group] = {}
        self.fenced: dict[str, str] = {}
        self.config: m.Hello | None = None
        self.reference: tuple[str, m.Join] | None = None
        self.first_join_s: float | None = None
        self.recovery: Recovery | None = None
        self.activation: m.Activate | None = None
        self.recoveries_without_commit = 0
        self.suspects: Counter[str] = Counter()
        self.first_failure = ""
        self.errors: dict[str, m.UserError] = {}
        self.stopped: m.Stop | None = None
        self._said_s = now
        self._ticked_s = now
        for member in self.newest.members if self.newest else ():
            self.groups[member.group] = Group(member.group, member.incarnation, heard=now)

    # ------------------------------------------------------------ events

    def received(self, connection: int, group_name: str, message: m.ToLighthouse, now: float) -> list[Action]:
        """A manager's message. The first on a stream is a `Hello`, which names the group of the stream."""
        if isinstance(message, m.Hello):
            return self._hello(connection, message, now) + self._consider(now)
        group = self.groups.get(group_name)
        if group is None or group.connection != connection or group.gone is not None:
            return []
        group.heard = now
        handler: Callable[[Group, Any, float], list[Action]] = getattr(self, f"_{type(message).__name__.lower()}")
        return handler(group, message, now) + self._consider(now)

    def disconnected(self, connection: int, now: float) -> list[Action]:
        """A stream broke or ended."""
        for group in self.groups.values():
            if group.connection == connection:
                group.connection, group.heard = None, now
                if self.newest is None or self._member(group.name) is None:
                    group.gone = Gone("it went away before it was a member", "stream")
        return self._consider(now)

    def tick(self, now: float) -> list[Action]:
        """Time passes; at least every beat."""
        gap_s, self._ticked_s = now - self._ticked_s, now
        if gap_s > self.bounds.lease_s / 2:  # this process itself stood still: silence before now proves nothing
            for group in self.groups.values():
                group.heard = max(group.heard, now)
        actions = self._consider(now)
        if now - self._said_s >= REPEAT_S:
            self._said_s = now
            actions += self._repeat_activation() + self._say_waiting(now)
        return actions

    # ------------------------------------------------------------ messages

    def _hello(self, connection: int, hello: m.Hello, now: float) -> list[Action]:
        if hello.incarnation in self.fenced:
            fence = m.Fence(self.fenced[hello.incarnation])
            return [Send(connection, fence), Close(connection)]
        current = self.groups.get(hello.group)
        refused = refusal(hello, self._view(), self.bounds.lease_s, now)
        if refused is not None:
            note = Note("refused", {"group": hello.group, "incarnation": hello.incarnation, "reason": refused.reason})
            return [note, Send(connection, refused), Close(connection)]
        actions: list[Action] = []
        if self.newest is not None and self.newest.slot_of(hello.group, hello.incarnation) is None:
            actions += self._forget("every member has been silent for longer than the lease; the job starts anew")
        if current is None or current.incarnation != hello.incarnation:
            self.groups[hello.group] = current = Group(hello.group, hello.incarnation, heard=now)
        elif current.connection is not None:
            actions.append(Close(current.connection))
        current.connection, current.heard, current.hello = connection, now, hello
        if current.gone is not None and current.gone.detected_by in ("stream", "lease"):
            current.gone = None  # a return before `Activate`
        if self.config is None or not self._others_joined(hello.group):
            self.config = hello
        if current.gone is not None:
            return [*actions, *self._send(current, m.Fence(current.gone.cause)), Close(connection)]
        actions += self._learn(hello)
        welcome = m.Welcome(self.term, round(self.bounds.lease_s * 1000), round(self.bounds.beat_s * 1000))
        actions.append(Send(connection, welcome))
        if self.recovery is not None and hello.group in self.recovery.asked:
            actions += self._send(current, m.Prepare(self.recovery.epoch, self.newest.epoch if self.newest else None))
        if self.planned is not None and self._member(hello.group) is not None:
            actions += self._send(current, m.Prepare(self.planned.epoch, self.planned.base, self.planned))
        return actions

    def _view(self) -> View:
        return View(self.config, self.groups, self.newest, self.stopped)

    def _learn(self, hello: m.Hello) -> list[Action]:
        """What a manager knows may be newer than the log (lost, or another lighthouse reigned meanwhile)."""
        actions: list[Action] = []
        known, acknowledged = hello.known, hello.acknowledged
        if acknowledged is not None and acknowledged.lighthouse != self.term.lighthouse:
            self.reigns = False
        if acknowledged is not None and acknowledged > self.term:
            self.term = Term(acknowledged.number + 1, self.term.lighthouse)
            actions.append(Rise(self.term))
        if known is not None:
            self.highest = max(self.highest, known.epoch.number)
        if known is not None and (self.newest is None or known.epoch > self.newest.epoch):
            mine = self.planned is not None and known.epoch == self.planned.epoch
            self.newest, self.reigns = known, self.reigns and mine
            for member in known.members:
                self.groups.setdefault(member.group, Group(member.group, member.incarnation, heard=self._ticked_s))
        if not self.reigns and self.newest is not None and all(g.in_touch for g in self._members()):
            self.reigns = True  # every member has acknowledged this term
            actions.append(Activated(self.newest))
        return actions

    def _join(self, group: Group, join: m.Join, now: float) -> list[Action]:
        if group.join is not None:
            return []
        if self.reference is None or not self._others_joined(group.name):
            self.reference = (group.name, join)
        name, reference = self.reference
        lines = differences(join.signature, reference.signature, group.name, name)
        if lines:
            reason = f"{group.name} differs from {name}: " + "; ".join(lines)
            group.gone = Gone(reason, "refused")
            note = Note("refused", {"group": group.name, "incarnation": group.incarnation, "reason": reason})
            return [note, *self._send(group, m.Refused(reason))]
        group.join = join
        if self.first_join_s is None:
            self.first_join_s = now
        return [Note("joined", {"group": group.name, "incarnation": group.incarnation})]

    def _beat(self, group: Group, beat: m.Beat, now: float) -> list[Action]:
        group.beat = beat
        if self.planned is not None and beat.epoch == self.planned.epoch.number:
            return self._planned_is_in_force()
        in_force = self.newest is not None and beat.epoch == self.newest.epoch.number
        if in_force and self.activation is not None and beat.step > self.activation.first_step:
            self.recoveries_without_commit, self.first_failure = 0, ""
            self.suspects.clear()
        return []

    def _promise(self, group: Group, promise: m.Promise, now: float) -> list[Action]:
        if self.recovery is None or promise.epoch != self.recovery.epoch or group.name not in self.recovery.asked:
            return []
        self.recovery.promises[group.name] = promise
        step = -1 if promise.last is None else promise.last.step
        return [Note("promised", {"group": group.name, "epoch": promise.epoch, "step": step})]

    def _failed(self, group: Group, failed: m.Failed, now: float) -> list[Action]:
        if self.newest is None or failed.epoch != self.newest.epoch or group.failed is not None:
            return []
        group.failed = failed
        self.suspects.update(failed.suspects)
        self.first_failure = self.first_failure or f"{group.name}: {failed.error}"
        return []

    def _died(self, group: Group, died: m.Died, now: float) -> list[Action]:
        group.gone = Gone(died.cause, "manager", died.phase, died.step)
        actions: list[Action] = [self._lost(group)]
        if died.error is not None:
            self.errors[group.name] = died.error
            actions += self._same_error_everywhere(died.error)
        return actions

    def _leave(self, group: Group, leave: m.Leave, now: float) -> list[Action]:
        group.leaving = leave.reason or "asked to leave"
        return []

    def _finished(self, group: Group, finished: m.Finished, now: float) -> list[Action]:
        if self.newest is None or self.stopped is not None:
            return []
        self.stopped = m.Stop(f"finished: step {finished.step} is final", ok=True)
        return [Ended(self.stopped.reason), Note("finished", {"group": group.name, "step": finished.step})]

    def _query(self, group: Group, query: m.Query, now: float) -> list[Action]:
        if self.newest is not None and query.epoch >= self.newest.epoch:
            return self._send(group, m.Stands(query.epoch))
        return []

    # ------------------------------------------------------------ what follows from the state

    def _consider(self, now: float) -> list[Action]:
        """After every event: begins, restarts or concludes a recovery, or prepares a planned change."""
        actions: list[Action] = []
        if self.stopped is not None:
            return self._end(actions)
        actions += self._judge(now)
        cause = self._cause(now)
        if self.recovery is None and cause is None:
            return actions + self._plan(now)
        asked = frozenset(g.name for g in self._participants())
        if not asked:
            return actions + self._nobody_left()
        if self.recovery is None or asked != self.recovery.asked:
            actions += self._ask(asked, cause or (self.recovery.cause if self.recovery else ""), now)
        assert self.recovery is not None
        if not self.recovery.missing:
            actions += self._activate(now)
        return actions

    def _judge(self, now: float) -> list[Action]:
        actions: list[Action] = []
        members = self._members()
        for group in members:
            if group.gone is None:
                group.gone = verdict(members, group, self.recovery is not None, self.bounds.lease_s, now)
                if group.gone is not None:
                    actions.append(self._lost(group))
        return actions

    def _cause(self, now: float) -> str | None:
        """Why a recovery is needed, or None."""
        if self.newest is None:
            return "first epoch" if self._may_start(now) else None
        for group in self._members():
            if group.gone is not None:
                return f"{group.name}: {group.gone.cause}"
        for group in self._members():
            if group.failed is not None:
                return f"{group.name} reported: {group.failed.error}"
        return None

    def _may_start(self, now: float) -> bool:
        joined = len(self._joined())
        if self.config is None or self.first_join_s is None:
            return False
        window_s = self.config.start_window_s
        word = window_s > 0 and now - self.first_join_s >= window_s
        return joined >= self.config.groups or (word and joined >= self.config.minimum)

    def _participants(self) -> list[Group]:
        """All in touch that may be asked for a promise: members of the newest epoch, or all that joined."""
        if self.newest is None:
            return [group for group in self._joined() if group.in_touch]
        return [group for group in self._members() if group.in_touch]

    def _ask(self, asked: frozenset[str], cause: str, now: float) -> list[Action]:
        self.highest += 1
        since = now if self.recovery is None else self.recovery.since
        epoch = Epoch(self.highest, self.term)
        self.recovery = Recovery(epoch, cause, since, asked)
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
        return actions

    def _activate(self, now: float) -> list[Action]:
        assert self.recovery is not None
        recovery, promises = self.recovery, self.recovery.promises
        top = newest_known(self.newest, promises)
        if top is not None and (self.newest is None or top.epoch != self.newest.epoch):
            self.newest, self.planned = top, None
            return self._consider(now)
        if unheard(self.newest, promises) is not None or not self._may_leave_out():
            return []
        if any(group.gone is None and group.name not in recovery.asked for group in self._members()):
            return []  # silent, but not yet long enough to be left out
        candidates = self._candidates()
        assert self.config is not None
        try:
            concluded = conclude(candidates, promises)
        except Contradiction as error:
            return self._stop(f"the job contradicts itself and must not go on: {error}", ok=False)
        if len(concluded.members) < self.config.minimum:
            return []
        members = tuple(self.groups[name].member() for name in concluded.members)
        base = None if self.newest is None else self.newest.epoch
        membership = Membership(recovery.epoch, members, base)
        self.activation = m.Activate(
            membership,
            concluded.first_step,
            concluded.total,
            concluded.shares,
            concluded.donors,
            concluded.entry,
            recovery.cause,
        )
        self.newest, self.planned, self.recovery = membership, None, None
        actions: list[Action] = [Activated(membership), self._activated_note()]
        actions += self._repeat_activation()
        for group in self.groups.values():
            group.failed = None
            if group.join is not None and group.name not in concluded.members:
                actions += self._fence(group, group.gone.cause if group.gone else "it lags by more than one entry")
        return actions + (self._count_recovery() if base is not None else [])

    def _candidates(self) -> list[str]:
        """Promisers in slot order, less the one whom three failed recoveries name most."""
        assert self.recovery is not None
        names = sorted(self.recovery.asked)
        if self.newest is not None:
            names = [g for g in self.newest.groups if g in self.recovery.asked]
        return names

    def _may_leave_out(self) -> bool:
        """Leaving out somebody silent takes a lighthouse that reigns; else every member must have promised."""
        assert self.recovery is not None
        if self.reigns or self.newest is None:
            return True
        return all(group in self.recovery.promises for group in self.newest.groups)

    def _count_recovery(self) -> list[Action]:
        """Three recoveries in a row without a commit: leave out whom most failures name, then stop."""
        self.recoveries_without_commit += 1
        if self.recoveries_without_commit <= RECOVERIES_MAX or self.newest is None:
            return []
        blamed = most_blamed(self.suspects, self.newest.groups)
        if blamed is None or len(self.newest.groups) == 1:
            return self._stop(
                f"{RECOVERIES_MAX} recoveries in a row without a commit; first cause: {self.first_failure}",
                ok=False,
            )
        group = self.groups[blamed]
        group.gone = Gone(
            f"named by most of {RECOVERIES_MAX} failed recoveries; first cause: {self.first_failure}",
            "failures",
        )
        self.recoveries_without_commit = 0
        self.suspects.clear()
        return [self._lost(group), *self._fence(group, group.gone.cause), *self._consider(self._ticked_s)]

    # ------------------------------------------------------------ planned changes

    def _plan(self, now: float) -> list[Action]:
        """Prepares the newest epoch without those who asked to leave."""
        if self.newest is None:
            return []
        leavers = {g.name for g in self._members() if g.leaving}
        if not leavers:
            return []
        if leavers == set(self.newest.groups):
            reasons = {g.leaving for g in self._members()}
            return self._stop("all groups asked to leave: " + "; ".join(sorted(reasons)), ok=True)
        staying = tuple(member for member in self.newest.members if member.group not in leavers)
        if self.planned is not None and self.planned.members == staying:
            return []
        self.highest += 1
        self.planned = Membership(Epoch(self.highest, self.term), staying, self.newest.epoch)
        prepare = m.Prepare(self.planned.epoch, self.newest.epoch, self.planned)
        note = {
            "epoch": self.planned.epoch,
            "base": self.newest.epoch,
            "members": list(self.planned.groups),
            "change": "planned",
            "why": f"{', '.join(sorted(leavers))} leaves",
        }
        actions: list[Action] = [Promised(self.highest, self.planned), Note("prepared", note)]
        for group in self._members():
            actions += self._send(group, prepare)
        return actions

    def _planned_is_in_force(self) -> list[Action]:
        """A beat shows that the entries have activated the planned epoch."""
        assert self.planned is not None
        old, self.newest, self.planned = self.newest, self.planned, None
        self.activation, self.recovery = None, None
        for name in old.groups if old else ():
            if self._member(name) is None:
                self.groups[name].gone = Gone(f"left: {self.groups[name].leaving}", "left")
        note = Note(
            "activated",
            {
                "epoch": self.newest.epoch,
                "members": list(self.newest.groups),
                "first_step": self._first_step_now(),
                "cause": "planned",
            },
        )
        return [Activated(self.newest), note]

    # ------------------------------------------------------------ ends

    def _nobody_left(self) -> list[Action]:
        if self.newest is None or any(g.gone is None for g in self._members()):
            return []
        causes = "; ".join(f"{g.name}: {g.gone.cause}" for g in self._members() if g.gone)
        return self._forget(f"no group is left ({causes})")

    def _forget(self, reason: str) -> list[Action]:
        """The job has no living member: the next epoch is a first one."""
        self.newest, self.recovery, self.activation, self.planned = None, None, None, None
        self.reference, self.first_join_s = None, None
        self.recoveries_without_commit, self.first_failure = 0, ""
        self.suspects.clear()
        self.errors.clear()
        self.groups = {g.name: g for g in self.groups.values() if g.in_touch}
        return [Ended(reason), Note("job_stopped", {"reason": reason, "ok": False})]

    def _same_error_everywhere(self, error: m.UserError) -> list[Action]:
        """The same exception in all groups at one step is the job's bug: say so and do not heal."""
        members = self._members()
        if not members or any(
            g.gone is None or g.name not in self.errors or not self.errors[g.name].alike(error) for g in members
        ):
            return []
        return self._stop(
            f"the same exception in all groups at step {error.step}, a bug of the job: "
            f"{error.kind}: {error.message} ({error.where})",
            ok=False,
        )

    def _stop(self, reason: str, ok: bool) -> list[Action]:
        self.stopped = m.Stop(reason, ok)
        actions: list[Action] = [Ended(reason), Note("job_stopped", {"reason": reason, "ok": ok})]
        return self._end(actions)

    def _end(self, actions: list[Action]) -> list[Action]:
        """The job has stopped: tell whoever still waits, and forget it once nobody is there."""
        assert self.stopped is not None
        for group in self.groups.values():
            waits = group.failed is not None or not self.stopped.ok or self.recovery is not None
            if group.in_touch and waits:
                actions += self._send(group, self.stopped)
                group.gone = Gone(self.stopped.reason, "left")
        if not any(group.in_touch for group in self.groups.values()):
            highest, term, bounds, fenced = self.highest, self.term, self.bounds, self.fenced
            self.__init__(self.job, term, JobHistory(highest), bounds, self._ticked_s)  # type: ignore[misc]
            self.fenced = fenced
        return actions

    # ------------------------------------------------------------ small helpers

    def _send(self, group: Group, message: m.ToManager) -> list[Action]:
        return [] if group.connection is None else [Send(group.connection, message)]

    def _fence(self, group: Group, reason: str) -> list[Action]:
        self.fenced[group.incarnation] = reason
        while len(self.fenced) > FENCED_KEPT_MAX:
            self.fenced.pop(next(iter(self.fenced)))
        note = Note("fenced", {"group": group.name, "incarnation": group.incarnation, "reason": reason})
        group.gone = group.gone or Gone(reason, "fenced")
        return [note, *self._send(group, m.Fence(reason))]

    def _lost(self, group: Group) -> Note:
        assert group.gone is not None
        gone = group.gone
        fields = {
            "group": group.name,
            "incarnation": group.incarnation,
            "cause": gone.cause,
            "detected_by": gone.detected_by,
            "phase": gone.phase,
            "step": gone.step,
        }
        return Note("group_lost", fields)

    def _repeat_activation(self) -> list[Action]:
        actions: list[Action] = []
        if self.activation is not None and self.recovery is None and self.newest == self.activation.membership:
            for group in self._members():
                if group.beat is None or group.beat.epoch < self.newest.epoch.number:
                    actions += self._send(group, self.activation)
        return actions

    def _first_step_now(self) -> int:
        return max((g.beat.step for g in self._members() if g.beat), default=0)

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
            },
        )

    def _say_waiting(self, now: float) -> list[Action]:
        whom, why, since_s = self.waiting(now)
        if not whom:
            return []
        waiting = m.Waiting(whom, why, round(since_s * 1000))
        actions: list[Action] = [Note("waiting", {"whom": ", ".join(whom), "why": why, "since_s": since_s})]
        for group in self.groups.values():
            if group.in_touch:
                actions += self._send(group, waiting)
        return actions

    def waiting(self, now: float) -> tuple[tuple[str, ...], str, float]:
        """For whom the job waits, why, and since how many seconds; empty if it does not wait."""
        if self.recovery is not None:
            since_s = now - self.recovery.since
            if self.recovery.missing:
                return self.recovery.missing, "their promise", since_s
            if not self._may_leave_out() and self.newest is not None:
                return (
                    tuple(g for g in self.newest.groups if g not in self.recovery.promises),
                    "this lighthouse may not leave anybody out",
                    since_s,
                )
            minimum = self.config.minimum if self.config else 0
            return ("any group",), f"at least {minimum} groups", since_s
        if self.newest is None and self.config is not None and self.first_join_s is not None:
            joined = len(self._joined())
            return (
                (f"{self.config.groups - joined} more groups",),
                f"the first epoch needs {self.config.groups}",
                now - self.first_join_s,
            )
        return (), "", 0.0

    def _members(self) -> list[Group]:
        """Groups of the newest epoch's incarnations, in slot order."""
        return (
            [] if self.newest is None else [g for name in self.newest.groups if (g := self._member(name)) is not None]
        )

    def _member(self, name: str) -> Group | None:
        group = self.groups.get(name)
        if group is None or self.newest is None or self.newest.slot_of(name, group.incarnation) is None:
            return None
        return group

    def _joined(self) -> list[Group]:
        return [g for g in self.groups.values() if g.join is not None and g.gone is None]

    def _others_joined(self, name: str) -> bool:
        return any(g.name != name and g.gone is None and g.join is not None for g in self.groups.values())
