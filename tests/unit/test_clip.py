"""The clip's norm: right, and the same bits whatever the number of threads."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.path.dirname(__file__))
from torch_workers import start_member

from lightkeeper.manager.clip import clip_grad_norm_


def parameters(*sizes: int, scale: float = 1.0) -> list[nn.Parameter]:
    made = []
    for i, size in enumerate(sizes):
        p = nn.Parameter(torch.zeros(size))
        p.grad = scale * torch.randn(size, generator=torch.Generator().manual_seed(i))
        made.append(p)
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_it_clips_as_torch_does(norm_type):
    ours, theirs = parameters(7, 100_003, 1), parameters(7, 100_003, 1)
    norm = clip_grad_norm_(ours, 1.5, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.5, norm_type)
    assert norm.dtype == torch.float64 and norm.shape == ()
    torch.testing.assert_close(norm.float(), expected, rtol=1e-5, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_gradients_below_the_bound_keep_their_bits():
    ours = parameters(100, scale=1e-3)
    before = ours[0].grad.clone()
    clip_grad_norm_(ours, 1.0)
    assert torch.equal(ours[0].grad, before)


def test_bits_do_not_depend_on_the_number_of_threads():
    threads = torch.get_num_threads()
    bits = set()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            ours = parameters(1_000_003, 40_000)
            bits.add(clip_grad_norm_(ours, 1.0).item().hex() + str(ours[0].grad.double().numpy().tobytes()[:64]))
    finally:
        torch.set_num_threads(threads)
    assert len(bits) == 1


def test_no_gradients_and_bad_gradients():
    bare = nn.Parameter(torch.zeros(3))
    assert clip_grad_norm_(bare, 1.0).item() == 0.0
    bare.grad = torch.tensor([1.0, float("nan"), 2.0])
    assert math.isnan(clip_grad_norm_([bare], 1.0).item())
    assert torch.isnan(bare.grad).all()


def clip_sharded(pipe, rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.randn(9, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    made = []
    for gradient, placement in zip(whole, (Shard(0), Replicate(), None), strict=True):
        spread = gradient.clone() if placement is None else distribute_tensor(gradient, mesh, [placement])
        p = nn.Parameter(torch.zeros_like(spread))
        p.grad = spread
        made.append(p)
    norm = clip_grad_norm_(made, 0.5)
    full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in made]
    pipe.send((norm.item(), [g.tolist() for g in full]))
    pipe.recv()
    dist.destroy_process_group()


def clip_on_a_grid(pipe, rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    whole = [torch.randn(9, 5, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    part = whole[2] * (0.25 if rank % 2 else 0.75)
    gradients = [
        distribute_tensor(whole[0], mesh, [Replicate(), Shard(0)]),
        distribute_tensor(whole[1], mesh["shard"], [Shard(1)]),
        DTensor.from_local(part, mesh, [Replicate(), Partial("sum")], run_check=False),
        DTensor.from_local(part * 2, mesh, [Replicate(), Partial("avg")], run_check=False),
    ]
    made = []
    for gradient in gradients:
        like = distribute_tensor(torch.zeros(9, 5), gradient.device_mesh, [Replicate()] * gradient.device_mesh.ndim)
        like = like if any(p.is_partial() for p in gradient.placements) else torch.zeros_like(gradient)
        made.append(nn.Parameter(like))
        made[-1].grad = gradient
    norm = clip_grad_norm_(made, 0.5)
    placed = [str(p.grad.placements) for p in made[2:]]
    pipe.send((norm.item(), [p.grad.full_tensor().tolist() for p in made], placed))
    pipe.recv()
    dist.destroy_process_group()


def test_on_a_grid_every_element_counts_once_and_pending_sums_are_added_up_first(tmp_path):
    started = [start_member(clip_on_a_grid, rank, str(tmp_path / "rendezvous")) for rank in range(4)]
    answers = []
    for _, pipe in started:
        assert pipe.poll(60.0)
        answers.append(pipe.recv())
    for process, pipe in started:
        pipe.send("end")
        process.join(20.0)
    whole = [torch.randn(9, 5, generator=torch.Generator().manual_seed(i)) for i in (0, 1, 2, 2)]
    expected = torch.cat([g.reshape(-1) for g in whole]).double().norm().item()
    assert all(answer == answers[0] for answer in answers)
    norm, clipped, placed = answers[0]
    assert norm == pytest.approx(expected, rel=1e-6) and placed == ["(Replicate(), Replicate())"] * 2
    for mine, theirs in zip(clipped, whole, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs * 0.5 / expected, rtol=1e-5, atol=1e-6)


def test_shards_are_folded_in_rank_order_and_replicas_counted_once(tmp_path):
    started = [start_member(clip_sharded, rank, str(tmp_path / "rendezvous")) for rank in range(2)]
    answers = []
    for _, pipe in started:
        assert pipe.poll(60.0)
        answers.append(pipe.recv())
    for process, pipe in started:
        pipe.send("end")
        process.join(20.0)
    whole = [torch.randn(9, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    expected = torch.cat([g.reshape(-1) for g in whole]).double().norm().item()
    assert answers[0] == answers[1]
    assert answers[0][0] == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(torch.tensor(answers[0][1][0]), whole[0] * 0.5 / expected, rtol=1e-5, atol=1e-6)
