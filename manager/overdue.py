"""A group whose ranks are watched for progress: which of them is stuck, and what follows from that.

To be stuck is no reason to be left out. Its manager says so to the lighthouse, which leaves the group out once another
one stands for it. If nobody ever does (all groups wait for one storage, or there is only this one) it ends, but not
before a reduce would have been given up: nothing waits without a bound.
"""

from __future__ import annotations

from dataclasses import replace

from lightkeeper.events.of_progress import Armed, Stuck
from lightkeeper.lighthouse import messages as m
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, Collect, Note, ToRanks
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.deadlines import Deadlines
from lightkeeper.manager.folding import fold_views
from lightkeeper.manager.leaving import Leaving
from lightkeeper.manager.progress import EXPECTED, STANDING
from lightkeeper.manager.settings import Settings

DOING_MAX = 16  # kinds of doing that one beat tells
MAY_SAVE = ("apply", *EXPECTED)  # in these a script may well do what must come to its end


class Overdues(Leaving):
    """A group that may hold stuck ranks."""

    def __init__(self, settings: Settings, incarnation: str, address: str, now: float) -> None:
        super().__init__(settings, incarnation, address, now)
        self.deadlines = Deadlines(settings.timeouts.stall_floor_s, settings.timeouts.first_step_s)
        self.overdue: m.Overdue | None = None
        self._said_stuck: set[tuple[int, str, int]] = set()  # rank, phase, step
        self._armed = False
        self._answered: dict[int, float] = {}  # ranks that seem to wait for an answer which they were given, since when
        self.aborted_at: float | None = None  # when ranks were last told that the epoch they stand in is over

    def _mind_progress(self, now: float) -> list[Action]:
        """Looks at what the ranks do."""
        self.deadlines.floor_s = self.settings.timeouts.stall_floor(self.lease_s)
        overdue = self.deadlines.look({r: self._as_told(r, view, now) for r, view in self._views.items()}, now)
        if self.errors or self.died is not None:
            overdue = []  # it ends: an interpreter may take its time over that
        self.overdue = overdue[0] if overdue else None
        actions = self._say_armed()
        if self.keeping_since is not None:
            return actions + self._mind_save(now)
        for one in overdue:
            actions += self._say_stuck(one)
        if not overdue:
            self._said_stuck.clear()
        elif self.stopped is not None and overdue[0].phase not in MAY_SAVE:
            return actions + self._outlives(overdue[0])
        elif overdue[0].idle_ms > 1000 * self.settings.timeouts.reduce_timeout_s:
            return actions + self._hangs(overdue[0])
        return actions

    def _as_told(self, rank: int, view: RankView, now: float) -> RankView:
        """A rank that was given its answer, or told that what it stands in is over, and does not get on is at its own
        turn, whatever its page says.
        """
        if self.aborted_at is not None and view.phase in STANDING and view.waiting_s > now - self.aborted_at:
            return replace(view, idle_s=now - self.aborted_at)  # what it waits in does not let it go
        if not view.asks_s or rank in self.waiting:
            self._answered.pop(rank, None)
            return view
        return replace(view, idle_s=min(view.asks_s, now - self._answered.setdefault(rank, now)))

    def _mind_save(self, now: float) -> list[Action]:
        """The job has ended, and ranks here save its last committed step: none of them is stuck before that is over."""
        assert self.stopped is not None and self.keeping_since is not None
        bound_s = self.settings.timeouts.stop_deadline_s
        if self.ending is not None or now - self.keeping_since <= bound_s:
            return []
        ranks = ", ".join(str(rank) for rank in range(self.settings.ranks) if rank not in self.exits)
        cause = (
            f"rank {ranks} has not ended {bound_s:g} s after it was told to keep step {self.step - 1} (stop_deadline_s)"
        )
        return self._finish(exits.GAVE_UP if self.stopped.ok else self._stopped_code(), cause, "gave up")

    def _outlives(self, overdue: m.Overdue) -> list[Action]:
        """The job has ended, and a rank does not come to hear it."""
        assert self.stopped is not None
        code = exits.GAVE_UP if self.stopped.ok else self._stopped_code()
        return self._finish(code, f"{in_words(overdue)}; the job has ended meanwhile: {self.stopped.reason}")

    def _say_armed(self) -> list[Action]:
        deadlines = self.deadlines.news()
        if deadlines is None:
            return []
        actions: list[Action] = [Note(Armed(group=self.settings.group, deadlines=deadlines, learnt=True))]
        if not self._armed:
            self._armed = True
            told = ", ".join(f"{phase} {deadline_s:.0f} s" for phase, deadline_s in deadlines.items())
            actions.append(ToRanks(local.Say(line=f"watches for ranks that make no progress: {told}"), 0))
        return actions

    def _say_stuck(self, overdue: m.Overdue) -> list[Action]:
        view = self._views[overdue.rank]
        key = (overdue.rank, overdue.phase, overdue.step)
        if key in self._said_stuck:
            return []
        self._said_stuck.add(key)
        how = self.deadlines.how(overdue.rank, view)
        stuck = Stuck(
            group=self.settings.group, rank=overdue.rank, phase=overdue.phase, step=overdue.step,
            since_s=overdue.idle_ms / 1000, deadline_s=overdue.deadline_ms / 1000, how=how,
            state=view.state,
        )  # fmt: skip
        said = in_words(overdue)
        return [Note(stuck), ToRanks(local.Say(line=said), overdue.rank), Collect("stuck", said, overdue.step)]

    def _hangs(self, overdue: m.Overdue) -> list[Action]:
        """Nobody has left this group out for it: nobody stands for it, or no lighthouse is there."""
        cause = f"{in_words(overdue)}; nobody else has got on either"
        return self._give_up(cause)

    def _doing(self) -> tuple[m.Doing, ...]:
        """What the ranks do, for a beat."""
        return tuple(
            m.Doing(one.ranks, one.view.phase, one.view.step, *map(_ms, _times(one.view)))
            for one in fold_views(self._views)[:DOING_MAX]
        )


def in_words(overdue: m.Overdue) -> str:
    """``rank 1 has made no progress in compute of step 12 for 16.0 s (15.0 s are borne)``."""
    where = f"{overdue.phase} of step {overdue.step}"
    borne = f"{overdue.deadline_ms / 1000:.1f} s are borne"
    return f"rank {overdue.rank} has made no progress in {where} for {overdue.idle_ms / 1000:.1f} s ({borne})"


def _times(view: RankView) -> tuple[float, float, float]:
    return view.idle_s, view.waiting_s, view.stopped_s


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
