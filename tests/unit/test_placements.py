"""How a gradient is placed, as a number of the entry."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightkeeper.manager.extras import ExtrasLayout, Part, check, pack, unpack
from lightkeeper.manager.placements import CODES, decode, encode


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_every_kind_survives(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    kinds = [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg")]
    codes = set()
    for own in (Replicate(), Shard(0)):
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [own, Replicate()]))
        for one in kinds:
            for two in kinds:
                gradient = DTensor.from_local(torch.zeros(2, 2), mesh, [one, two], run_check=False)
                code = encode("w", gradient, parameter)
                assert 0 <= code < CODES and decode(code, parameter) == (one, two)
                codes.add((own, code))
    assert len(codes) == 2 * len(kinds) ** 2


def test_what_has_no_number_is_refused_by_name(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate(), Replicate()]))
    odd = DTensor.from_local(torch.zeros(2), mesh, [Partial("max"), Replicate()], run_check=False)
    with pytest.raises(TypeError, match=r"gradient of norm\.weight is placed .*max"):
        encode("norm.weight", odd, parameter)
    with pytest.raises(TypeError, match=r"norm\.weight is placed .* and its gradient None"):
        encode("norm.weight", torch.zeros(2), parameter)


def test_plain_tensors_have_none():
    assert encode("w", torch.zeros(2), torch.zeros(2)) == 0 and decode(0, torch.zeros(2)) is None


def reduced(*placed: tuple[int, ...], present=(True, True)) -> tuple:
    layout = ExtrasLayout()
    layout.freeze(2)
    total = torch.zeros(layout.numel, dtype=torch.float64)
    for k, codes in enumerate(placed):
        vector = torch.zeros_like(total)
        pack(layout, Part(3, [k], present, placed=codes), {}, vector)
        total += vector
    return unpack(layout, total), len(placed)


def test_the_entry_says_how_gradients_are_placed_and_how_many_have_one():
    total, members = reduced(*[(CODES - 1, 0)] * 3)
    assert total.placed == (CODES - 1, 0) and total.presence == (True, True)
    assert check(total, 3, 3, members) is None


def test_members_that_disagree_have_no_entry():
    total, members = reduced((1, 0), (2, 0))
    assert check(total, 3, 2, members) == "step 3: the members' gradients of parameter 0 are placed differently"
