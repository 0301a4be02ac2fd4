"""The reduction for tests: the bits of one process, whoever computed what."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import nn

sys.path.insert(0, os.path.dirname(__file__))
from reducer_members import Member, assert_same_bits, mlp, plain
from torch_workers import in_threads, local_groups

from lightkeeper.errors import UsageError
from lightkeeper.manager.fold import VARIABLE, FoldingReducer, chosen_reducer
from lightkeeper.manager.groups import Alone, GroupFailed
from lightkeeper.manager.reducer import Reducer


def in_step(members: Sequence[Member], shares: Sequence[Sequence[int]]) -> None:
    in_threads(*(lambda m=m, s=s: [m.step(i, s) for i in range(5)] for m, s in zip(members, shares, strict=True)))


def folding(group) -> Member:
    return Member(mlp(), group, kind=FoldingReducer)


@pytest.mark.parametrize("shares", [([0, 2], [1, 3]), ([3], [0, 1, 2]), ([], [2, 0, 1, 3])])
def test_any_shares_give_the_bits_of_the_plain_loop(shares: tuple[list[int], list[int]]):
    with local_groups(2) as groups:
        members = [folding(group) for group in groups]
        in_step(members, shares)
    for member in members:
        assert_same_bits(member.model, plain(mlp(), 5))


def test_the_usual_reducer_does_not():
    """What the test above shows is not true of every sum."""
    with local_groups(2) as groups:
        members = [Member(mlp(), group) for group in groups]
        in_step(members, ([0, 2], [1, 3]))
    other = plain(mlp(), 5)
    assert any(not torch.equal(a, b) for a, b in zip(members[0].model.parameters(), other.parameters(), strict=True))


def test_microbatches_of_a_lost_group_are_folded_in_their_place():
    member = folding(Alone())
    member.reducer.begin(0, 4)
    member.compute(0, [0, 2])
    broken = Alone()
    broken.abort("gone")
    member.reducer.attach(broken)
    with pytest.raises(GroupFailed):
        member.reducer.reduce(0, 5.0)
    member.reducer.retry()
    member.reducer.attach(Alone())
    member.compute(0, [3, 1])
    member.reduce()
    member.reducer.commit()
    member.optimizer.step()
    assert_same_bits(member.model, plain(mlp(), 1))


def test_an_unused_parameter_keeps_no_gradient():
    model = nn.ModuleDict({"used": nn.Linear(16, 4), "unused": nn.Linear(16, 4)})
    member = Member(model, Alone(), loss=lambda m, x: m["used"](x).square().mean(), kind=FoldingReducer)
    member.step(0, [0, 1, 2, 3])
    assert model["unused"].weight.grad is None and model["used"].weight.grad is not None


def test_the_choice_is_by_name(monkeypatch: pytest.MonkeyPatch):
    assert chosen_reducer() is Reducer
    monkeypatch.setenv(VARIABLE, "fold")
    assert chosen_reducer() is FoldingReducer
    monkeypatch.setenv(VARIABLE, "folded")
    with pytest.raises(UsageError, match=r"LIGHTKEEPER_REDUCTION 'folded': give one of sum, fold"):
        chosen_reducer()
