"""How a gradient lies on its device mesh, as a number that travels in the entry.

A gradient may be placed otherwise than its parameter: sequence-parallel norms have replicated parameters whose
gradients are sums still pending over the mesh. A group that had no microbatch has seen no gradient, and must give the
optimizer one of the same kind; so the kind is part of the entry.
"""

from __future__ import annotations

from typing import Any

import torch

from lightkeeper.manager.buckets import Placements, placements_of

_BITS = 4  # of each mesh dimension
_DIMENSIONS_MAX = 5
CODES = 1 << (_BITS * _DIMENSIONS_MAX)
_SAME, _SUM, _AVG, _REPLICATE, _SHARD = range(5)  # from _SHARD on: the sharded dimension
_SHARD_MAX = (1 << _BITS) - 1 - _SHARD


def encode(name: str, gradient: torch.Tensor, parameter: torch.Tensor) -> int:
    """The number for a gradient, 0 if it is placed as its parameter.

    Args:
        name: The parameter's, for messages.
        gradient: Of that parameter.
        parameter: The parameter.

    Raises:
        TypeError: a kind of placement that has no number.
    """
    placed, own = placements_of(gradient), placements_of(parameter)
    if placed == own:
        return 0
    if placed is None or own is None:
        raise TypeError(f"{name} is placed {own} on a device mesh and its gradient {placed}")
    if gradient.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        raise TypeError(f"{name} and its gradient are on different device meshes")
    code = 0
    for place, of_parameter in zip(reversed(placed), reversed(own), strict=True):
        kind = _SAME if place == of_parameter else _kind(place)
        if kind is None or len(placed) > _DIMENSIONS_MAX:
            raise TypeError(f"the gradient of {name} is placed {placed}, its parameter {own}: that cannot be reduced")
        code = code << _BITS | kind
    return code


def decode(code: int, parameter: torch.Tensor) -> Placements:
    """The placements that a number stands for; the parameter's own for 0."""
    own = placements_of(parameter)
    if own is None or code == 0:
        return own
    from torch.distributed.tensor import Partial, Replicate, Shard

    placed: list[Any] = []
    for of_parameter in own:
        kind, code = code & ((1 << _BITS) - 1), code >> _BITS
        named = {_SAME: of_parameter, _SUM: Partial("sum"), _AVG: Partial("avg"), _REPLICATE: Replicate()}
        placed.append(named[kind] if kind in named else Shard(kind - _SHARD))
    return tuple(placed)


def _kind(place: Any) -> int | None:
    if place.is_partial():
        return {"sum": _SUM, "avg": _AVG}.get(place.reduce_op)
    if place.is_replicate():
        return _REPLICATE
    if type(place).__name__ == "Shard" and 0 <= place.dim <= _SHARD_MAX:
        return _SHARD + int(place.dim)
    return None
