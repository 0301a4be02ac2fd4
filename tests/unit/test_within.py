"""The ranks of one group among themselves: places and common sums."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from torch_workers import in_threads, local_groups

from lightkeeper.errors import UsageError
from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.within import Apart, Place, Within, place_of


def layout() -> ExtrasLayout:
    made = ExtrasLayout()
    made.declare("loss")
    made.declare("load", (2,), torch.float32)
    made.declare("tokens", (), torch.int64)
    return made


def number(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def test_every_place_counts_once_and_who_contributes_nothing_counts_as_zero():
    extras = layout()
    sums = [
        {"loss": number(1.5), "tokens": number(2**52, torch.int64)},
        {"loss": number(1.5), "tokens": number(2**52, torch.int64)},  # the same place as rank 0
        {"load": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"load": torch.tensor([1.0, 2.0], dtype=torch.float64)},
    ]
    with local_groups(4) as groups:
        places = [Place(rank // 2, 2) for rank in range(4)]
        made = in_threads(*(lambda r=r: Within(places[r], groups[r], 20.0) for r in range(4)))
        found = in_threads(*(lambda r=r: made[r].sum(extras, sums[r]) for r in range(4)))
        most = in_threads(*(lambda r=r: made[r].most(r * 3) for r in range(4)))
    assert most == [9] * 4
    for total in found:
        assert total["loss"] == 1.5 and total["tokens"] == 2**52 and total["load"].tolist() == [1.0, 2.0]


def test_places_that_leave_a_part_out_are_refused():
    with local_groups(2) as groups, pytest.raises(UsageError, match="rank 0: 0 of 2, rank 1: 0 of 2"):
        in_threads(*(lambda g=g: Within(Place(0, 2), g, 20.0) for g in groups))


def test_a_rank_that_is_gone_is_named():
    extras = layout()
    with local_groups(2) as groups:
        made = in_threads(*(lambda r=r: Within(Place(r, 2), groups[r], 20.0) for r in range(2)))
        groups[1].abort("dies")
        with pytest.raises(Apart, match="are apart"):
            made[0].sum(extras, {})


def test_a_group_of_one_sums_nothing():
    sums = {"loss": number(1.0)}
    assert Within().sum(layout(), sums) == sums and Within().most(3) == 3
    assert Within().sum(layout(), sums, {"stop": number(2.0)}) == {**sums, "stop": number(2.0)}


def test_an_agreed_value_is_rank_0s_and_nobodys_if_rank_0_gave_none():
    extras = layout()
    extras.declare("stop", (), torch.int64, "agreed")
    extras.declare("rate", (2,), torch.float64, "agreed")
    given = [{"stop": number(7, torch.int64)}, {"stop": number(8, torch.int64), "rate": torch.ones(2).double()}]
    with local_groups(2) as groups:
        made = in_threads(*(lambda r=r: Within(Place(r, 2), groups[r], 20.0) for r in range(2)))
        found = in_threads(*(lambda r=r: made[r].sum(extras, {"loss": number(1.0)}, given[r]) for r in range(2)))
    for total in found:
        assert total["stop"] == 7 and "rate" not in total and total["loss"] == 2.0


@pytest.mark.parametrize(
    ("given", "rank", "ranks", "place"),
    [(None, 1, 4, Place(1, 4)), ((0, 1), 1, 2, Place(0, 1)), ((1, 2), 3, 4, Place(1, 2))],
)
def test_places(given, rank, ranks, place):
    assert place_of(given, rank, ranks) == place


@pytest.mark.parametrize("given", [(2, 2), (-1, 2), (0, 3), (0, 0)])
def test_places_that_cannot_be(given):
    with pytest.raises(UsageError, match="index < count"):
        place_of(given, 0, 2)


def test_ranks_go_on_together_or_not_at_all():
    """Each comes once for every epoch that it is told of; rank 1 failed in epoch 3, rank 0 was not told of epoch 4."""
    told = [[(2, True), (3, True), (5, True)], [(2, True), (3, False), (4, True), (5, True)]]
    with local_groups(2) as groups:
        made = in_threads(*(lambda r=r: Within(Place(r, 2), groups[r], 20.0) for r in range(2)))
        went = in_threads(*(lambda r=r: [made[r].together(*epoch) for epoch in told[r]] for r in range(2)))
    assert went == [[True, False, True], [True, False, False, True]]


def test_who_knows_the_newest_epoch_waits_for_the_others_there():
    with local_groups(3) as groups:
        made = in_threads(*(lambda r=r: Within(Place(r, 3), groups[r], 20.0) for r in range(3)))
        told = [[(4, True)], [(2, True), (4, True)], [(2, True), (3, True), (4, True)]]
        went = in_threads(*(lambda r=r: [made[r].together(*epoch) for epoch in told[r]] for r in range(3)))
    assert went == [[True], [False, True], [False, False, True]]
