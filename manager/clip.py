"""Clipping by the gradient norm with the same bits in every group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from lightkeeper.manager.buckets import as_gradient, local_tensor, placements_of

_CHUNK = 16384  # elements; torch sums up to 32768 elements in one thread, so the bits do not depend on how many


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all of them together is at most `max_norm`.

    It differs from `torch.nn.utils.clip_grad_norm_` in that the norm is folded in float64, from chunks of a fixed
    size, parameter by parameter and rank by rank: its bits depend neither on the number of threads nor on a
    collective's algorithm, so every group scales by the same factor. It returns a float64 scalar on the CPU,
    waits for the device, leaves gradients alone that are below the bound (torch multiplies them by one), and
    lets a norm that is not finite pass (the gradients become NaN, or zero, in all groups alike).

    Args:
        parameters: Whose gradients to clip; those without one are skipped.
        max_norm: The bound, positive.
        norm_type: p >= 1 of the p-norm; may be `inf`.
        process_group: Ranks that hold all shards of all DTensor gradients; by default those of the default process
            group, which are the ranks of this replica group. All of them call this together. An element that
            several ranks hold, and a gradient that is a plain tensor, are counted once.

    Returns:
        The norm before clipping, float64[].

    Raises:
        ValueError: a gradient that waits for anything but a sum or a mean.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with torch.no_grad():
        for parameter in given:
            _settle(parameter)
        gradients = [p.grad for p in given if p.grad is not None]
        holders = [_holders(gradient) for gradient in gradients]
        if process_group is None and any(len(ranks) > 1 for ranks in holders):
            process_group = dist.group.WORLD
        powers = _powers([local_tensor(g) for g in gradients], norm_type)
        total = _fold(powers, holders, norm_type, process_group)
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
    norms = _to_host(torch._foreach_norm(chunks, norm_type, dtype=torch.float64))
    powers, start = [], 0
    for count in counts:
        powers.append(_combine(norms[start : start + count], norm_type, raise_to=norm_type))
        start += count
    return powers


def _to_host(norms: Sequence[torch.Tensor]) -> list[float]:
    """Numbers on one or several devices, in order; waits once for each device."""
    found = dict[int, float]()
    for device in {norm.device for norm in norms}:
        there = [i for i, norm in enumerate(norms) if norm.device == device]
        found.update(zip(there, torch.stack([norms[i] for i in there]).tolist(), strict=True))
    return [found[i] for i in range(len(norms))]


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
    powers: Sequence[float], holders: Sequence[list[int]], norm_type: float, process_group: dist.ProcessGroup | None
) -> float:
    """Fold over parameters, within each over the ranks that hold it, in rank order."""
    if process_group is None or process_group.size() == 1 or not powers:
        return _combine(powers, norm_type)
    device = torch.device("cuda") if process_group.name() == "nccl" else torch.device("cpu")
    mine = torch.tensor(powers, dtype=torch.float64, device=device)
    parts = [torch.empty_like(mine) for _ in range(process_group.size())]
    dist.all_gather(parts, mine, group=process_group)
    of_rank = dict(zip(dist.get_process_group_ranks(process_group), torch.stack(parts).tolist(), strict=True))
    folded = [
        _combine([of_rank[rank][i] for rank in ranks], norm_type) if ranks else powers[i]
        for i, ranks in enumerate(holders)
    ]
    return _combine(folded, norm_type)


def _holders(gradient: torch.Tensor) -> list[int]:
    """The ranks that together hold every element once; [] for a plain tensor, which every rank holds."""
    placements = placements_of(gradient)
    if placements is None:
        return []
    ranks = gradient.device_mesh.mesh  # type: ignore[attr-defined]
    chosen = tuple(0 if place.is_replicate() else slice(None) for place in placements)
    return sorted(int(rank) for rank in ranks[chosen].reshape(-1))


def _settle(parameter: torch.Tensor) -> None:
    """Adds up, in rank order, a gradient whose sum over a mesh dimension is pending."""
    gradient = parameter.grad
    placements = None if gradient is None else placements_of(gradient)
    if gradient is None or placements is None or not any(place.is_partial() for place in placements):
        return
    from torch.distributed.tensor import Replicate

    total, settled = local_tensor(gradient), list(placements)
    for dimension, place in enumerate(placements):
        if not place.is_partial():
            continue
        if place.reduce_op not in ("sum", "avg"):
            raise ValueError(f"a gradient is placed {placements}: only sums and means can be clipped")
        group = gradient.device_mesh.get_group(dimension)  # type: ignore[attr-defined]
        parts = [torch.empty_like(total) for _ in range(group.size())]
        dist.all_gather(parts, total.contiguous(), group=group)
        total = parts[0]
        for part in parts[1:]:
            total += part
        if place.reduce_op == "avg":
            total /= group.size()
        settled[dimension] = Replicate()
    parameter.grad = as_gradient(total, cast(nn.Parameter, parameter), tuple(settled))
