"""The reducer over parameters that FSDP2 has sharded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from reducer_members import Member, mlp, plain
from torch_workers import in_threads, local_groups

from lightkeeper.manager.groups import Alone
from lightkeeper.manager.reducer import NotTraining


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_sharded_parameters(mesh):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    member = Member(model, Alone())
    launched = [member.step(step, range(4)) for step in range(5)]
    assert launched[-1] > 0
    for a, b in zip(model.parameters(), plain(mlp(), 5).parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b)


def test_fsdp2_follower_makes_gradients_of_the_right_kind(mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with local_groups(2) as groups:
        models = [mlp(), mlp()]
        for model in models:
            fully_shard(model, mesh=mesh)
        members = [Member(model, group) for model, group in zip(models, groups, strict=True)]
        in_threads(lambda: members[0].step(0, range(4)), lambda: members[1].step(0, []))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(b.grad, DTensor) and b.grad.placements == a.grad.placements
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_hook_registered_before_fully_shard_is_refused(mesh):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    member = Member(model, Alone())
    fully_shard(model, mesh=mesh)
    member.reducer.begin(0, 4)
    member.compute(0, range(4))
    with pytest.raises(NotTraining, match="before fully_shard"):
        member.reducer.reduce(0, 1.0)
