"""One group's machine with a lighthouse and ranks that speak by script."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import Action, AskMembers, DropKeys, End, Kill, Note, Tell, ToRanks
from lightkeeper.manager.machine import GroupMachine, RankView
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.standing import Word

TERM = Term(1, "lh")
TOTAL = 24


def epoch(number: int, term: Term = TERM) -> Epoch:
    return Epoch(number, term)


def membership(number: int, *groups: str, base: int | None = None, term: Term = TERM, ranks: int = 2) -> Membership:
    members = tuple(Member(g, "i1", f"{g}:1", tuple(f"{g}:{10 + r}" for r in range(ranks))) for g in groups)
    return Membership(epoch(number, term), members, None if base is None else epoch(base))


class GroupWorld:
    """Drives the machine of group ``g1``, second of three."""

    def __init__(self, ranks: int = 1, **settings: Any) -> None:
        given = {"groups": 3, "minimum": 1, "ranks": ranks, "token": "t", "outage_budget_s": 60.0, **settings}
        self.now = 100.0
        self.size = ranks
        self.machine = GroupMachine(Settings(group="g1", **given), "i1", "g1:1", self.now)
        self.told: list[m.ToLighthouse] = []
        self.to_ranks: dict[int, list[local.ToRank]] = {rank: [] for rank in range(ranks)}
        self.dropped: list[int] = []
        self.killed: list[str] = []
        self.ended: list[End] = []
        self.asked: list[Membership] = []
        self.events: list[Any] = []

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                self.told.append(action.message)
            elif isinstance(action, ToRanks):
                for rank in range(self.size) if action.rank is None else (action.rank,):
                    self.to_ranks[rank].append(action.message)
            elif isinstance(action, DropKeys):
                self.dropped.append(action.below)
            elif isinstance(action, Kill):
                self.killed.append(action.reason)
            elif isinstance(action, End):
                self.ended.append(action)
            elif isinstance(action, AskMembers):
                self.asked.append(action.membership)
            elif isinstance(action, Note):
                self.events.append(action.event)

    # ------------------------------------------------------------ the lighthouse speaks

    def connect(self, term: Term = TERM, lease_ms: int = 2000) -> None:
        self._carry_out(self.machine.connected(self.now))
        self.hears(m.Welcome(term, lease_ms, 200))

    def disconnect(self) -> None:
        self._carry_out(self.machine.disconnected(self.now))

    def hears(self, message: m.ToManager) -> None:
        self._carry_out(self.machine.received(message, self.now))

    def prepare(self, number: int, term: Term = TERM) -> None:
        self.hears(m.Prepare(epoch(number, term)))

    def activate(
        self,
        number: int,
        *groups: str,
        step: int = 0,
        share: tuple[int, ...] = (8, 9),
        total: int = TOTAL,
        donor: str | None = None,
        entry: Entry | None = None,
        term: Term = TERM,
    ) -> None:
        """`Activate`; `donor` gives this group the entry of the step before `step`."""
        groups = groups or ("g0", "g1", "g2")
        members = membership(number, *groups, base=number - 1, term=term)
        shares = tuple(m.Share(g, share if g == "g1" else ()) for g in groups)
        donors = () if donor is None else (m.Donor("g1", donor),)
        self.hears(m.Activate(members, step, total, shares, donors, entry, "because"))

    def plan(self, number: int, *groups: str, base: int, why: str = "", speeds: tuple[int, ...] = ()) -> Membership:
        """A planned `Prepare`."""
        planned = dataclasses.replace(membership(number, *groups, base=base), speeds=speeds)
        self.hears(m.Prepare(planned.epoch, planned.base, planned, why))
        return planned

    def start(self, share: tuple[int, ...] = tuple(range(8, 16))) -> None:
        """Connected, registered, ready, and in epoch 1 with three members."""
        self.connect()
        self.ready()
        self.prepare(1)
        self.activate(1, share=share)
        self.forget()

    # ------------------------------------------------------------ ranks speak

    def ready(self, total: int = TOTAL, *steps: int) -> None:
        """All ranks stand before the first step, or each before its own of `steps`."""
        for rank in range(self.size):
            register = local.Register(token="t", rank=rank, pid=1000 + rank, transfer=f"g1:{10 + rank}", progress="")
            self._carry_out(self.machine.register(register, self.now))
            step = steps[rank] if steps else 0
            self.rank_says(rank, local.Ready(signature={"w": "float32[2]"}, total=total, step=step))

    def rank_says(self, rank: int, message: local.FromRank) -> None:
        self._carry_out(self.machine.rank_says(rank, message, self.now))

    def vote(self, rank: int, outcome: str, step: int, at: int, **more: Any) -> None:
        """Rank `rank` votes in epoch `at`."""
        fields = {"next_total": TOTAL, **more}
        self.rank_says(rank, local.Vote(epoch=at, step=step, outcome=outcome, **fields))

    def vote_all(self, outcome: str, step: int, at: int, **more: Any) -> None:
        for rank in range(self.size):
            self.vote(rank, outcome, step, at, **more)

    def rank_ends(self, rank: int, exit_code: int | None, phase: str = "compute", step: int = 0) -> None:
        view = RankView(phase, step, 0.0, 0.0)
        self._carry_out(self.machine.rank_ended(rank, exit_code, view, self.now))

    # ------------------------------------------------------------ time

    def pass_s(self, seconds: float, views: dict[int, RankView] | None = None) -> None:
        """Time passes in ticks of a quarter of a second."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self._carry_out(self.machine.tick(views or {}, self.now))

    def freeze_s(self, seconds: float) -> None:
        """This process stands still, and then ticks."""
        self.now += seconds
        self._carry_out(self.machine.tick({}, self.now))

    def members_say(self, known: Membership, *silent: str, promised: int = 0) -> None:
        """The other members' managers answer that this epoch is in force for them; but for the silent ones."""
        others = [x for x in known.members if x.group not in (*silent, "g1")]
        words = {x.group: Word(x.incarnation, known, promised or known.epoch.number) for x in others}
        self._carry_out(self.machine.members_say(self.asked[-1], words, self.now))

    # ------------------------------------------------------------ what came of it

    def forget(self) -> None:
        self.told.clear()
        self.dropped.clear()
        self.events.clear()
        for sent in self.to_ranks.values():
            sent.clear()

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def pushed(self, rank: int, kind: type) -> list[Any]:
        return [message for message in self.to_ranks[rank] if isinstance(message, kind)]

    def answers(self, rank: int = 0) -> list[local.Answer]:
        return self.pushed(rank, local.Answer)

    def answer(self) -> local.Answer:
        """The newest answer, which must be the same for all ranks but for where each fetches from."""
        last = [self.answers(rank)[-1] for rank in range(self.size)]
        assert all(a.verdict == last[0].verdict and a.share == last[0].share for a in last), last
        assert all(a.step == last[0].step and a.epoch == last[0].epoch and a.ready == last[0].ready for a in last), last
        return last[0]
