"""One group's votes and promises, decided in one order, as a pure machine.

It answers every vote of a step alike for all ranks of the group, and it promises recoveries at once, without its
ranks. It knows nothing of sockets, processes or clocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightkeeper.events import schema
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Epoch, origin
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, DropKeys, Note, Tell, ToRanks
from lightkeeper.manager.answers import SAY_AFTER_S, RankView
from lightkeeper.manager.ends import ENDS_S_MAX
from lightkeeper.manager.overdue import Overdues

__all__ = ["GroupMachine", "RankView"]


TORN = (
    "the copy of the members' state broke off half-way and they are gone: the state here is neither the old nor the "
    "new one; start this group again"
)


class GroupMachine(Overdues):
    """The group's side of the protocol: what it is told, by the lighthouse, by its ranks and by the clock."""

    # ------------------------------------------------------------ the stream

    def hello(self, place: int = 0) -> m.Hello:
        """What a new stream to the lighthouse begins with; `place` is as in `Hello`."""
        s = self.settings
        return m.Hello(
            job=s.job,
            group=s.group,
            incarnation=self.incarnation,
            manager=self.address,
            groups=s.groups,
            minimum=s.minimum,
            spares=s.spares,
            role=s.role,
            seen=self.seen if self.known is None else None,
            start_window_s=s.start_window_s,
            acknowledged=self.acknowledged,
            known=self.known,
            prepared=tuple(self.prepared),
            promised=self.promised,
            follows=self.following,
            place=place,
            died=self.died,
            by_speed=s.deal == "speed",
            evicts_slow=s.slow == "evict",
            quorum_wait_s=s.timeouts.quorum_wait_s,
            outage_budget_s=s.outage_budget_s,
        )

    def connected(self, now: float, place: int = 0) -> list[Action]:
        """A stream is opened: after `Hello`, what the lighthouse may have missed. It stands once it is welcomed."""
        actions: list[Action] = [Tell(self.hello(place))]
        if self.died is not None or self.keeping_since is not None:
            return actions
        if len(self.ready) == self.settings.ranks:
            actions.append(Tell(self._join()))
        if self.failed_epoch is not None and self.known is not None and self.failed_epoch == self.known.epoch.number:
            actions.append(Tell(m.Failed(self.known.epoch, self.step, self.failure, self.suspects)))
        if self.lost_why and self.known is None:
            actions.append(Tell(m.Lost(self.lost_why)))
        if self.unbuilt is not None and self.prepared and self.unbuilt.epoch == self.prepared[-1].epoch:
            actions.append(Tell(self.unbuilt))
        if self.leaving:
            actions.append(Tell(m.Leave(self.leaving)))
        if self.suspended and self.known is not None:
            actions.append(Tell(m.Query(self.known.epoch)))
        return actions

    def disconnected(self, now: float) -> list[Action]:
        """The stream broke; training goes on."""
        if self.in_touch:
            self._silent_since = self.away_since = now
        self.in_touch = self.parked = False
        return []

    def received(self, message: m.ToManager, now: float) -> list[Action]:
        """A message of the lighthouse."""
        actions = self._mind_clock(now)
        if self.keeping_since is not None and not isinstance(message, m.Welcome):
            return actions  # it saves the last step and ends; whatever the job, or the next one, wants comes too late
        handler: Callable[[Any, float], list[Action]] = getattr(self, f"_{type(message).__name__.lower()}")
        return actions + handler(message, now)

    def _welcome(self, welcome: m.Welcome, now: float) -> list[Action]:
        self._beats.again()
        self.lease_s, self.beat_s, self.in_touch = welcome.lease_ms / 1000, welcome.beat_ms / 1000, True
        self.standby = ""
        problem = self.settings.timeouts.against(self.lease_s)
        if problem and self.known is None:
            return self._finish(exits.USAGE, problem)
        actions: list[Action] = [ToRanks(local.Say(line=problem), 0)] if problem else []  # a member trains on with it
        if self.acknowledged is not None and welcome.term < self.acknowledged:
            return actions  # it will rise
        self.acknowledged = welcome.term
        return [*actions, Tell(m.Acknowledged(welcome.term))]

    def _refused(self, refused: m.Refused, now: float) -> list[Action]:
        if refused.retry:  # the service tries again, or elsewhere, until the budget is spent
            self.standby, self._silent_since = refused.reason, now
            return []
        self.death_known = True
        return self._finish(exits.REFUSED, f"refused by the lighthouse: {refused.reason}")

    def _prepare(self, prepare: m.Prepare, now: float) -> list[Action]:
        epoch = prepare.epoch
        if self.acknowledged is not None and epoch.term < self.acknowledged:
            return []
        if prepare.planned is not None:
            self.why_planned[epoch.number] = prepare.why
            return self._prepare_planned(prepare.planned)
        if epoch.number < self.promised or (self.known is not None and epoch.number <= self.known.epoch.number):
            return []
        if self.prepared and epoch.number <= self.prepared[-1].epoch.number:
            return []  # an old word, which what was prepared since has overtaken
        if self.fetching and prepare.base is not None and self.known is None:
            self.prepared, self.built, self.deferred = [], set(), None
            return [Tell(m.Lost(f"{prepare.base} took it in, and its copy is from before that"))]  # who copies stands
        if self.fetching:
            self.put_off = prepare  # whether there is a state to go on from shows when the copy has ended
            return []
        if self.torn:
            return self._finish(exits.GAVE_UP, TORN)
        self.promised, self.aborted_at = epoch.number, now
        promise = m.Promise(epoch, self.known, tuple(self.prepared), self.last, self.share, self.total, self.healed)
        if self.following:
            self.prepared, self.built, self.deferred = [], set(), None  # what was to take this group in is void
        reason = f"epoch {epoch.number} is being prepared"
        abort = local.Abort(below=epoch.number, reason=reason, recovery=str(epoch))
        return [ToRanks(abort), DropKeys(epoch.number), Tell(promise)]

    def _prepare_late(self, now: float) -> list[Action]:
        """What was asked for while ranks were fetching a state."""
        if self.fetching or self.put_off is None:
            return []
        prepare, self.put_off = self.put_off, None
        return self._prepare(prepare, now)

    def _activate(self, activate: m.Activate, now: float) -> list[Action]:
        membership = activate.membership
        epoch = membership.epoch
        if epoch.number < self.promised or (self.known is not None and epoch.number <= self.known.epoch.number):
            return []
        if self.acknowledged is not None and epoch.term < self.acknowledged:
            return []
        if membership.slot_of(self.settings.group, self.incarnation) is None:
            return []
        if self.following:
            followed = self._as_followed(activate)
            if followed is None:
                return [Tell(m.Lost(f"it went on to {self.last}, and {epoch} goes on from {activate.entry}"))]
            activate, self.following = followed, False
        self.acknowledged, self.promised = epoch.term, epoch.number
        self.known, self.prepared, self.built, self.activation = membership, [], set(), activate
        self.deferred, self.lost_why = None, ""
        self.votes.clear()
        self._beats.recovered()
        self.attempt, self.failed_epoch, self.suspended = 0, None, False
        self.suspects, self.failure = (), ""
        shares = {share.group: share.microbatches for share in activate.shares}
        if activate.first_step == self.step:
            self.share, self.total = shares[self.settings.group], activate.total
        actions: list[Action] = [DropKeys(epoch.number), self._note_activation(activate)]
        for rank in range(self.settings.ranks):
            actions.append(ToRanks(local.Build(plan=self._plan(rank)), rank))
        if activate.membership.base is not None:
            going_on = f"going on at step {activate.first_step} with {', '.join(membership.groups)}"
            actions.append(ToRanks(local.Say(line=f"{activate.cause}; {going_on} (epoch {epoch.number})"), 0))
        elif activate.cause != m.FIRST_EPOCH or activate.first_step:
            state = "followed the others to" if self.healed else "was started with"
            begins = f"the job begins at step {activate.first_step}, from the state that this group {state}"
            why = "" if activate.cause == m.FIRST_EPOCH else f" ({activate.cause})"
            actions.append(ToRanks(local.Say(line=f"{begins}{why}"), 0))
        actions += self._answer_waiting(self._recover)
        return actions

    def _as_followed(self, activate: m.Activate) -> m.Activate | None:
        """What a recovery means for a joiner, which follows the entries on after its promise; None if it fits no more.

        It may have the entry by now that it was to fetch. Or it has one that only a member had that is gone, and the
        others do that step anew: its state is of no use.
        """
        mine = self.settings.group
        others = tuple(donor for donor in activate.donors if donor.group != mine)
        if self.step == activate.first_step and self.last == activate.entry:
            return dataclasses.replace(activate, donors=others)
        behind = self.step == activate.first_step - 1 and len(others) < len(activate.donors)
        return activate if behind else None

    def _note_activation(self, activate: m.Activate) -> Note:
        epoch: Epoch = activate.membership.epoch
        return Note(
            schema.Activated(
                epoch=epoch.number,
                term=epoch.term.number,
                members=activate.membership.groups,
                first_step=activate.first_step,
                cause=activate.cause,
                shares={share.group: share.microbatches for share in activate.shares},
                spares=activate.membership.spares,
            )
        )

    def _fence(self, fence: m.Fence, now: float) -> list[Action]:
        self.death_known = True
        if self.errors and not self.exits:
            return []  # it is ending by itself, and still prints why
        if self._left():
            return []  # it is out of the job as it was asked to be, and may still save
        return self._finish(exits.FENCED, f"left out of the job: {fence.reason}")

    def _stop(self, stop: m.Stop, now: float) -> list[Action]:
        self.stopped = stop
        if not stop.ok:
            self.last_words = self._stopped_in_words(stop.reason)
        return self._stop_here()

    def _waiting(self, waiting: m.Waiting, now: float) -> list[Action]:
        said, next_ms = self._waiting_said
        if not self.waiting or ((waiting.whom, waiting.why) == said and waiting.since_ms < next_ms):
            return []
        self._waiting_said = ((waiting.whom, waiting.why), 2.0 * waiting.since_ms)  # said less and less often
        line = f"waiting for {', '.join(waiting.whom)} ({waiting.why}) since {waiting.since_ms / 1000:.1f} s"
        return [ToRanks(local.Say(line=line), 0)]

    def _outside(self, outside: m.Outside, now: float) -> list[Action]:
        self.seen, self.parked, said = outside.membership, bool(outside.why), self._parked_said
        self._parked_said = outside.why or said
        return [ToRanks(local.Say(line=outside.why), 0)] if outside.why not in ("", said) else []

    def _stands(self, stands: m.Stands, now: float) -> list[Action]:
        if self.suspended and self.known is not None and stands.epoch == self.known.epoch:
            self.suspended = False
            return self._decide()
        return []

    # ------------------------------------------------------------ ranks

    def register(self, message: local.Register, now: float) -> list[Action]:
        """A rank's socket stands."""
        self.registered[message.rank] = message
        if self.exits and self.ending is None:  # another rank ended without a Manager: this one would wait for it
            return self._died(*next(iter(self.exits.items())), None)
        return []

    def rank_says(self, rank: int, message: local.FromRank, now: float) -> list[Action]:
        """A rank's message (rendezvous keys are the service's)."""
        actions = self._mind_clock(now)
        if isinstance(message, local.Ready):
            return actions + self._rank_ready(rank, message, now)
        if isinstance(message, local.Vote):
            self.fetching.discard(rank)
            return actions + self._vote(rank, message, now) + self._prepare_late(now)
        if isinstance(message, local.Built):
            if self.prepared and message.epoch == self.prepared[-1].epoch.number:
                self.built.add(rank)
        elif isinstance(message, local.BuildFailed):
            if self.prepared and message.epoch == self.prepared[-1].epoch.number:
                self.unbuilt = m.Unbuilt(self.prepared[-1].epoch, f"rank {rank}: {message.error}")
                actions.append(Tell(self.unbuilt))
        elif isinstance(message, local.RankError):
            actions += self._raised(rank, message, now)
        elif isinstance(message, local.AskLeave):
            actions += self.asked_to_leave(message.reason, now, by=f"rank {rank}" if message.signal else "")
        return actions

    def _rank_ready(self, rank: int, ready: local.Ready, now: float) -> list[Action]:
        self.ready[rank] = ready
        self.waiting[rank] = now
        self.total = ready.total
        if self.stopped is not None:
            return self._answer_waiting(self._stop_answer)
        if len(self.ready) < self.settings.ranks:
            return []
        first = self.ready[0].step
        if (other := next((r for r, one in sorted(self.ready.items()) if one.step != first), None)) is not None:
            which = f"rank 0 at step {first}, rank {other} at step {self.ready[other].step}"
            return self._finish(exits.REFUSED, f"the ranks of this group resume at different steps: {which}")
        self.step = first
        self.last = origin(first) if first else None
        return [Tell(self._join())]

    def _join(self) -> m.Join:
        ranks = tuple(self.registered[rank].transfer for rank in range(self.settings.ranks))
        signature = {}
        for rank, ready in sorted(self.ready.items()):
            for name, value in ready.signature.items():
                signature[f"rank {rank}: {name}" if rank else name] = value
        fingerprints = ",".join(ready.fingerprint for _, ready in sorted(self.ready.items()))
        return m.Join(ranks, signature, fingerprints, self.ready[0].step)

    # ------------------------------------------------------------ time

    def tick(self, views: dict[int, RankView], now: float) -> list[Action]:
        """Beats, and gives up what was waited for longer than the outage budget."""
        actions = self._mind_clock(now)
        if self.ending is not None:
            return actions
        self._views = views
        actions += self._mind_leaving(now)
        if self.ending is not None:
            return actions
        self._beats.stood(self.step, round(1000 * max((view.waiting_s for view in views.values()), default=0.0)))
        if self.parked:  # not waiting for anything that is late
            self.waiting = dict.fromkeys(self.waiting, now)
        actions += self._mind_progress(now)
        if self.ending is not None:
            return actions
        actions += self._ask_members(now)
        actions += self._beat_if_due(now)
        if self.errors and now - self._raised_s > ENDS_S_MAX:
            return actions + self._does_not_end()
        if self._cause_overdue(now):
            return actions + self._came_apart()
        budget_s = self.settings.outage_budget_s if self.known is not None else self.settings.timeouts.start_budget_s
        waited_s = max((now - since for since in self.waiting.values()), default=0.0)
        if not self.in_touch and waited_s > self._say_after_s:
            self._say_after_s = 2 * waited_s
            what = f"step {self.step} stands" if self.known is not None else "waits to join"
            line = f"{what} since {waited_s:.0f} s: {self._why_it_stands()}"
            actions.append(ToRanks(local.Say(line=line)))
        elif not self.waiting:
            self._say_after_s = SAY_AFTER_S
        if self.known is None and not self.in_touch and self.keeping_since is None:
            silent_s = now - self._silent_since
            if silent_s > self.settings.outage_budget_s:
                return actions + self._give_up(
                    f"the lighthouse at {self.settings.lighthouse} could not be reached for {silent_s:.0f} s"
                )
        if waited_s > budget_s:
            where = "" if self.in_touch else f"; the lighthouse at {self.settings.lighthouse} is not in touch"
            where += "" if self.in_touch else self._also_unheard()
            return actions + self._give_up(
                f"step {self.step} has been waiting for {waited_s:.0f} s, longer than the outage budget{where}"
            )
        return actions

    def _ask(self, ask: m.Ask, now: float) -> list[Action]:
        """Somebody waits for this group, or for one that it waits for."""
        return self._say_beat(self._beat(), now)

    def _beat_if_due(self, now: float) -> list[Action]:
        beat = self._beat()
        return self._say_beat(beat, now) if self._beats.due(beat, self.beat_s, now) else []

    def _say_beat(self, beat: m.Beat, now: float) -> list[Action]:
        self._beats.said(beat, now)
        return [Tell(beat)]

    def _beat(self) -> m.Beat:
        views, waiting_s = self._views, self._stands_in_reduce_s()
        stopped_s = max((view.stopped_s for view in views.values()), default=0.0)
        phases = [view.phase for view in views.values()]
        phase = next((p for p in phases if p == "compute"), phases[0] if phases else "start")
        if phase == "follow" and self.lost:
            phase = "heal"  # another rank needs a fresh copy: the group cannot be taken in
        number = 0 if self.known is None else self.known.epoch.number
        slowest = max(views, key=lambda rank: views[rank].microbatch_us, default=0)  # the group is as slow as this rank
        return m.Beat(
            number, self.step, phase, round(waiting_s * 1000), round(stopped_s * 1000),
            views[slowest].microbatch_us if views else 0, self.total, slowest,
            min((view.wait_us for view in views.values()), default=0), self.overdue, self._doing(),
            round(1000 * self.deadlines.floor_s),
        )  # fmt: skip
