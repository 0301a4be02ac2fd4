"""A rank of a group that is not a member yet: it heals, applies the members' entries, and is switched in."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import local
from lightkeeper.manager.joining import WAIT_S
from lightkeeper.manager.progress import PEERS
from lightkeeper.manager.rank import Rank
from lightkeeper.manager.reducer import Outcome
from lightkeeper.manager.state.registry import UNNAMED
from lightkeeper.manager.step import LoopError, Step
from lightkeeper.manager.transfer.client import TransferFailed

if TYPE_CHECKING:
    from lightkeeper.manager.trainer import Manager


class Follower(Rank):
    """What a rank does until its group is a member."""

    def _heal(self, answer: local.Answer) -> None:
        """Takes the members' state, until it follows them or is named in a recovery."""
        while answer.verdict == "heal":
            assert answer.source is not None
            self._enter("heal", self.page.step)
            try:
                with self.page.waiting(PEERS):
                    fetched = self._joiner.fetch(answer.source)
            except TransferFailed as error:
                vote = local.Vote(epoch=0, step=self.page.step, outcome="lost", error=str(error), torn=error.torn)
                answer = self._ask(vote)
                continue
            self._entries.healed(fetched.name)
            self._record.healed(fetched)
            self.page.enter("replay", fetched.name.step + 1)
            for watcher in self._watchers:
                watcher.healed()
            answer = self._ask(self._joiner_vote("healed"))
        self._follows = answer.verdict == "go"
        if answer.verdict == "recover":
            self._begin_at(self.page.step)
            self._named(answer)
        elif not self._follows:
            self._stop(answer)

    def _joiner_vote(self, outcome: str, activates: int = 0) -> local.Vote:
        name = self._entries.newest
        entry = None if name == UNNAMED else _triple(name)
        step = name.step + 1
        return local.Vote(
            epoch=0, step=step, outcome=outcome, next_total=self._total(step), activates=activates, entry=entry
        )

    def _begin_replay(self) -> Step:
        """Waits for the next entry; the step that applies it has no share here. Or the group is a member by now."""
        assert self._reducer is not None
        while self._follows:
            index = self.page.step
            self._begin_at(index)
            try:
                found = self._joiner.next_entry(self._entries.newest, self._reducer, wait_s=0.0)
                if found is None:
                    self._enter("follow", index)  # it has caught up
                    with self.page.waiting(PEERS):
                        found = self._joiner.next_entry(self._entries.newest, self._reducer, WAIT_S)
            except TransferFailed as error:
                vote = local.Vote(epoch=0, step=index, outcome="lost", error=str(error))
                self._after_waiting(self._ask(vote))
                continue
            if found is None:
                self._after_waiting(self._ask(self._joiner_vote("idle")))
            elif self._follow(index, *found):
                self._step = Step(cast("Manager", self), index, self._total(index), (), lead=False, live=False)
                return self._step
        index = self.page.step
        if not self._applies:
            self._start_step()
        share = () if self._applies else self._open_share()
        live = not self._applies
        self._step = Step(cast("Manager", self), index, self._total(index), share, lead=self.leads, live=live)
        self._applies = False
        self._enter("compute", index)
        return self._step

    def _after_waiting(self, answer: local.Answer) -> None:
        """What the group does when no entry came: goes on waiting, heals anew, or is named in a recovery."""
        if answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict == "recover":
            self._named(answer)
        elif answer.verdict != "go":
            self._stop(answer)

    def _named(self, answer: local.Answer) -> None:
        """This group is a member by a recovery, which may have committed the step at hand."""
        self._follows = False
        self._applies = self._recover(answer) == "committed"
        self._record.rejoined(self.page.step)

    def _follow(self, index: int, name: Entry, outcome: Outcome) -> bool:
        """The group votes on the entry in the buffers before the loop's body sees it.

        The others of its ranks may need a fresh copy, or it may be named in a recovery that does the step anew; nothing
        of the step has happened in the loop by then. The entry may be the one that makes this group a member.

        Returns:
            Whether the entry is to be applied.
        """
        self._reduced_as, self._outcome = name, outcome
        if outcome.problem is not None:
            raise LoopError(f"step {index}: the entry is wrong and is not applied: {outcome.problem}")
        vote = local.Vote(
            epoch=0, step=index + 1, outcome="followed", next_total=self._total(index + 1),
            activates=outcome.ready, entry=_triple(name),
        )  # fmt: skip
        answer = self._ask(vote)
        if answer.verdict != "go":
            self._after_waiting(answer)
            return False
        if answer.epoch:
            self._follows = False
            self._share, self._ready = (), 0
            self._switch(answer.epoch)
            self._record.rejoined(index + 1)
        return True


def _triple(name: Entry) -> tuple[int, int, str]:
    return name.epoch.number, name.epoch.term.number, name.epoch.term.lighthouse
