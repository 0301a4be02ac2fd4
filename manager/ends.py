"""How a group ends: its ranks end, or there is nothing left to wait for.

What can be said of the end is said before anything is killed.
"""

from __future__ import annotations

from lightkeeper.events import schema
from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, Collect, End, Kill, Note, Tell
from lightkeeper.manager.answers import Answers, RankView
from lightkeeper.manager.briefly import briefly
from lightkeeper.manager.exits import describe_exit

NO_MANAGER = "the script ended without making a lightkeeper.Manager: nothing of it was kept going"
ENDS_S_MAX = 10.0  # for an interpreter to end after an exception
CAUSE_S_MAX = 1.0  # within which the rank shows whose end broke the collectives of the others


class Ends(Answers):
    """A group that ends."""

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
        if exit_code == 0 and not self.registered:
            if len(self.exits) < self.settings.ranks:
                return []
            return self._end(0, NO_MANAGER)
        if exit_code == 0 and done:
            if len(self.exits) < self.settings.ranks:
                return []
            return self._end(self._stopped_code(), self.stopped.reason if self.stopped else self.leaving)
        if done and self.stopped is not None and not self.stopped.ok and rank not in self.errors:
            killed = exit_code is not None and exit_code < 0
            if self.keeping_since is not None and not killed and len(self.exits) < self.settings.ranks:
                return []  # the others may still be saving
            return self._finish(self._stopped_code(), self.stopped.reason)
        if rank in self.victims:
            return []  # whose end broke its collectives shows soon
        return self._died(rank, exit_code, view)

    def _stopped_code(self) -> int:
        """What a group ends with that has left, or was told to stop."""
        if self.stopped is None or self.stopped.ok:
            return 0
        return exits.GAVE_UP if self.stopped.quorum_lost else exits.STOPPED

    def _raised(self, rank: int, error: local.RankError, now: float) -> list[Action]:
        """An exception is about to end a rank: the user's bug, unless another rank's end is its cause."""
        done = self.ending is not None or self.stopped is not None or self._left()
        if error.broken and self.settings.ranks > 1:
            if done or self.errors:
                return []
            self._broke_s = now if not self.victims else self._broke_s
            self.victims[rank] = error
            return self._came_apart() if len(self.victims) == self.settings.ranks else []
        if self.ending is not None:
            return []
        first = not self.errors
        self.errors[rank] = error
        self._raised_s = now
        note = Note(
            schema.UserError(
                group=self.settings.group, rank=rank, step=error.step, type=error.type, message=error.message,
                traceback=error.traceback,
            )
        )  # fmt: skip
        how = f"raised {error.type}: {briefly(error.message)}"
        return [note, Tell(self._died_of(rank, error, how))] if first else [note]

    def _cause_overdue(self, now: float) -> bool:
        """Whether collectives broke, and no rank ended or raised that could be the cause."""
        return bool(self.victims) and not self.errors and now - self._broke_s > CAUSE_S_MAX

    def _came_apart(self) -> list[Action]:
        """The ranks of this group lost each other, though none of them died: the network's fault, not the user's."""
        rank, error = min(self.victims.items())
        cause = f"rank {rank} lost its connection to the other ranks of the group: {briefly(error.message)}"
        self.died = m.Died(cause, -1, "", error.step)
        return [Tell(self.died), *self._finish(exits.ORPHANED, cause)]

    @property
    def owes_word(self) -> bool:
        """Whether members that stand may be waiting for the word that this group, one of them, is fenced."""
        member = self.known is not None and self.known.slot_of(self.settings.group, self.incarnation) is not None
        others = self.known is not None and len(self.known.members) > 1
        return self.died is not None and member and others and not self.death_known

    def node_gone(self, cause: str, rank: int, now: float) -> list[Action]:
        """A node of this group is gone, and its ranks with it; `rank` is the first of them."""
        if self.ending is not None:
            return []
        self.died = m.Died(cause, rank, "", self.step)
        return [Tell(self.died), *self._finish(exits.ORPHANED, cause)]

    def gives_up(self, reason: str, now: float) -> list[Action]:
        """What is needed for a start did not come."""
        return [] if self.ending is not None else self._give_up(reason)

    def _died(self, rank: int, exit_code: int | None, view: RankView | None) -> list[Action]:
        error = self.errors.get(rank)
        cause = f"rank {rank} {describe_exit(exit_code)}"
        phase, step = (view.phase, view.step) if view else ("", self.step)
        if exit_code == 0:
            cause += f" before the run was closed{self._where_it_left(rank, step)}"
        self.died = m.Died(cause, rank, phase, step)
        if error is not None:
            after = f" after {error.type}: {briefly(error.message)}"
            self.died = self._died_of(rank, error, describe_exit(exit_code) + after)
            cause += f" after {error.type} at step {error.step}, which it has printed"
        code = 1 if not exit_code else exit_code if exit_code > 0 else 128 - exit_code
        return [Tell(self.died), *self._finish(code, cause)]

    def _where_it_left(self, rank: int, step: int) -> str:
        """What to do about a loop that was left early. The loop's generator cannot do it: an exception in the loop's
        body closes it just as `break` does.
        """
        if rank not in self.ready:
            return ": it began no step" if rank in self.registered else ": it made no Manager"
        until = self.ready[rank].signature.get("until", "None")
        where = "the loop" if until == "None" else "the loop over manager.steps()"
        of = "" if until == "None" else f" of {until}"
        return f": {where} was left at step {step}{of}; call manager.finish() to end the run early, in all groups"

    def _stopped_in_words(self, reason: str) -> str:
        """Why the job stops, without the text of an exception that a rank of this group has printed itself."""
        for error in self.errors.values():
            reason = reason.partition(f": {error.type}: ")[0]
        return f"the job stops: {reason}"

    def _does_not_end(self) -> list[Action]:
        """An interpreter that goes on after the exception that ended its loop."""
        rank, error = next(iter(self.errors.items()))
        what = f"rank {rank} raised {error.type}: {briefly(error.message)}"
        return self._finish(1, f"{what}; it is killed, since it has not ended {ENDS_S_MAX:.0f} s after that")

    def _died_of(self, rank: int, error: local.RankError, how: str) -> m.Died:
        """Said as soon as the exception ends the loop: an interpreter may take seconds to exit after it."""
        user_error = m.UserError(error.step, error.type, briefly(error.message), error.where)
        return m.Died(f"rank {rank} {how}", rank, "", error.step, user_error)

    def _give_up(self, reason: str) -> list[Action]:
        tell = Tell(m.Died(reason, -1, "", self.step))
        return [tell, *self._finish(exits.GAVE_UP, f"{reason}; start this group again")]

    def _finish(self, exit_code: int, reason: str, why: str = "") -> list[Action]:
        """Kills what is left of the group and ends; `why` is what its evidence is called, if not by the exit code."""
        if self.ending is not None:
            return []
        why = why or self._word_for(exit_code)
        collect = [Collect(why, reason, self.step)] if why else []
        return [*collect, *self._end(exit_code, reason), Kill(reason)]  # the reason is said before anything is killed

    def _word_for(self, exit_code: int) -> str:
        """What an end is called in the name of its evidence; empty for one of which none is wanted."""
        if exit_code in (0, exits.REFUSED, exits.STOPPED, exits.ASKED) or (not self.registered and not self.exits):
            return ""
        if self.stopped is not None and exit_code == self._stopped_code():
            return ""  # the others are told to stop as well: nothing is wrong here
        known = {exits.FENCED: "left out", exits.GAVE_UP: "gave up", exits.ORPHANED: "apart"}
        if exit_code in known:
            return known[exit_code]
        if self.errors:
            return "raised"
        return "killed" if any(code is None or code < 0 for code in self.exits.values()) else "exited"

    def _end(self, exit_code: int, reason: str) -> list[Action]:
        self.ending = reason
        return [End(exit_code, reason)]
