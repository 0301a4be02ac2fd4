"""Extras that are reduced when a step starts: the same bits in all groups, whoever failed before that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from torch_workers import in_threads, local_groups

from lightkeeper.errors import UsageError
from lightkeeper.manager.before import BeforeExtras, CountedWrongly
from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.groups import Alone
from lightkeeper.manager.within import Place, Within

TOTAL = 7
CPU = torch.device("cpu")


def tokens(step: int, k: int) -> int:
    return 100 * step + k


def weights(step: int, k: int) -> torch.Tensor:
    return torch.tensor([0.1, 1e9 / (k + 1)], dtype=torch.float64) * step


class Group:
    """One group's before extras; notes for which microbatches its function was called."""

    def __init__(self, kinds: Sequence[str] = ("tokens", "weights"), within: Within | None = None) -> None:
        self.within = within or Within()
        self.called: list[int] = []
        self.seeded: list[int] = []
        self.extras = BeforeExtras(ExtrasLayout())
        if "tokens" in kinds:
            self.extras.declare("tokens", (), torch.int64, self._tokens)
        if "weights" in kinds:
            self.extras.declare("weights", (2,), torch.float64, weights)
        self.extras.begin(3)

    def _tokens(self, step: int, k: int) -> int:
        self.called.append(k)
        assert self.seeded[-1] == k, "the random state is the microbatch's"
        return tokens(step, k)

    def reduce(self, group, epoch: int, share: Sequence[int]) -> None:
        self.extras.count(share, self.seeded.append)
        self.extras.reduce(group, epoch, TOTAL, 20.0, CPU)
        self.extras.add_up(self.within)


def in_order() -> torch.Tensor:
    """What one process comes to that counts all microbatches one after the other."""
    value = weights(3, 0)
    for k in range(1, TOTAL):
        value = value + weights(3, k)
    return value


def reduce_all(groups, members: Sequence[Group], epoch: int, shares: Sequence[Sequence[int]]) -> None:
    calls = [
        lambda member=member, group=group, share=share: member.reduce(group, epoch, share)
        for member, group, share in zip(members, groups, shares, strict=True)
    ]
    in_threads(*calls)


@pytest.mark.parametrize("shares", [([0, 3, 6], [1, 4], [2, 5]), ([], [6, 5, 4, 3, 2, 1, 0], [])])
def test_all_groups_have_the_bits_of_one_process_that_counts_in_order(shares):
    members = [Group() for _ in shares]
    with local_groups(3) as groups:
        reduce_all(groups, members, 1, shares)
    for member, share in zip(members, shares, strict=True):
        values = member.extras.values
        assert values is not None and values.keys() == {"tokens", "weights"}
        assert values["tokens"].item() == sum(tokens(3, k) for k in range(TOTAL))
        assert values["tokens"].dtype == torch.int64
        assert torch.equal(values["weights"], in_order())
        assert member.called == list(share)


def test_one_group_alone():
    member = Group()
    member.reduce(Alone(), 1, range(TOTAL))
    values = member.extras.values
    assert values is not None and torch.equal(values["weights"], in_order())


def test_a_member_that_has_the_value_gives_it_and_the_heir_counts_nothing():
    """Epoch 1 completed on A and C, of which C died; not on B. A inherits 2, B inherits 5."""
    a, b, c = Group(), Group(), Group()
    with local_groups(3) as groups:
        reduce_all(groups, [a, Group(), c], 1, [[0, 3, 6], [1, 4], [2, 5]])
    b.extras.count([1, 4], b.seeded.append)
    before = dict(a.extras.values or {})
    a.extras._across[1] += 1.0  # so that it shows whose value it is  # type: ignore[index]
    with local_groups(2) as groups:
        reduce_all(groups, [b, a], 2, [[1, 4, 5], [0, 2, 3, 6]])
    assert a.called == [0, 3, 6], "A has the value: it does not count what it inherits"
    assert b.called == [1, 4, 5]
    for member in (a, b):
        values = member.extras.values
        assert values is not None and torch.equal(values["tokens"], before["tokens"])
        assert values["weights"][0] == before["weights"][0] + 1.0
    assert a.extras.due(3, 3) and not a.extras.due(3, 2) and not a.extras.due(4, 3)


def test_if_nobody_is_left_who_has_it_the_heirs_count_what_they_inherit():
    a, b = Group(), Group()
    for member, share in ((a, [0, 3, 6]), (b, [1, 4])):
        member.extras.count(share, member.seeded.append)  # and then the reduce failed on both
    with local_groups(2) as groups:
        reduce_all(groups, [a, b], 2, [[0, 3, 6, 2], [1, 4, 5]])
    assert a.called == [0, 3, 6, 2] and b.called == [1, 4, 5]
    for member in (a, b):
        assert member.extras.values is not None and torch.equal(member.extras.values["weights"], in_order())


@pytest.mark.parametrize(("share", "times"), [([0, 1, 2, 3, 5, 6], 0), ([0, 1, 2, 3, 4, 5, 6, 4], 1)])
def test_a_microbatch_that_nobody_counted_is_named(share, times):
    member = Group()
    if times:
        member.reduce(Alone(), 1, share)  # twice in one share is once
        return
    with pytest.raises(CountedWrongly, match="microbatch 4 was counted 0 times"):
        member.reduce(Alone(), 1, share)


def test_a_microbatch_that_two_counted_is_named():
    members = [Group(), Group()]
    with local_groups(2) as groups, pytest.raises(CountedWrongly, match="microbatch 3 was counted 2 times"):
        reduce_all(groups, members, 1, [[0, 1, 2, 3], [3, 4, 5, 6]])


def test_ranks_of_a_group_add_up_what_they_have_reduced_with_their_like():
    """Two groups of two ranks; rank 1's reduce failed in epoch 1, rank 0's did not: nothing is counted twice."""
    with local_groups(2) as a, local_groups(2) as b, local_groups(2) as first, local_groups(2) as second:
        within = in_threads(*(lambda g=g, r=r: Within(Place(r, 2), g[r], 20.0) for g in (a, b) for r in range(2)))
        ranks = [Group(within=one) for one in within]  # a0 a1 b0 b1
        shares = [[0, 2, 4, 6]] * 2 + [[1, 3, 5]] * 2
        for rank, share in zip(ranks, shares, strict=True):
            rank.extras.count(share, rank.seeded.append)
        in_threads(*(lambda i=i: ranks[i].extras.reduce(first[i // 2], 1, TOTAL, 20.0, CPU) for i in (0, 2)))
        assert ranks[0].extras.reduced(3, 1) and not ranks[1].extras.reduced(3, 1)
        assert all(rank.extras.values is None for rank in ranks), "nothing is known before all ranks have theirs"
        with local_groups(2) as other:
            across = [second[0], other[0], second[1], other[1]]
            in_threads(*(lambda i=i: ranks[i].reduce(across[i], 2, shares[i]) for i in range(4)))
    for rank, share in zip(ranks, shares, strict=True):
        values = rank.extras.values
        assert values is not None and torch.equal(values["weights"], in_order() + in_order())
        assert rank.called == share


def test_nothing_is_due_where_nothing_is_declared():
    assert not Group(()).extras.due(3, 1)


def test_a_new_step_forgets():
    member = Group()
    member.reduce(Alone(), 1, range(TOTAL))
    member.extras.begin(4)
    assert member.extras.values is None and member.extras.due(4, 1)


def test_too_many_elements_are_refused():
    extras = BeforeExtras(ExtrasLayout())
    extras.declare("big", (1 << 17,), torch.float32, lambda step, k: torch.zeros(1 << 17))
    extras.begin(0)
    with pytest.raises(UsageError, match="big have 131072 elements, too many for 8 microbatches and 1 groups"):
        extras.reduce(Alone(), 1, 8, 1.0, CPU)


def test_a_wrong_shape_or_a_count_that_is_not_exact_is_named():
    extras = BeforeExtras(ExtrasLayout())
    extras.declare("n", (), torch.int64, lambda step, k: 2**53 if k else torch.zeros(2, dtype=torch.int64))
    extras.begin(0)
    with pytest.raises(ValueError, match=r"'n' was declared \(\), given \(2,\)"):
        extras.count([0], lambda k: None)
    with pytest.raises(OverflowError, match="'n'"):
        extras.count([1], lambda k: None)
