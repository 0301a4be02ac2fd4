"""One job's membership, as a pure machine: events and `now` in, actions out.

It knows nothing of gRPC, files or clocks. The order of the actions it returns is the order in which they must be
carried out: what is logged stands before what is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Close, Ended, Note, Rise, Send
from lightkeeper.lighthouse.admission import alike, refusal
from lightkeeper.lighthouse.changes import Changes
from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.job import NOBODY_CALLS, STARTED_AGAIN, Bounds, Fencing, known_gone
from lightkeeper.lighthouse.joins import AGAIN_S, BACKOFF_S, BEFORE
from lightkeeper.lighthouse.names import Epoch, Term
from lightkeeper.lighthouse.signature import differences
from lightkeeper.lighthouse.silence import stands
from lightkeeper.lighthouse.takeover import LEFT_OUT, ON_ITS_WAY, OVER

REPEAT_S = 1.0
STRANGERS_KEPT_MAX = 1_000

__all__ = ["Bounds", "JobMachine"]


class JobMachine(Changes):
    """The events of one job."""

    # ------------------------------------------------------------ events

    def received(self, connection: int, group_name: str, message: m.ToLighthouse, now: float) -> list[Action]:
        """A manager's message. The first on a stream is a `Hello`, which names the group of the stream."""
        self._mind_gap(now)
        if isinstance(message, m.Hello):
            self._quiet = False
            actions = self._hello(connection, message, now) + self._welcome_anew()
            return actions if self._comes_back(message.group) else actions + self._consider(now)
        group = self.groups.get(group_name)
        if group is None or group.connection != connection:
            return []
        group.hears(now)
        returned, followed = group.gone is not None, group.follows
        if group.gone is not None and not self._returns(group):
            if isinstance(message, m.Left) and group.gone.detected_by == "left":
                self._has_left(group, message.step)  # another member's beat was here first
            return []
        handler: Callable[[Group, Any, float], list[Action]] = getattr(self, f"_{type(message).__name__.lower()}")
        actions = handler(group, message, now)
        routine = not actions and not returned and group.follows == followed
        if routine and isinstance(message, m.Beat) and not message.stopped_ms and message.overdue is None:
            self._quiet = self._quiet and not stands(group)
            return []  # what it may mean, the next tick sees: a look at all for each word of each is O(N²)
        if self.reigns and isinstance(message, m.Acknowledged):
            return []  # each of many says it when the lighthouse starts again
        self._quiet = False
        if self.recovery is not None and isinstance(message, m.Failed | m.Promise) and not self.recovery.complete:
            return actions
        if isinstance(message, m.Join) and self._comes_back(group.name):
            return actions
        return actions + self._consider(now)

    def _comes_back(self, name: str) -> bool:
        """Whether this is a member that has nothing to report: what follows from that, the next tick sees.

        To a lighthouse that was started again all of them come at once.
        """
        group = self._member(name)
        quiet = self.recovery is None and self.stopped is None
        return quiet and group is not None and group.in_touch and group.failed is None

    def disconnected(self, connection: int, now: float) -> list[Action]:
        """A stream broke or ended."""
        self._mind_gap(now)
        self._quiet = False
        for group in self.groups.values():
            if group.connection == connection:
                group.hangs_up()
                group.hears(now)
                if group.gone is None and (self.newest is None or self._member(group.name) is None):
                    group.gone = Gone("it went away before it was a member", "stream")
        self._trim()
        return self._consider(now)

    def _trim(self) -> None:
        """Groups that are gone and were no members are remembered, for a group that flaps; not without end."""
        if len(self.groups) <= STRANGERS_KEPT_MAX + (len(self.newest.members) if self.newest else 0):
            return
        strangers = [g.name for g in self.groups.values() if g.gone is not None and self._member(g.name) is None]
        for name in strangers[: len(strangers) // 2]:
            if name not in self.errors:
                del self.groups[name]

    def tick(self, now: float) -> list[Action]:
        """Time passes; at least every beat."""
        self._mind_gap(now)
        actions = self._welcome_anew()
        if not self._quiet:
            considered = self._consider(now)
            self._quiet = not considered and self._settled()
            actions += considered
        actions += self._plan_shares(now)
        if now - self._said_s >= REPEAT_S:
            self._said_s = now
            if self.stopped is None:
                actions += self._send_members_on(now) + self._repeat_activation() + self._say_waiting(now)
        return actions

    def _mind_gap(self, now: float) -> None:
        """If this process itself stood still, silence before now proves nothing."""
        gap_s, self._ticked_s = now - self._ticked_s, max(now, self._ticked_s)
        if gap_s > self.bounds.lease_s / 2:
            self.slept_s = now
            for group in self.groups.values():
                group.hears(max(group.heard, now))
                group.beat = None  # what it said of waiting and of stopped ranks is as old

    def _replaced(self, former: Group | None) -> list[Action]:
        """A member that nobody missed yet has been started anew: the one before is lost."""
        if former is None or former.gone is not None or self.newest is None:
            return []
        if self.newest.slot_of(former.name, former.incarnation) is None:
            return []
        former.gone = Gone(STARTED_AGAIN, "stream", *former.where)
        return [self._lost_note(former)]

    def _returns(self, group: Group) -> bool:
        """Whether a group that was called gone for its silence is back before that had consequences."""
        assert group.gone is not None
        if group.gone.detected_by in ("stream", "lease", "frozen") and not self._is_fenced(group.incarnation):
            group.gone, group.beat = None, None
        return group.gone is None

    def fencing(self, name: str, now: float) -> Fencing:
        """What the operator's word that the processes of a group are gone would mean here; changes nothing."""
        slot = None if self.newest is None else self.newest.slot_of(name)
        coming = self._may_have_switched()
        known = sorted({*self.groups, *coming, *(self.newest.groups if self.newest else ())})
        if name not in known:
            return Fencing(refused=f"job {self.job} has no group {name} here; it has {', '.join(known) or 'none'}")
        group = self.groups.get(name)
        incarnation = "" if group is None else group.incarnation
        if self.newest is not None and slot is not None:
            incarnation = self.newest.members[slot].incarnation
        if name in coming and (slot is None or self._known_dead(incarnation, group)):
            incarnation = coming[name]
        mine = group is not None and incarnation == group.incarnation
        if group is not None and mine and (heard_s := self._lives(group, now)) is not None:
            lives = f"{name} was heard {heard_s:.1f} s ago: it lives; end its processes first"
            return Fencing(incarnation, heard_s=heard_s, refused=lives)
        if (death := self.dead.get(incarnation)) is not None:
            return Fencing(incarnation, gone_s=now - death.since)
        return Fencing(incarnation, refused="" if self._somebody_calls(incarnation, now) else NOBODY_CALLS)

    def _known_dead(self, incarnation: str, group: Group | None) -> bool:
        gone = group is not None and group.incarnation == incarnation and known_gone(group)
        return gone or incarnation in self.dead

    def fence(self, name: str, by: str, now: float, incarnation: str = "") -> tuple[list[Action], str]:
        """The operator's explicit word that the processes of a group are gone.

        Args:
            name: the group.
            by: who says so.
            now: monotonic seconds.
            incarnation: which of its incarnations is meant; empty: whichever is known here.

        Returns:
            What follows from it; and why it is refused, empty if it is not.
        """
        fencing = self.fencing(name, now)
        if incarnation not in ("", fencing.incarnation):
            return [], f"{name} has been started again: incarnation {fencing.incarnation or 'none'} is known here now"
        if fencing.refused or fencing.gone_s is not None:
            return [], fencing.refused
        group, incarnation = self.groups.get(name), fencing.incarnation
        self._quiet = False
        reason = f"{by} says that its processes are gone"
        self._remember_dead(incarnation, reason, self._newest_heard_of())
        actions: list[Action] = [Note("operator_fenced", {"group": name, "incarnation": incarnation, "by": by})]
        if group is not None and incarnation == group.incarnation:
            lost = group.gone is None
            group.gone = Gone(reason, "operator", *group.where)
            actions += [self._lost_note(group)] if lost else []
        return actions + self._consider(now), ""

    # ------------------------------------------------------------ messages

    def _hello(self, connection: int, hello: m.Hello, now: float) -> list[Action]:
        actions = self._void_own_word(hello)
        if hello.incarnation in self.fenced and self._stands_left_out(hello):
            fence = m.Fence(self.fenced[hello.incarnation])
            return [Send(connection, fence), Close(connection)]
        if hello.died is not None:
            return self._last_words(connection, hello, hello.died, now)
        current = self.groups.get(hello.group)
        refused = refusal(hello, self._view(), now)
        if refused is not None:
            asks = self._ask_former(current, now) if refused.retry else []
            if not refused.retry:
                self.refused = (hello.group, refused.reason)
            note = Note("refused", {"group": hello.group, "incarnation": hello.incarnation, "reason": refused.reason})
            return [*actions, *asks, note, Send(connection, refused), Close(connection)]
        if self._is_over(hello):
            self.highest = max(self.highest, hello.promised)
            self._remember_fenced(hello.incarnation, OVER)
            return [*actions, Send(connection, m.Fence(OVER)), Close(connection)]
        actions += self._learn(hello)
        if self._left_out(hello):
            self._remember_fenced(hello.incarnation, LEFT_OUT)
            return [*actions, Send(connection, m.Fence(LEFT_OUT)), Close(connection)]
        if elsewhere := self._sends_on(hello, now):
            return [*actions, Send(connection, m.Refused(elsewhere, retry=True)), Close(connection)]
        actions += self._attach(connection, hello, now)
        current = self.groups[hello.group]
        if current.gone is not None and not self._returns(current):
            if current.gone.detected_by == "left" and self.stopped is None:
                return actions  # on its way out, in good order
            last = m.Fence(current.gone.cause) if self.stopped is None else self._last_word(current)
            return [*actions, *self._send(current, last), Close(connection)]
        if self._leaves(hello):
            current.gone = Gone(ON_ITS_WAY, "left")
            return actions
        if hello.follows and self._member(hello.group) is None and current.healing is None:
            current.healing = BEFORE  # it was told by an earlier lighthouse, and members keep its entries
            self.copied = BEFORE if self.copied is None else self.copied
        current.welcomed = None
        actions += self._welcome(current)
        if self.stopped is not None:
            current.told_to_stop = True
            return [*actions, Send(connection, self._last_word(current))]
        if self.recovery is not None and hello.group in self.recovery.asked:
            actions += self._send(current, m.Prepare(self.recovery.epoch, self.newest.epoch if self.newest else None))
        planned = self._planned()
        named = planned is not None and planned.slot_of(hello.group, hello.incarnation) is not None
        if planned is not None and (named or self._member(hello.group) is not None):
            actions += self._send(current, m.Prepare(planned.epoch, planned.base, planned))
        actions += self._remind(current, now)
        self._interrupted(current, hello)
        return actions

    def _attach(self, connection: int, hello: m.Hello, now: float) -> list[Action]:
        """From now on this stream is its group's: an earlier one is closed, an earlier incarnation replaced."""
        actions: list[Action] = []
        current = self.groups.get(hello.group)
        if current is None or current.incarnation != hello.incarnation:
            former, current = current, Group(hello.group, hello.incarnation, heard=now)
            self.groups[hello.group] = current
            actions += self._replaced(former)
            self._hold_back(current, former, now)
            if self.config is not None and not alike(self.config, hello):
                self.config = hello  # nobody who is heard has other numbers, or it would have been refused
        elif current.connection is not None:
            actions.append(Close(current.connection))
        current.connection, current.hello = connection, hello
        current.hears(now)
        if self._member(hello.group) is not None:
            current.beat = None  # how far it was before its stream broke is no word of where it is now
        if hello.known is None and not hello.follows:
            current.lost_in = max((p.epoch.number for p in hello.prepared), default=current.lost_in)
        current.parked = None  # nothing was said on this stream yet
        if self.config is None or not self._others_joined(hello.group):
            self.config = hello
        return actions

    def _ask_former(self, former: Group | None, now: float) -> list[Action]:
        """Whether it still lives is what another incarnation waits for."""
        if former is None or not former.in_touch or not self.patience.asks:
            return []
        former.asked(now)
        return self._send(former, m.Ask())

    def _last_words(self, connection: int, hello: m.Hello, died: m.Died, now: float) -> list[Action]:
        """A manager whose ranks are dead says so to whichever lighthouse it reaches."""
        actions = self._learn(hello)
        group = self.groups.get(hello.group)
        if group is not None and group.incarnation == hello.incarnation:
            group.hello = group.hello or hello
        member = self._needs(hello)
        if member and group is not None and group.incarnation == hello.incarnation and group.gone is None:
            actions += self._died(group, died, now)
        self._remember_dead(hello.incarnation, died.cause)
        return [*actions, Send(connection, m.Fence(f"its end is known here: {died.cause}")), Close(connection)]

    def _interrupted(self, group: Group, hello: m.Hello) -> None:
        """A recovery that an earlier lighthouse began, or logged and did not tell, must be done anew."""
        if self.newest is None or self._member(group.name) is None or self.recovery is not None:
            return
        known = 0 if hello.known is None else hello.known.epoch.number
        untold = self.activation is None and known < self.newest.epoch.number
        if untold or hello.promised > max(known, self.newest.epoch.number):
            text = f"epoch {max(hello.promised, self.newest.epoch.number)} was begun and not activated"
            group.failed = m.Failed(self.newest.epoch, 0, text)

    def _learn(self, hello: m.Hello) -> list[Action]:
        """What a manager knows may be newer than the log (lost, or another lighthouse reigned meanwhile)."""
        actions: list[Action] = []
        known, acknowledged = hello.known, hello.acknowledged
        if acknowledged is not None and self._obeys_another(hello, acknowledged):
            actions += self._lose_reign()  # also to an older copy of its own log
        if acknowledged is not None and acknowledged > self.term:
            self.term = Term(acknowledged.number + 1, self.term.lighthouse)
            actions.append(Rise(self.term))
        numbers = [p.epoch.number for p in hello.prepared] + ([known.epoch.number] if known is not None else [])
        self.highest = max(self.highest, hello.promised, *numbers, 0)
        if known is not None and (self.newest is None or known.epoch > self.newest.epoch):
            mine = [planned for planned in self.prepared if planned.epoch == known.epoch]
            if mine:
                self._expect(known)
                actions += self._planned_is_in_force(mine[0])
            else:
                actions += self._learn_newest(known)
        actions += self._learn_seen(hello)
        self._shows(None if known is None else known.epoch)
        self._learn_prepared(hello)
        return actions

    def _learn_seen(self, hello: m.Hello) -> list[Action]:
        """Who was outside knows that a job runs: those who are may be as many as begin one (W3).

        An epoch below one that this log has promised is no news here. That it is in force nobody has shown.
        """
        if hello.seen is None or hello.seen.epoch.number <= self.highest:
            return []
        shown = self.shown
        actions = self._learn_newest(hello.seen)
        self.shown = shown
        return actions

    def _shows(self, epoch: Epoch | None) -> None:
        """A manager knows this epoch as in force."""
        if self.newest is not None and epoch == self.newest.epoch:
            self.shown = epoch

    def _learn_prepared(self, hello: m.Hello) -> None:
        """What another lighthouse prepared may come into force by the members' entries, and is shown by their beats."""
        base = None if self.newest is None else self.newest.epoch
        known = [planned.epoch for planned in self.prepared]
        told = [p for p in (*self.foreign, *hello.prepared) if p.base == base and p.epoch not in known]
        self.foreign = sorted({p.epoch: p for p in told}.values(), key=lambda planned: planned.epoch)

    def _acknowledged(self, group: Group, acknowledged: m.Acknowledged, now: float) -> list[Action]:
        if acknowledged.term == self.term:
            group.acknowledged = self.term
        return []

    def _join(self, group: Group, join: m.Join, now: float) -> list[Action]:
        if group.join is not None:
            return []
        if self.reference is None or not self._others_joined(group.name):
            self.reference = (group.name, join)
        name, reference = self.reference
        lines = differences(join.signature, reference.signature, group.name, name)
        if lines:
            reason = f"{group.name} differs from {name}: " + "; ".join(lines)
            group.gone, self.refused = Gone(reason, "refused"), (group.name, reason)
            note = Note("refused", {"group": group.name, "incarnation": group.incarnation, "reason": reason})
            return [note, *self._send(group, m.Refused(reason))]
        group.join, group.joined_s = join, now
        if self.refused[0] == group.name:
            self.refused = ("", "")  # it was put right
        note = Note("joined", {"group": group.name, "incarnation": group.incarnation, "step": join.step})
        return [note, *self._say_held_back(group, now)]

    def _beat(self, group: Group, beat: m.Beat, now: float) -> list[Action]:
        group.steps_on(beat, now)
        for planned in self.prepared:
            if beat.epoch == planned.epoch.number:
                return self._planned_is_in_force(planned)
        for planned in self.foreign:
            if beat.epoch == planned.epoch.number and self.newest is not None and planned.base == self.newest.epoch:
                return self._learn_newest(planned)
        in_force = self.newest is not None and beat.epoch == self.newest.epoch.number
        known = None if group.hello is None else group.hello.known
        if in_force and self.reigns and self.newest is not None and (known is None or known.epoch.number < beat.epoch):
            self.shown = self.newest.epoch  # it has come there since its stream stands, so by this lighthouse
        if in_force and self.activation is not None and beat.step > self.activation.first_step:
            self._progressed()
        return []

    def _progressed(self) -> None:
        """The newest epoch has committed something."""
        self.recoveries_without_commit, self.first_failure = 0, ""
        self.suspects.clear()
        self.own_failures.clear()

    def _promise(self, group: Group, promise: m.Promise, now: float) -> list[Action]:
        if self.recovery is None or promise.epoch != self.recovery.epoch or group.name not in self.recovery.asked:
            return []
        self.recovery.promises[group.name] = promise
        self._shows(None if promise.known is None else promise.known.epoch)
        first_step = 0 if self.activation is None else self.activation.first_step
        if promise.last is not None and promise.last.made and promise.last.step >= first_step:
            self._progressed()  # also if no beat was there to show it
        step = -1 if promise.last is None else promise.last.step
        return [Note("promised", {"group": group.name, "epoch": promise.epoch, "step": step})]

    def _failed(self, group: Group, failed: m.Failed, now: float) -> list[Action]:
        actions: list[Action] = []
        for planned in self.prepared:
            if failed.epoch == planned.epoch:
                actions = self._planned_is_in_force(planned)
                break
        for planned in self.foreign:
            if failed.epoch == planned.epoch and self.newest is not None and planned.base == self.newest.epoch:
                actions = self._learn_newest(planned)
                break
        if self.newest is None or group.failed is not None:
            return actions
        missed_switch = self.activation is None and failed.epoch == self.newest.base  # its entry failed here
        if failed.epoch != self.newest.epoch and not missed_switch:
            return actions
        group.failed = failed
        self._shows(failed.epoch)
        self.suspects.update(name for name in failed.suspects if name != group.name)
        self.own_failures.update(name for name in failed.suspects if name == group.name)
        self.first_failure = self.first_failure or f"{group.name}: {failed.error}"
        return actions

    def _died(self, group: Group, died: m.Died, now: float) -> list[Action]:
        self._remember_word(group.incarnation, died.cause)
        if died.asked:
            group.gone = Gone(died.cause, "left", died.phase, died.step, late=True)
            return [Note("left", {"group": group.name, "incarnation": group.incarnation, "reason": died.cause})]
        group.gone = Gone(died.cause, "manager", died.phase, died.step, rank=died.rank)
        actions: list[Action] = [self._lost_note(group)]
        if died.error is not None:
            self.errors[group.name] = died.error
            actions += self._same_error_everywhere(died.error)
        return actions

    def _left(self, group: Group, left: m.Left, now: float) -> list[Action]:
        actions: list[Action] = []
        for planned in self.prepared:
            if left.epoch == planned.epoch:
                actions = self._planned_is_in_force(planned)
                break
        if self._member(group.name) is None:
            self._has_left(group, left.step)
        return actions

    def _finished(self, group: Group, finished: m.Finished, now: float) -> list[Action]:
        group.gone = Gone(f"finished at step {finished.step}", "left")
        if self.newest is None or self.stopped is not None:
            return []
        self.stopped = m.Stop(f"finished: step {finished.step} is final", ok=True)
        return [Ended(self.stopped.reason, ok=True), Note("finished", {"group": group.name, "step": finished.step})]

    def _lost(self, group: Group, lost: m.Lost, now: float) -> list[Action]:
        if self._member(group.name) is not None:  # taken in, but it cannot become what the others take it for
            group.gone = Gone(f"it could not follow: {lost.reason}", "manager", "follow", 0)
            return [self._lost_note(group)]
        if group.healing == self.copied:
            self.copied = None  # whatever is kept is of no use to it: a fresh boundary, after a breath
        group.healing, group.beat = None, None
        elsewhere = () if group.hello is None else group.hello.prepared
        group.lost_in = max((p.epoch.number for p in (*self.prepared, *elsewhere)), default=group.lost_in)
        group.admit_s = now + min(BACKOFF_S, AGAIN_S * 2**group.tries)
        note = {"group": group.name, "incarnation": group.incarnation, "reason": lost.reason}
        return [Note("heal_failed", note)]

    def _unbuilt(self, group: Group, unbuilt: m.Unbuilt, now: float) -> list[Action]:
        planned = self._planned()
        if planned is None or unbuilt.epoch != planned.epoch or self.unbuilt_s is not None:
            return []
        self.unbuilt_times += 1
        again_s = min(BACKOFF_S, AGAIN_S * 2**self.unbuilt_times)
        self.unbuilt_s = now + again_s
        if self.unbuilt_times > 1:  # who leaves does not wait for a joiner that somebody cannot reach
            for joiner in (g for g in self._joiners(now) if planned.slot_of(g.name) is not None):
                joiner.admit_s = self.unbuilt_s + again_s
        note = {"group": group.name, "epoch": planned.epoch, "members": list(planned.groups), "error": unbuilt.error}
        return [Note("build_failed", note)]

    def _query(self, group: Group, query: m.Query, now: float) -> list[Action]:
        group.query = query
        return self._answer_query(group)
