"""Clipping by the gradient norm with the same bits in every group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from lightkeeper.manager.buckets import local_tensor, placements_of

_CHUNK = 16384  # elements; torch sums up to 32768 elements in one thread, so the bits do not depend on how many


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all of them together is at most `max_norm`.

    It differs from `torch.nn.utils.clip_grad_norm_` in that the norm is folded in float64, from chunks of a
    fixed
    size, parameter by parameter and rank by rank: its bits depend neither on the number of threads nor on a
    collective's algorithm, so every group scales by the same factor. It returns a float64 scalar on the CPU,
    waits for the device, leaves gradients alone that are below the bound (torch multiplies them by one), and
    lets a norm that is not finite pass (the gradients become NaN, or zero, in all groups alike).

    Args:
        parameters: Whose gradients to clip; those without one are skipped.
        max_norm: The bound, positive.
        norm_type: p >= 1 of the p-norm; may be `inf`.
        process_group: The ranks over which DTensor gradients are sharded; taken from their mesh if that has
            one dimension. A gradient that is a plain tensor, or replicated, is counted once.

    Returns:
        The norm before clipping, float64[].

    Raises:
        ValueError: gradients with pending (partial) sums, or on a mesh of several dimensions without
            `process_group`.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [_is_sharded(gradient) for gradient in gradients]
    if process_group is None and any(sharded):
        process_group = _mesh_group(gradients[sharded.index(True)])
    with torch.no_grad():
        powers = _powers([local_tensor(g) for g in gradients], norm_type)
        total = _fold(powers, sharded, norm_type, process_group)
        norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0 and gradients:
            torch._foreach_mul_([local_tensor(g) for g in gradients], factor)
    return torch.tensor(norm, dtype=torch.float64)


def _powers(gradients: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    """For every gradient the sum of |x|**p, or the maximum of |x|."""
    chunks: list[torch.Tensor] = []
    counts: list[int] = []
    for gradient in gradients:
        flat = gradient.reshape(-1)
        pieces = flat.split(_CHUNK) if flat.device.type == "cpu" else (flat,)
        counts.append(len(pieces))
        chunks.extend(pieces)
    if not chunks:
        return []
    norms = torch.stack(
        [norm.to("cpu") for norm in torch._foreach_norm(chunks, norm_type, dtype=torch.float64)]
    ).tolist()
    powers, start = [], 0
    for count in counts:
        powers.append(_combine(norms[start : start + count], norm_type, raise_to=norm_type))
        start += count
    return powers


def _combine(values: Sequence[float], norm_type: float, raise_to: float = 1.0) -> float:
    total = 0.0
    for value in values:
        if math.isinf(norm_type):
            total = value if math.isnan(value) or value > total else total
        else:
            total += value if raise_to == 1.0 else _power(value, raise_to)
    return total


def _power(value: float, exponent: float) -> float:
    return value * value if exponent == 2.0 else float(torch.tensor(value, dtype=torch.float64) ** exponent)


def _fold(
    powers: Sequence[float], sharded: Sequence[bool], norm_type: float, process_group: dist.ProcessGroup | None
) -> float:
    """Fold over parameters, within each over ranks in rank order; what every rank holds whole counts once."""
    if process_group is None or process_group.size() == 1 or not powers:
        return _combine(powers, norm_type)
    device = torch.device("cuda") if process_group.name() == "nccl" else torch.device("cpu")
    mine = torch.tensor(powers, dtype=torch.float64, device=device)
    parts = [torch.empty_like(mine) for _ in range(process_group.size())]
    dist.all_gather(parts, mine, group=process_group)
    ranks = [part.tolist() for part in parts]
    folded = [
        _combine([rank[i] for rank in ranks], norm_type) if split else ranks[0][i] for i, split in enumerate(sharded)
    ]
    return _combine(folded, norm_type)


def _is_sharded(gradient: torch.Tensor) -> bool:
    placements = placements_of(gradient) or ()
    if any(p.is_partial() for p in placements):
        raise ValueError(f"a gradient is placed {placements}: its sum is pending, redistribute it before clipping")
    return any(p.is_shard() for p in placements)


def _mesh_group(gradient: torch.Tensor) -> dist.ProcessGroup:
    mesh = gradient.device_mesh  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise ValueError(f"gradients lie on a mesh of {mesh.ndim} dimensions: pass the process_group of their shards")
    return mesh.get_group()
