"""Who sums up gradients after which microbatch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightkeeper.errors import UsageError
from lightkeeper.manager.sync import GradientSync


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor().clone() for p in model.parameters()]


def compute(model: nn.Module, sync: GradientSync, parts: range, last: int) -> None:
    for k in parts:
        sync.microbatch(last=k == last)
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(k))).sum().backward()


def test_last_keeps_gradients_back_until_the_last_and_a_share_that_grows_adds_to_them(mesh):
    every, last = sharded(mesh), sharded(mesh)
    compute(every, GradientSync([every], "every"), range(6), 5)
    sync = GradientSync([last], "last")
    sync.begin()
    compute(last, sync, range(3), 3)
    assert sync.behind and gradients(last) == [None] * 4
    compute(last, sync, range(3, 4), 3)
    assert not sync.behind and None not in gradients(last)
    compute(last, sync, range(4, 6), 5)  # after a recovery
    assert not sync.behind
    for a, b in zip(gradients(every), gradients(last), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_users_own_switch_is_put_right(mesh):
    model = sharded(mesh)
    model.set_requires_gradient_sync(False)
    compute(model, GradientSync([model], "every"), range(1), 0)
    assert None not in gradients(model)


def test_parameters_gathered_by_a_forward_pass_alone_are_let_go_of(mesh):
    model = sharded(mesh)
    sync = GradientSync([model], "every")
    with torch.no_grad():
        model(torch.zeros(2, 4))
    shards = [type(p).__name__ for p in model[2].parameters()]
    sync.settle()
    assert [type(p).__name__ for p in model[2].parameters()] == ["DTensor"] * 2, f"before it was {shards}"


def test_distributed_data_parallel_is_switched_and_its_hooks_come_too_early(mesh):
    model = DistributedDataParallel(nn.Linear(2, 2))
    sync = GradientSync([model], "last")
    assert not sync.at_hooks
    sync.microbatch(last=False)
    assert not model.require_backward_grad_sync
    sync.microbatch(last=True)
    assert model.require_backward_grad_sync


def test_what_cannot_be(mesh):
    with pytest.raises(UsageError, match="give 'every' or 'last'"):
        GradientSync([], "sometimes")
    with pytest.raises(UsageError, match="no module of fully_shard"):
        GradientSync([nn.Linear(2, 2)], "last")
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(UsageError, match="use fully_shard"):
        GradientSync([FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))], "every")
