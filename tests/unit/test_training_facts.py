"""How users train, against the reducer: whatever the forward and backward passes do, members have the same bits."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from reducer_members import HALVES, Loss, Member, assert_close, assert_same_bits, mean_square, mlp, plain, train
from torch_workers import local_groups

from lightkeeper.manager.groups import Alone


def both_ways(loss: Loss, make=mlp, steps: int = 5, total: int = 4, shares=HALVES) -> list[list[int]]:
    """Two members against the plain loop; how many buckets were launched while the backward pass ran."""
    with local_groups(2) as groups:
        members = [Member(make(), group, loss, total) for group in groups]
        launched = train(members, shares, range(steps))
    assert_same_bits(members[0].model, members[1].model)
    assert_close(members[0].model, plain(make(), steps, total, loss))
    assert not members[0].notes and not members[1].notes, "nothing was reduced twice"
    return launched


def test_checkpointing_that_is_not_reentrant():
    def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in (model[:2], model[2:4], model[4:]):
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    assert both_ways(checkpointed)[0][-1] > 0


def test_autocast_to_bfloat16():
    seen: list[torch.dtype] = []

    def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        seen.append(y.dtype)
        return y.float().square().mean()

    assert both_ways(half)[0][-1] > 0
    assert set(seen) == {torch.bfloat16}


def test_parameters_in_bfloat16():
    """Reduced in their own dtype: the same bits in all groups, near one process only as far as bfloat16 goes."""
    with local_groups(2) as groups:
        members = [
            Member(mlp().to(torch.bfloat16), group, lambda m, x: mean_square(m, x.bfloat16())) for group in groups
        ]
        train(members, HALVES, range(4))
    assert_same_bits(members[0].model, members[1].model)


@pytest.mark.parametrize("shares", [([0, 1, 2, 3, 4, 5], [6]), ([], list(range(7)))])
def test_accumulation_over_many_microbatches_of_unequal_shares(shares):
    both_ways(mean_square, total=7, shares=shares)


def test_a_whole_model_compiled_delivers_its_hooks_at_the_end_of_backward():
    """No code is generated: this is about when autograd calls the hooks."""

    def make() -> nn.Module:
        torch.compiler.reset()
        return torch.compile(mlp(), backend="aot_eager")

    member = Member(make(), Alone())
    alone = [member.step(step, range(4)) for step in range(5)]
    assert alone[-1] > 0, "buckets are launched from the hooks, all of them at the end"
    assert_same_bits(member.model, plain(make(), 5))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_compiled_with_generated_code(monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile generates C++ here and there is no g++")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()
    compiled = torch.compile(mlp(), backend="inductor")
    member = Member(compiled, Alone())
    for step in range(4):
        member.step(step, range(4))
    assert_same_bits(member.model, plain(torch.compile(mlp(), backend="inductor"), 4))
