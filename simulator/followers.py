"""A rank of a group that is not a member yet: it heals, applies the members' entries, and is switched in.

What ``manager/follower.py`` and ``manager/joining.py`` do.
"""

from __future__ import annotations

from lightkeeper.manager import local
from lightkeeper.simulator.holder import Never
from lightkeeper.simulator.ranks import Rank
from lightkeeper.simulator.state import UNNAMED, Reduced, State

LOOK_S = 0.05
ENTRY_S = (0.002, 0.02)
WAIT_S = 0.5  # at a donor for the next entry, before the manager is asked whether anything changed


class Follower(Rank):
    """What a rank does until its group is a member, and from then on."""

    def start(self) -> None:
        """It stands before its first step."""
        self._donors: list[Rank] = []
        self.world.transfers[self.address] = self
        step, fingerprint = self.step, str(self.state.bits)
        ready = local.Ready(signature={}, total=self.world.total(step), fingerprint=fingerprint, step=step)
        self.ask(ready, self._started, phase="join")

    def _started(self, answer: local.Answer) -> None:
        if answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict == "recover":
            self.recover(answer)
        else:
            self.stop(answer)

    # ------------------------------------------------------------ the state

    def _heal(self, answer: local.Answer) -> None:
        assert answer.source is not None
        self.enter("heal")
        self.source = answer.source
        self._look(self.clock.now + self.group.settings.outage_budget_s)

    def _look(self, until: float) -> None:
        """Waits for donors to reach the boundary, which may be named anew meanwhile."""
        source = self.source
        donors = [self.world.transfers.get(address) for _, address in source.donors]
        living = [donor for donor in donors if donor is not None and self.world.reaches(self, donor)]
        if not living:
            self._lost("no donor is left", torn=False)
            return
        holding = [d for d in living if d.holder.copy is not None and d.holder.copy.step + 1 >= source.step]
        if not holding:
            if self.clock.now > until:
                self._lost("no donor has reached the boundary", torn=False)
            else:
                self.later(LOOK_S, self._look, until)
            return
        copy = holding[0].holder.copy
        assert copy is not None
        alike = [d for d in holding if d.holder.copy is not None and d.holder.copy.name == copy.name]
        self._donors = living
        self.later(self.clock.uniform(*self.world.shape.copy_s), self._fetched, copy, alike)

    def _fetched(self, copy: State, donors: list[Rank]) -> None:
        """Ranges of one name from all donors; it is whole if one of them was there until the end."""
        left = [d for d in donors if d.alive and self.world.reaches(self, d)]
        if not left or self.world.copy_breaks():
            self._lost("the copy broke off", torn=True)
            return
        self.world.checkers.overwrites(self)
        self.set_state(copy)
        self.holder.newest = None
        self.ask(self._vote_on("healed"), self._after_heal)

    def _lost(self, error: str, torn: bool) -> None:
        vote = local.Vote(epoch=0, step=self.step, outcome="lost", error=error, torn=torn)
        self.ask(vote, self._after_heal)

    def _after_heal(self, answer: local.Answer) -> None:
        if answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict == "recover":
            self.recover(answer)
        elif answer.verdict == "go":
            self._replay()
        else:
            self.stop(answer)

    # ------------------------------------------------------------ the entries

    def _replay(self) -> None:
        if self.step == self.world.shape.until:
            self.enter("follow")
            self.later(WAIT_S / 5, self._ask_idle)
            return
        self.enter("replay")
        self.later(self.clock.uniform(*ENTRY_S), self._next_entry, None)

    def _next_entry(self, until: float | None) -> None:
        """The entry that follows on the state here, from the first donor that has it."""
        found, failed = None, True
        for donor in list(self._donors):
            if not donor.alive or not self.world.reaches(self, donor):
                self._donors.remove(donor)
                continue
            try:
                found, failed = donor.holder.after(self.state.name), False
                break
            except Never:
                self._donors.append(self._donors.pop(0))
        if failed:
            self._lost("no donor has the entry that follows", torn=False)
        elif found is not None:
            self._follow(found)
        elif until is None:
            self.enter("follow")  # it has caught up
            self.later(LOOK_S, self._next_entry, self.clock.now + WAIT_S)
        elif self.clock.now < until:
            self.later(LOOK_S, self._next_entry, until)
        else:
            self._ask_idle()

    def _ask_idle(self) -> None:
        self.ask(self._vote_on("idle"), self._after_heal, phase="follow")

    def _follow(self, entry: Reduced) -> None:
        self.pending = entry
        step = self.step + 1
        vote = local.Vote(
            epoch=0, step=step, outcome="followed", next_total=self.world.total(step), activates=entry.ready,
            entry=_triple(entry),
        )  # fmt: skip
        self.ask(vote, self._followed, phase="replay")

    def _followed(self, answer: local.Answer) -> None:
        if answer.verdict == "recover":
            self.recover(answer)
        elif answer.verdict == "heal":
            self._heal(answer)
        elif answer.verdict != "go":
            self.stop(answer)
        else:
            assert self.pending is not None
            entry, self.pending = self.pending, None
            self._apply(entry)
            self.holder.at_boundary()
            if answer.epoch:
                self.share, self.ready = (), 0
                self.switch(answer.epoch)
                self.begin()
            else:
                self._replay()

    def _vote_on(self, outcome: str) -> local.Vote:
        name = self.state.name
        entry = None if name == UNNAMED else (name.epoch.number, name.epoch.term.number, name.epoch.term.lighthouse)
        return local.Vote(
            epoch=0, step=self.step, outcome=outcome, next_total=self.world.total(self.step), entry=entry
        )  # fmt: skip


def _triple(entry: Reduced) -> tuple[int, int, str]:
    epoch = entry.name.epoch
    return epoch.number, epoch.term.number, epoch.term.lighthouse
