"""One group's state, and what its waiting ranks are answered from it. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Membership, Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import Action, ToRanks
from lightkeeper.manager.beats import Beats
from lightkeeper.manager.plans import plan_for
from lightkeeper.manager.settings import Settings

SAY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class RankView:
    """What the manager sees of a rank from outside.

    Attributes:
        waiting_s: how long it has been standing in a reduce, 0 if it does not.
        stopped_s: how long it has been stopped by a signal, 0 if it is not.
        microbatch_us: microseconds that it takes for a microbatch, 0 if that is not known.
        idle_s: how long it has done nothing new though it waits for nobody, 0 if it waits or gets on.
        expected_s: how long it said this would take, 0 if it said nothing.
        wait_us: microseconds that it waits for the other groups in a step, 0 if that is not known.
        asks_s: how long it has been waiting for an answer of ours, 0 if it does not.
        state: what its process does ("running", "sleeping", ...) while it does nothing new; "" if nobody looked.
    """

    phase: str
    step: int
    waiting_s: float
    stopped_s: float
    microbatch_us: int = 0
    idle_s: float = 0.0
    expected_s: float = 0.0
    wait_us: int = 0
    asks_s: float = 0.0
    state: str = ""


class Answers:
    """The state of one group.

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
        self.deferred: Membership | None = None  # planned on one of `prepared`, which is not in force here yet
        self.why_planned: dict[int, str] = {}  # by the number of a planned epoch: why those who leave do
        self.promised = 0
        self.last: Entry | None = None
        self.step, self.total, self.share = 0, 0, ()  # type: tuple[int, int, tuple[int, ...]]
        self.activation: m.Activate | None = None
        self.registered: dict[int, local.Register] = {}
        self.ready: dict[int, local.Ready] = {}
        self.votes: dict[int, local.Vote] = {}
        self.waiting: dict[int, float] = {}
        self.built: set[int] = set()
        self.unbuilt: m.Unbuilt | None = None  # the last word on a planned epoch that cannot be built here
        self.decision: tuple[tuple[int, int, int], local.Answer] | None = None
        self.attempt = 0
        self.errors: dict[int, local.RankError] = {}
        self.exits: dict[int, int | None] = {}
        self.victims: dict[int, local.RankError] = {}  # ranks whose collectives broke, while nobody knows why
        self._broke_s = 0.0
        self.failed_epoch: int | None = None
        self.suspended = False
        self._ask_members_s = 0.0
        self._slept_s, self._doubtful = 0.0, ""  # how long it was frozen, and who has not said that its epoch stands
        self._reduce_told_s, self._tell_who_answers = SAY_AFTER_S, False  # of ranks that stand in a reduce
        self._unheard = (0, "")  # the step in whose reduce they stood, and whose managers did not answer
        self.ending: str | None = None
        self.stopped: m.Stop | None = None
        self.keeping_since: float | None = None  # since when ranks here may be saving the job's last committed step
        self.last_words = ""
        self.in_touch = False
        self.died: m.Died | None = None  # how this group ended, for a lighthouse that has yet to be told
        self.death_known = False
        self.suspects: tuple[str, ...] = ()  # as in the vote of the newest failed reduce
        self.failure = ""  # what that reduce failed of, briefly
        self.standby = ""  # what the lighthouse that was reached last answered, if it does not take this group in
        self.leaving = ""  # why it was asked to leave, once it was
        self._asked_s = now  # when
        self._signalled: frozenset[str] = frozenset()  # processes that got a signal
        self._leave_by_s: float | None = None
        self._leave_within_s = 0.0  # as it was asked
        self.copy_at: int | None = None
        self.source: m.Heal | None = None
        self.following, self.lost = False, True
        self.healed = False  # whether the state here came from other groups
        self.fetching: set[int] = set()  # ranks that were told to take the members' state
        self.lost_why = ""  # said to a lighthouse, until it names another boundary
        self.torn = False  # a copy broke off: the state here is neither the old nor the new one
        self.put_off: m.Prepare | None = None
        self.seen: Membership | None = None  # of the job that runs without this group
        self.parked, self._parked_said = False, ""  # the job has no use for this group; what was said of it last
        self.joiners: frozenset[str] = frozenset()  # groups whose first step the next one is
        self._clock = now
        self._say_after_s = SAY_AFTER_S
        self._raised_s = now
        self._views: dict[int, RankView] = {}
        self._beats = Beats()
        self._waiting_said: tuple[tuple[tuple[str, ...], str], float] = (((), ""), 0.0)  # whom and why, and when again
        self._silent_since = now
        self.away_since = now  # since when no lighthouse has been in touch

    def _answer_waiting(self, answer: Callable[[int], local.Answer | None]) -> list[Action]:
        actions: list[Action] = []
        for rank in sorted(self.waiting):
            given = answer(rank)
            if given is not None:
                del self.waiting[rank]
                actions.append(ToRanks(given, rank))
        return actions

    def _recover(self, rank: int) -> local.Answer | None:
        """What to do in the newest epoch; None while it is not activated yet, or if the rank voted in it already."""
        if rank in self.votes:
            return None
        if self.activation is None or self.known is None or self.promised > self.known.epoch.number:
            return None
        if self.known != self.activation.membership:
            return None
        return local.Answer(verdict="recover", epoch=self.known.epoch.number, step=self.step, plan=self._plan(rank))

    def _stop_answer(self, rank: int) -> local.Answer:
        assert self.stopped is not None
        stopped, asked = self.stopped, bool(self.leaving)
        keep = stopped.keep == self.settings.group
        if keep and self.keeping_since is None:
            self.keeping_since = self._clock
        return local.Answer(
            verdict="stop", step=self.step, reason=stopped.reason, ok=stopped.ok, asked=asked, keep=keep
        )

    def _heal_answer(self, rank: int) -> local.Answer | None:
        if self.source is None:
            return None
        self.fetching.add(rank)
        return local.Answer(verdict="heal", source=self._source_for(rank))

    def _source_for(self, rank: int) -> local.Source:
        assert self.source is not None
        donors = tuple((member.group, member.ranks[rank]) for member in self.source.donors if rank < len(member.ranks))
        return local.Source(step=self.source.step, donors=donors)

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

    def _left(self) -> bool:
        return self.decision is not None and self.decision[1].verdict == "leave"
