"""The votes of a member's ranks on a step, decided once for all of them.

If all ranks voted "reduced" before a recovery's `Prepare`, the group has committed; otherwise it has not, and later
votes are answered "recover".
"""

from __future__ import annotations

from lightkeeper.events import schema
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.deal import deal
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, Note, Tell, ToRanks
from lightkeeper.manager.briefly import briefly
from lightkeeper.manager.joins import Joins


class Votes(Joins):
    """A group whose ranks vote."""

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
        if vote.echo:
            return actions  # the rank where it failed names who is to blame
        if self.failed_epoch != vote.epoch and self.promised <= vote.epoch:
            self.failed_epoch = vote.epoch
            self.suspects, self.failure = vote.suspects, briefly(vote.error)  # the note has all of it
            actions.append(ToRanks(local.Abort(below=vote.epoch + 1, reason=f"rank {rank}: {self.failure}")))
            actions.append(Tell(m.Failed(self.known.epoch, vote.step, self.failure, self.suspects)))
        return actions

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
        actions = self._switch(vote.activates)
        leave = self.known.slot_of(self.settings.group, self.incarnation) is None
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
        if leave:
            actions.append(Tell(m.Left(self.known.epoch, self.step)))
        return actions + self._decided(answer, key)

    def _dealt(self) -> tuple[int, ...]:
        """This group's share of the next step; a joiner's share of its first step is zero."""
        assert self.known is not None
        slots = [slot for slot, name in enumerate(self.known.groups) if name not in self.joiners]
        self.joiners = frozenset()
        slot = self.known.slot_of(self.settings.group)
        if slot not in slots:
            return ()
        return deal(self.total, [self.known.speed_of(s) for s in slots])[slots.index(slot)]

    def _decided(self, answer: local.Answer, key: tuple[int, int, int] | None = None) -> list[Action]:
        vote = self.votes[0]
        self.decision = (key or (vote.epoch, vote.step, vote.attempt), answer)
        self.votes.clear()
        return self._answer_waiting(lambda rank: answer)
