"""Buffers that the forward pass changes, averaged over the microbatches of all groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightkeeper.errors import UsageError
from lightkeeper.manager.averages import AveragedBuffers

BATCH_NORM = ("*.running_mean", "*.running_var", "*.num_batches_tracked")


class Amax(nn.Module):
    """Replaces its buffer instead of writing into it, as float8 recipes do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.amax = x.abs().max()
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Amax())


def batch(k: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(k)) * (k + 1)


def one_step(made: nn.Module, averages: AveragedBuffers, share: list[int]) -> torch.Tensor:
    given: list[torch.Tensor] = []
    for k in share:
        averages.microbatch(given.append)
        made(batch(k))
    averages.computed(given.append)
    assert len(given) == len(share)
    return sum(given, torch.zeros(averages.numel, dtype=torch.float64))


def test_buffers_move_by_the_mean_of_what_each_microbatch_changed_whoever_computed_it():
    shares, total = ([0, 2], [1]), 3
    models = [model(), model()]
    averages = [AveragedBuffers([made], (*BATCH_NORM, "2.*")) for made in models]
    for _ in range(2):
        before = [buffer.clone() for buffer in models[0].buffers()]
        changed = [one_step(*pair, share) for *pair, share in zip(models, averages, shares, strict=True)]
        for made in models:
            kept = zip(made.buffers(), before, strict=True)
            assert all(torch.equal(a, b) for a, b in kept), "until the commit they are what they were"
        for one in averages:
            one.commit(changed[0] + changed[1], total)
        after = [list(made.buffers()) for made in models]
        assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))
    moved = []
    for k in range(total):
        fresh = model()
        for to, of in zip(fresh.buffers(), before, strict=True):
            to.copy_(of)
        fresh(batch(k))
        moved.append([buffer.double() for buffer in fresh.buffers()])
    for number, buffer in enumerate(models[0].buffers()):
        mean = torch.stack([one[number] for one in moved]).mean(0)
        torch.testing.assert_close(buffer.double(), mean, rtol=1e-6, atol=1e-6)
    assert models[0][1].num_batches_tracked.item() == 2, "a step counts once"


def test_a_group_that_computed_nothing_has_the_same():
    models = [model(), model()]
    averages = [AveragedBuffers([made], BATCH_NORM) for made in models]
    changed = one_step(models[0], averages[0], [0, 1]) + one_step(models[1], averages[1], [])
    for one in averages:
        one.commit(changed, 2)
    assert torch.equal(models[0][1].running_var, models[1][1].running_var)
    assert not torch.equal(models[0][1].running_var, model()[1].running_var)


def test_its_state_is_that_of_the_step_boundary_also_while_a_forward_pass_runs():
    made, other = model(), model()
    averages, others = AveragedBuffers([made], BATCH_NORM), AveragedBuffers([other], BATCH_NORM)
    averages.commit(one_step(made, averages, [0]), 1)
    boundary = made[1].running_mean.clone()
    averages.microbatch(lambda changes: None)
    made(batch(1))
    assert not torch.equal(made[1].running_mean, boundary)
    others.load_state_dict(averages.state_dict())
    assert torch.equal(other[1].running_mean, boundary) and other[1].num_batches_tracked.item() == 1


def test_a_pattern_that_fits_no_buffer_is_refused():
    with pytest.raises(UsageError, match=r"average_buffers: the model has no buffer '\*\.amaxes'"):
        AveragedBuffers([model()], ("*.running_mean", "*.amaxes"))
