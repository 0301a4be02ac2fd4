"""Checkers of a world in which nothing runs, and the names that they are shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, Term
from lightkeeper.manager import local
from lightkeeper.simulator.checkers import Checkers, Violation
from lightkeeper.simulator.shape import Shape
from lightkeeper.simulator.state import START, Arithmetic, Part, Reduced, State
from lightkeeper.simulator.world import World

E1, E2 = Epoch(1, Term(1, "lh")), Epoch(2, Term(1, "lh"))
SHAPE = Shape(groups=2, microbatches=2, until=4)


def breaks(invariant: str) -> Any:
    return pytest.raises(Violation, match=f"^{invariant}: ")


def membership(epoch: Epoch, *groups: str, base: Epoch | None = None, speeds: tuple[int, ...] = ()) -> Membership:
    return Membership(epoch, tuple(Member(g, f"{g}-i1", f"{g}:m") for g in groups), base, speeds)


class Bench:
    """Checkers of a world in which nothing runs, and a job in epoch 1 of g0 and g1."""

    def __init__(self, shape: Shape = SHAPE, speeds: tuple[int, ...] = ()) -> None:
        self.world = World(1, shape)
        self.checkers: Checkers = self.world.checkers
        self.lighthouse = self.world.lighthouses[0]
        self.sums = Arithmetic()
        self.checkers._in_force(membership(E1, "g0", "g1", speeds=speeds))

    def entry(self, step: int, epoch: Epoch = E1, serial: int = 0, base: State = START, again: bool = False) -> Reduced:
        parts = tuple(("g0", k) for k in range(self.world.total(step)))
        return Reduced(Entry(epoch, step), serial or step + 1, parts, 0, again, base.bits)

    def state(self, *entries: Reduced) -> State:
        state = START
        for entry in entries:
            state = self.sums.apply(state, entry)
        return state

    def reduces(self, epoch: Epoch, step: int, g0: State, g1: State, shares: tuple[tuple[int, ...], ...] = ()) -> None:
        first, second = shares or (tuple(range(self.world.total(step))), ())
        parts = {"g0": Part(first, 0, False, g0), "g1": Part(second, 0, False, g1)}
        summed = tuple((name, k) for name, part in parts.items() for k in part.microbatches)
        self.checkers.reduced(epoch, step, parts, Reduced(Entry(epoch, step), 9, summed, 0, False, g0.bits))

    def rank(self, group: str, step: int, state: State, epoch: Epoch = E1) -> Any:
        plan = local.Plan(
            epoch=epoch.number, term=epoch.term.number, lighthouse=epoch.term.lighthouse, members=("g0", "g1"), slot=0,
            step=step, share=(), total=2,
        )  # fmt: skip
        known = membership(epoch, "g0", "g1")
        process = SimpleNamespace(group=group, incarnation=f"{group}-i1", machine=SimpleNamespace(known=known))
        return SimpleNamespace(name=f"{group}/0", group=process, step=step, state=state, plan=plan)
