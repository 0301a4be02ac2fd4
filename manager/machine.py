"""One group's votes and promises, decided in one order, as a pure machine.

It answers every vote of a step alike for all ranks of the group, and it promises recoveries at once, without its
ranks. If all ranks voted "reduced" before a recovery's `Prepare`, the group has committed; otherwise it has not, and
later votes are answered "recover". It knows nothing of sockets, processes or clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightkeeper.events import schema
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.deal import deal
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, Term
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, DropKeys, End, Kill, Note, Tell, ToRanks
from lightkeeper.manager.exits import describe_exit
from lightkeeper.manager.plans import plan_for
from lightkeeper.manager.settings import Settings

SAY_AFTER_S = 2.0
ENDS_S_MAX = 10.0  # for an interpreter to end after an exception


@dataclass(frozen=True, slots=True)
class RankView:
    """What the manager sees of a rank from outside.

    Attributes:
        waiting_s: how long it has been standing in a reduce, 0 if it does not.
        stopped_s: how long it has been stopped by a signal, 0 if it is not.
    """

    phase: str
    step: int
    waiting_s: float
    stopped_s: float


class GroupMachine:
    """The group's side of the protocol.

    Args:
        settings: what the group was told.
        incarnation: name of this start of the group.
        address: where other managers reach this one.
        now: monotonic seconds.
    """

    def __init__(self, settings: Settings, incarnation: str, address: str, now: float) -> None:
        self.settings, self.incarnation, self.address = settings, incarnation, address
        self.lease_s, self.beat_s = 2.0, 0.05  # until the lighthouse says
        self.acknowledged: Term | None = None
        self.known: Membership | None = None
        self.prepared: list[Membership] = []  # planned changes on `known`, oldest first
        self.promised = 0
        self.last: Entry | None = None
        self.step, self.total, self.share = 0, 0, ()  # type: tuple[int, int, tuple[int, ...]]
        self.activation: m.Activate | None = None
        self.registered: dict[int, local.Register] = {}
        self.ready: dict[int, local.Ready] = {}
        self.votes: dict[int, local.Vote] = {}
        self.waiting: dict[int, float] = {}
        self.built: set[int] = set()
        self.decision: tuple[tuple[int, int, int], local.Answer] | None = None
        self.attempt = 0
        self.errors: dict[int, local.RankError] = {}
        self.exits: dict[int, int | None] = {}
        self.failed_epoch: int | None = None
        self.suspended = False
        self.ending: str | None = None
        self.stopped: m.Stop | None = None
        self.last_words = ""
        self.in_touch = False
        self.leaving = ""
        self.copy_at: int | None = None
        self.source: m.Heal | None = None
        self.following, self.lost = False, True
        self.joiners: frozenset[str] = frozenset()  # groups whose first step the next one is
        self._clock = now
        self._say_after_s = SAY_AFTER_S
        self._raised_s = now
        self._waiting_said: tuple[tuple[str, ...], float] = ((), 0.0)
        self._silent_since = now

    # ------------------------------------------------------------ the stream

    def hello(self) -> m.Hello:
        """What a new stream to the lighthouse begins with."""
        s = self.settings
        return m.Hello(
            job=s.job,
            group=s.group,
            incarnation=self.incarnation,
            manager=self.address,
            groups=s.groups,
            minimum=s.minimum,
            start_window_s=s.start_window_s,
            acknowledged=self.acknowledged,
            known=self.known,
            prepared=tuple(self.prepared),
            promised=self.promised,
            follows=self.following,
        )

    def connected(self, now: float) -> list[Action]:
        """A stream is opened: after `Hello`, what the lighthouse may have missed. It stands once it is welcomed."""
        actions: list[Action] = [Tell(self.hello())]
        if len(self.ready) == self.settings.ranks:
            actions.append(Tell(self._join()))
        if self.failed_epoch is not None and self.known is not None and self.failed_epoch == self.known.epoch.number:
            actions.append(
                Tell(m.Failed(self.known.epoch, self.step, "a reduce that failed while the stream was broken"))
            )
        if self.leaving:
            actions.append(Tell(m.Leave(self.leaving)))
        if self.suspended and self.known is not None:
            actions.append(Tell(m.Query(self.known.epoch)))
        return actions

    def disconnected(self, now: float) -> list[Action]:
        """The stream broke; training goes on."""
        if self.in_touch:
            self._silent_since = now
        self.in_touch = False
        return []

    def received(self, message: m.ToManager, now: float) -> list[Action]:
        """A message of the lighthouse."""
        actions = self._mind_clock(now)
        handler: Callable[[Any, float], list[Action]] = getattr(self, f"_{type(message).__name__.lower()}")
        return actions + handler(message, now)

    def _welcome(self, welcome: m.Welcome, now: float) -> list[Action]:
        self.lease_s, self.beat_s, self.in_touch = welcome.lease_ms / 1000, welcome.beat_ms / 1000, True
        if self.acknowledged is None or welcome.term > self.acknowledged:
            self.acknowledged = welcome.term
        return []

    def _refused(self, refused: m.Refused, now: float) -> list[Action]:
        if refused.retry:
            return []  # the service tries again until the budget is spent
        return self._finish(exits.REFUSED, f"refused by the lighthouse: {refused.reason}")

    def _prepare(self, prepare: m.Prepare, now: float) -> list[Action]:
        epoch = prepare.epoch
        if self.acknowledged is not None and epoch.term < self.acknowledged:
            return []
        if prepare.planned is not None:
            return self._prepare_planned(prepare.planned)
        if epoch.number < self.promised or (self.known is not None and epoch.number <= self.known.epoch.number):
            return []
        self.promised = epoch.number
        promise = m.Promise(epoch, self.known, tuple(self.prepared), self.last, self.share, self.total)
        if self.following:
            self.prepared, self.built = [], set()  # what was to take this group in is void
        abort = local.Abort(below=epoch.number, reason=f"epoch {epoch.number} is being prepared")
        return [ToRanks(abort), DropKeys(epoch.number), Tell(promise)]

    def _prepare_planned(self, planned: Membership) -> list[Action]:
        in_force = self.following or (self.known is not None and planned.base == self.known.epoch)
        latest = self.prepared[-1].epoch.number if self.prepared else 0
        if not in_force or planned.epoch.number <= max(self.promised, latest):
            return []
        self.prepared.append(planned)
        self.built = set()
        if planned.slot_of(self.settings.group, self.incarnation) is None:
            self.built = set(range(self.settings.ranks))  # who leaves has nothing to build
            return []
        return [ToRanks(local.Build(plan=plan_for(planned, self.settings.group, -1, (), 0, planned=True)))]

    def _activate(self, activate: m.Activate, now: float) -> list[Action]:
        membership = activate.membership
        epoch = membership.epoch
        if epoch.number < self.promised or (self.known is not None and epoch.number <= self.known.epoch.number):
            return []
        if self.acknowledged is not None and epoch.term < self.acknowledged:
            return []
        if membership.slot_of(self.settings.group, self.incarnation) is None:
            return []
        self.acknowledged, self.promised = epoch.term, epoch.number
        self.known, self.prepared, self.built, self.activation = membership, [], set(), activate
        self.votes.clear()
        self.attempt, self.failed_epoch, self.suspended = 0, None, False
        shares = {share.group: share.microbatches for share in activate.shares}
        if activate.first_step == self.step:
            self.share, self.total = shares[self.settings.group], activate.total
        actions: list[Action] = [DropKeys(epoch.number), self._note_activation(activate)]
        for rank in range(self.settings.ranks):
            actions.append(ToRanks(local.Build(plan=self._plan(rank)), rank))
        if activate.membership.base is not None:
            going_on = f"going on at step {activate.first_step} with {', '.join(membership.groups)}"
            actions.append(ToRanks(local.Say(line=f"{activate.cause}; {going_on} (epoch {epoch.number})"), 0))
        actions += self._answer_waiting(self._recover)
        return actions

    def _fence(self, fence: m.Fence, now: float) -> list[Action]:
        if self.errors and not self.exits:
            return []  # it is ending by itself, and still prints why
        return self._finish(exits.FENCED, f"left out of the job: {fence.reason}")

    def _stop(self, stop: m.Stop, now: float) -> list[Action]:
        self.stopped = stop
        if not stop.ok:
            self.last_words = f"the job stops: {stop.reason}"
        abort = local.Abort(below=1 << 62, reason=stop.reason)
        return [ToRanks(abort), *self._answer_waiting(self._stop_answer)]

    def _waiting(self, waiting: m.Waiting, now: float) -> list[Action]:
        whom, next_ms = self._waiting_said
        if not self.waiting or (waiting.whom == whom and waiting.since_ms < next_ms):
            return []
        self._waiting_said = (waiting.whom, 2.0 * waiting.since_ms)  # said less and less often
        line = f"waiting for {', '.join(waiting.whom)} ({waiting.why}) since {waiting.since_ms / 1000:.1f} s"
        return [ToRanks(local.Say(line=line), 0)]

    def _stands(self, stands: m.Stands, now: float) -> list[Action]:
        if self.suspended and self.known is not None and stands.epoch == self.known.epoch:
            self.suspended = False
            return self._decide()
        return []

    def _copy(self, copy: m.Copy, now: float) -> list[Action]:
        """Copies for joiners: at a boundary ahead, or now if the ranks stand at it; 0 releases."""
        if copy.step == 0:
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

    def _heal(self, heal: m.Heal, now: float) -> list[Action]:
        if self.following and not self.lost:
            return []  # from an earlier lighthouse's word: it has a state, and goes on from it
        self.source = heal
        self.votes.clear()
        donors = ", ".join(member.group for member in heal.donors)
        why = f"{heal.why}: it takes theirs" if heal.why else "joining"
        line = f"{why}; the state before step {heal.step} comes from {donors}"
        actions: list[Action] = [ToRanks(local.Say(line=line), 0)]
        return actions + self._heal_answers()

    def _heal_answers(self) -> list[Action]:
        return self._answer_waiting(self._heal_answer)

    def _heal_answer(self, rank: int) -> local.Answer | None:
        if self.source is None:
            return None
        donors = tuple((member.group, member.ranks[rank]) for member in self.source.donors if rank < len(member.ranks))
        return local.Answer(verdict="heal", source=local.Source(step=self.source.step, donors=donors))

    # ------------------------------------------------------------ ranks

    def register(self, message: local.Register, now: float) -> list[Action]:
        """A rank's socket stands."""
        self.registered[message.rank] = message
        return []

    def rank_says(self, rank: int, message: local.FromRank, now: float) -> list[Action]:
        """A rank's message (rendezvous keys are the service's)."""
        actions = self._mind_clock(now)
        if isinstance(message, local.Ready):
            return actions + self._rank_ready(rank, message, now)
        if isinstance(message, local.Vote):
            return actions + self._vote(rank, message, now)
        if isinstance(message, local.Built):
            if self.prepared and message.epoch == self.prepared[-1].epoch.number:
                self.built.add(rank)
        elif isinstance(message, local.RankError):
            self.errors[rank] = message
            self._raised_s = now
            note = schema.UserError(
                group=self.settings.group, rank=rank, step=message.step, type=message.type,
                message=message.message, traceback=message.traceback,
            )  # fmt: skip
            actions += [Note(note), Tell(self._died_of(rank, message, f"raised {message.type}: {message.message}"))]
        elif isinstance(message, local.AskLeave):
            self.leaving = self.leaving or message.reason
            actions.append(Tell(m.Leave(message.reason)))
        return actions

    def _rank_ready(self, rank: int, ready: local.Ready, now: float) -> list[Action]:
        self.ready[rank] = ready
        self.waiting[rank] = now
        self.total = ready.total
        if self.stopped is not None:
            return self._answer_waiting(self._stop_answer)
        if len(self.ready) < self.settings.ranks:
            return []
        return [Tell(self._join())]

    def _join(self) -> m.Join:
        ranks = tuple(self.registered[rank].transfer for rank in range(self.settings.ranks))
        signature = {}
        for rank, ready in sorted(self.ready.items()):
            for name, value in ready.signature.items():
                signature[f"rank {rank}: {name}" if rank else name] = value
        fingerprints = ",".join(ready.fingerprint for _, ready in sorted(self.ready.items()))
        return m.Join(ranks, signature, fingerprints)

    def _vote(self, rank: int, vote: local.Vote, now: float) -> list[Action]:
        self.waiting[rank] = now
        if self.stopped is not None:
            return self._answer_waiting(self._stop_answer)
        if self.decision is not None and self.decision[0] == (vote.epoch, vote.step, vote.attempt):
            del self.waiting[rank]
            return [ToRanks(self.decision[1], rank)]
        if vote.outcome in ("healed", "followed", "idle", "lost"):
            return self._joiner_votes(rank, vote)
        if self.known is None or vote.epoch < self.known.epoch.number:
            return self._answer_waiting(self._recover) + self._copy_if_standing()  # that epoch is over
        if vote.step != self.step or vote.epoch > self.known.epoch.number:
            stands = f"step {self.step} of epoch {self.known.epoch.number} stands"
            voted = f"rank {rank} voted on step {vote.step} of epoch {vote.epoch}"
            return self._finish(exits.STOPPED, f"a bug: {voted}, but {stands}")
        self.votes[rank] = vote
        if vote.outcome == "failed":
            return self._failed(rank, vote) + self._copy_if_standing()
        return self._decide() + self._copy_if_standing()

    def _failed(self, rank: int, vote: local.Vote) -> list[Action]:
        assert self.known is not None
        note = schema.ReduceFailed(
            group=self.settings.group, step=vote.step, epoch=vote.epoch, term=self.known.epoch.term.number, rank=rank,
            suspects=vote.suspects, error=vote.error,
        )  # fmt: skip
        actions: list[Action] = [Note(note)]
        if self.failed_epoch != vote.epoch and self.promised <= vote.epoch:
            self.failed_epoch = vote.epoch
            suspects = vote.suspects
            actions.append(ToRanks(local.Abort(below=vote.epoch + 1, reason=f"rank {rank}: {vote.error}")))
            actions.append(Tell(m.Failed(self.known.epoch, vote.step, vote.error, suspects)))
        return actions

    def _joiner_votes(self, rank: int, vote: local.Vote) -> list[Action]:
        """A rank of a group that is no member yet has healed, or applied an entry, or cannot go on."""
        if self.known is not None and vote.epoch < self.known.epoch.number:
            return self._answer_waiting(self._recover)  # it was named in a recovery
        if vote.outcome == "lost":
            self.source, self.following, self.lost = None, False, True
            return [Tell(m.Lost(vote.error))]
        if self.lost and vote.outcome != "healed":
            return self._answer_waiting(self._heal_answer)  # another rank needs a fresh copy: all of them take it
        self.votes[rank] = vote
        if len(self.votes) < self.settings.ranks:
            return []
        if len({(v.outcome, v.step, v.entry) for v in self.votes.values()}) > 1:
            return self._finish(exits.STOPPED, f"a bug: ranks of a joiner differ at step {vote.step}")
        self.lost = False
        return self._follow(self.votes[0])

    def _follow(self, vote: local.Vote) -> list[Action]:
        activates = False
        if vote.outcome in ("healed", "followed"):
            assert vote.entry is not None or vote.step == 0
            if vote.entry is not None:
                number, term, lighthouse = vote.entry
                self.last = Entry(Epoch(number, Term(term, lighthouse)), vote.step - 1)
            self.step, self.total, self.share, self.following = vote.step, vote.next_total, (), True
            standing = [p.epoch.number for p in self.prepared if p.epoch.number > self.promised]
            activates = vote.activates in standing
        if activates:
            self._switch(vote.activates)
            self.following = False
        number = 0 if self.known is None else self.known.epoch.number
        answer = local.Answer(verdict="go", epoch=number, step=self.step)
        self.votes.clear()
        return self._answer_waiting(lambda rank: answer)

    def _decide(self) -> list[Action]:
        """Decides the step once every rank has voted, unless its epoch is over or in doubt."""
        if self.known is None or self.suspended or len(self.votes) < self.settings.ranks:
            return []
        epoch = self.known.epoch
        outcomes = {vote.outcome for vote in self.votes.values()}
        if "failed" in outcomes or self.promised > epoch.number:
            return []
        if outcomes == {"adopted"}:
            assert self.activation is not None and self.activation.entry is not None
            return self._commit(self.activation.entry)
        if outcomes == {"closed"}:
            self.stopped = m.Stop(f"finished: step {self.step} is final", ok=True)
            finished = m.Finished(epoch, self.step)
            return [
                Tell(finished),
                Note(schema.Finished(group=self.settings.group, step=self.step)),
                *self._answer_waiting(self._stop_answer),
            ]
        if outcomes == {"reduced"}:
            return self._commit(Entry(epoch, self.step))
        if outcomes <= {"reduced", "again"}:
            answer = local.Answer(verdict="again", epoch=epoch.number, step=self.step)
            return self._decided(answer)
        return self._finish(exits.STOPPED, f"a bug: ranks voted {sorted(outcomes)} on step {self.step}")

    def _commit(self, entry: Entry) -> list[Action]:
        assert self.known is not None
        vote = self.votes[0]
        adopted = entry.epoch != self.known.epoch
        key = (self.known.epoch.number, self.step, vote.attempt)
        self.last, self.step, self.total = entry, entry.step + 1, vote.next_total
        leave = self._switch(vote.activates)
        first_here = self.activation is not None and self.activation.first_step == self.step and adopted
        if first_here:
            assert self.activation is not None
            shares = {share.group: share.microbatches for share in self.activation.shares}
            self.share, self.total = shares[self.settings.group], self.activation.total
        elif leave:
            self.share = ()
        else:
            self.share = self._dealt()
        built = bool(self.prepared) and len(self.built) == self.settings.ranks
        ready = self.prepared[-1].epoch.number if built else 0
        verdict = "leave" if leave else "go"
        answer = local.Answer(
            copy=self.copy_at == self.step,
            verdict=verdict,
            epoch=self.known.epoch.number,
            step=self.step,
            share=self.share,
            ready=ready,
            reason=self.leaving,
        )
        return self._decided(answer, key)

    def _dealt(self) -> tuple[int, ...]:
        """This group's share of the next step; a joiner's share of its first step is zero."""
        assert self.known is not None
        working = [name for name in self.known.groups if name not in self.joiners]
        self.joiners = frozenset()
        group = self.settings.group
        return deal(self.total, len(working))[working.index(group)] if group in working else ()

    def _switch(self, activates: int) -> bool:
        """A planned epoch comes into force by the entry; returns whether this group is not in it."""
        if not activates:
            return False
        (planned,) = [p for p in self.prepared if p.epoch.number == activates]  # all members had built it
        if self.known is not None:
            self.joiners = frozenset(planned.groups) - frozenset(self.known.groups)
        self.known, self.prepared, self.built, self.activation = planned, [], set(), None
        self.promised = max(self.promised, activates)
        return self.known.slot_of(self.settings.group, self.incarnation) is None

    def _decided(self, answer: local.Answer, key: tuple[int, int, int] | None = None) -> list[Action]:
        vote = self.votes[0]
        self.decision = (key or (vote.epoch, vote.step, vote.attempt), answer)
        self.votes.clear()
        return self._answer_waiting(lambda rank: answer)

    # ------------------------------------------------------------ answers

    def _answer_waiting(self, answer: Callable[[int], local.Answer | None]) -> list[Action]:
        actions: list[Action] = []
        for rank in sorted(self.waiting):
            given = answer(rank)
            if given is not None:
                del self.waiting[rank]
                actions.append(ToRanks(given, rank))
        return actions

    def _recover(self, rank: int) -> local.Answer | None:
        """What to do in the newest epoch, or None while it is not activated yet."""
        if self.activation is None or self.known is None or self.promised > self.known.epoch.number:
            return None
        if self.known != self.activation.membership:
            return None
        return local.Answer(verdict="recover", epoch=self.known.epoch.number, step=self.step, plan=self._plan(rank))

    def _stop_answer(self, rank: int) -> local.Answer:
        assert self.stopped is not None
        return local.Answer(verdict="stop", step=self.step, reason=self.stopped.reason, ok=self.stopped.ok)

    def _plan(self, rank: int) -> local.Plan:
        assert self.activation is not None
        return plan_for(
            self.activation.membership,
            self.settings.group,
            self.step,
            self.share,
            self.total,
            self.activation,
            rank,
        )

    # ------------------------------------------------------------ ends

    def rank_ended(self, rank: int, exit_code: int | None, view: RankView | None, now: float) -> list[Action]:
        """A rank's process ended; `exit_code` is negative for a signal, None if nobody could tell."""
        if rank in self.exits:
            return []
        done = self.stopped is not None or self._left()
        if exit_code is None:
            ended_well = view is not None and view.phase == "ended"
            exit_code = 1 if rank in self.errors else 0 if ended_well else None
        self.exits[rank] = exit_code
        if self.ending is not None:
            return []
        if exit_code == 0 and done:
            if len(self.exits) < self.settings.ranks:
                return []
            code = 0 if self.stopped is None or self.stopped.ok else exits.STOPPED
            return self._end(code, self.stopped.reason if self.stopped else self.leaving)
        if done and self.stopped is not None and not self.stopped.ok and rank not in self.errors:
            return self._finish(exits.STOPPED, self.stopped.reason)
        return self._died(rank, exit_code, view)

    def asked_to_leave(self, reason: str, now: float) -> list[Action]:
        """The launcher was asked to leave (a signal): at a step boundary; asked twice, at once."""
        if self.leaving or self.known is None:
            tell = Tell(m.Died(f"{reason}: asked to end at once", 0, "", self.step))
            return [tell, *self._finish(exits.ASKED, f"{reason}: asked to end at once")]
        self.leaving = reason
        return [Tell(m.Leave(reason))]

    def helper_ended(self, name: str, exit_code: int, now: float) -> list[Action]:
        """A process between manager and ranks ended before them."""
        if self.ending is not None or self.stopped is not None or self._left() or self.exits or self.errors:
            return []
        if exit_code == 0 and not self.registered:
            return self._end(0, "the script ended without using a Manager")
        cause = f"its helper process {name} {describe_exit(exit_code)}"
        tell = Tell(m.Died(cause, 0, "", self.step))
        return [tell, *self._finish(1, cause)]

    def _died(self, rank: int, exit_code: int | None, view: RankView | None) -> list[Action]:
        error = self.errors.get(rank)
        cause = f"rank {rank} {describe_exit(exit_code)}"
        phase, step = (view.phase, view.step) if view else ("", self.step)
        if exit_code == 0:
            cause += " before the run was closed"
        tell = Tell(m.Died(cause, rank, phase, step))
        if error is not None:
            cause += f" after {error.type}: {error.message}"
            tell = Tell(self._died_of(rank, error, describe_exit(exit_code) + f" after {error.type}: {error.message}"))
        code = 1 if not exit_code else exit_code if exit_code > 0 else 128 - exit_code
        return [tell, *self._finish(code, cause)]

    def _died_of(self, rank: int, error: local.RankError, how: str) -> m.Died:
        """Said as soon as the exception ends the loop: an interpreter may take seconds to exit after it."""
        user_error = m.UserError(error.step, error.type, error.message, error.where)
        return m.Died(f"rank {rank} {how}", rank, "", error.step, user_error)

    def _left(self) -> bool:
        return self.decision is not None and self.decision[1].verdict == "leave"

    def _finish(self, exit_code: int, reason: str) -> list[Action]:
        """Kills what is left of the group and ends."""
        if self.ending is not None:
            return []
        return [*self._end(exit_code, reason), Kill(reason)]  # the reason is said before anything is killed

    def _end(self, exit_code: int, reason: str) -> list[Action]:
        self.ending = reason
        return [End(exit_code, reason)]

    # ------------------------------------------------------------ time

    def tick(self, views: dict[int, RankView], now: float) -> list[Action]:
        """Beats, and gives up what was waited for longer than the outage budget."""
        actions = self._mind_clock(now)
        if self.ending is not None:
            return actions
        actions.append(Tell(self._beat(views)))
        if self.errors and now - self._raised_s > ENDS_S_MAX:
            return actions + self._finish(1, "a rank that raised did not end")
        budget_s = self.settings.outage_budget_s if self.known is not None else self.settings.start_budget_s
        waited_s = max((now - since for since in self.waiting.values()), default=0.0)
        if not self.in_touch and waited_s > self._say_after_s:
            self._say_after_s = 2 * waited_s
            line = (
                f"step {self.step} stands since {waited_s:.0f} s: the lighthouse at {self.settings.lighthouse} is away"
            )
            actions.append(ToRanks(local.Say(line=line), 0))
        elif not self.waiting:
            self._say_after_s = SAY_AFTER_S
        if self.known is None and not self.in_touch:
            silent_s = now - self._silent_since
            if silent_s > self.settings.outage_budget_s:
                return actions + self._give_up(
                    f"the lighthouse at {self.settings.lighthouse} could not be reached for {silent_s:.0f} s"
                )
        if waited_s > budget_s:
            where = "" if self.in_touch else f"; the lighthouse at {self.settings.lighthouse} is not in touch"
            return actions + self._give_up(
                f"step {self.step} has been waiting for {waited_s:.0f} s, longer than the outage budget{where}"
            )
        return actions

    def _give_up(self, reason: str) -> list[Action]:
        return [Tell(m.Died(reason, 0, "", self.step)), *self._finish(exits.GAVE_UP, reason)]

    def _beat(self, views: dict[int, RankView]) -> m.Beat:
        waiting_s = max((view.waiting_s for view in views.values()), default=0.0)
        stopped_s = max((view.stopped_s for view in views.values()), default=0.0)
        phases = [view.phase for view in views.values()]
        phase = next((p for p in phases if p == "compute"), phases[0] if phases else "start")
        number = 0 if self.known is None else self.known.epoch.number
        return m.Beat(number, self.step, phase, round(waiting_s * 1000), round(stopped_s * 1000))

    def _mind_clock(self, now: float) -> list[Action]:
        """A gap longer than the lease in this process's own clock: it was frozen, and may have been left out."""
        gap_s, self._clock = now - self._clock, now
        if gap_s <= self.lease_s or self.known is None or self.suspended:
            return []
        self.suspended = True
        return [Tell(m.Query(self.known.epoch))]

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
            )
        )
