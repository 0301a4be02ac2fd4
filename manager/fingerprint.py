"""One hash over the whole training state, and the signature that groups must have in common.

Groups that applied the same entries hold the same bits, so their fingerprints are equal. A fingerprint covers
the raw bytes of every parameter, buffer and optimizer state, together with names, dtypes and shapes, and
every scalar with its exact type. The signature is what must agree before a group may join: shapes and
settings, no values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import xxhash
from torch import nn

from lightkeeper.manager.buckets import local_tensor, placements_of
from lightkeeper.words import article

Modules: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def fingerprint(modules: Modules, optimizers: Optimizers = ()) -> str:
    """Hash of the state of `modules` and `optimizers`, 32 hexadecimal digits (xxh3_128).

    Sharded tensors count by this rank's shard: compare rank by rank. Waits for the device.

    Raises:
        TypeError: a value of a kind whose bits cannot be named (its path is given).
    """
    digest = xxhash.xxh3_128()
    for name, module in _named_modules(modules):
        for key, tensor in _tensors(name, module):
            _add(digest, key, tensor)
    for name, optimizer in named_optimizers(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for key in sorted(k for k in group if k != "params"):
                _add(digest, f"{name}.{g}.{key}", group[key])
            for i, parameter in enumerate(group["params"]):
                state = optimizer.state.get(parameter, {})
                for key in sorted(state):
                    _add(digest, f"{name}.{g}.{i}.{key}", state[key])
    return digest.hexdigest()


def signature(modules: Modules, optimizers: Optimizers = ()) -> dict[str, str]:
    """What groups must have in common: names to descriptions, without the values of the state.

    Returns:
        Parameters and buffers as "float32[8, 16]", with their placements and mesh if they are distributed;
        optimizers as their class and hyper-parameters. A learning rate that a scheduler drives counts by its initial
        value.
    """
    found: dict[str, str] = {}
    for name, module in _named_modules(modules):
        for key, tensor in _tensors(name, module):
            found[key] = _kind(tensor) + _spread(tensor)
    for name, optimizer in named_optimizers(optimizers):
        groups = [_hyper_parameters(group) for group in optimizer.param_groups]
        found[name] = f"{type(optimizer).__name__}: " + "; ".join(groups)
    return found


def settings_hash(optimizers: Optimizers) -> int:
    """16-bit hash of the learning rates and the other settings of `optimizers` as they are now.

    Settings in a device's memory are left out: reading them would wait for the device.
    """
    text = [
        (key, float(value) if isinstance(value, torch.Tensor) else value)
        for _, optimizer in named_optimizers(optimizers)
        for group in optimizer.param_groups
        for key, value in sorted(group.items())
        if isinstance(value, bool | int | float | str | tuple)
        or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu")
    ]
    return xxhash.xxh32_intdigest(repr(text).encode()) & 0xFFFF


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor of any dtype, in row-major order; not copied if it lies so on the CPU.

    Raises:
        TypeError: it is not dense.
    """
    if tensor.layout != torch.strided:
        raise TypeError(f"a {tensor.layout} tensor has no bytes of its own")
    dense = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(cast(Any, dense.view(torch.uint8).numpy()))


def _named_modules(modules: Modules) -> list[tuple[str, nn.Module]]:
    if isinstance(modules, nn.Module):
        return [("", modules)]
    if isinstance(modules, Mapping):
        return [(f"{name}.", modules[name]) for name in sorted(modules)]
    prefix = len(modules) > 1
    return [(f"{i}." if prefix else "", module) for i, module in enumerate(modules)]


def named_optimizers(optimizers: Optimizers) -> list[tuple[str, torch.optim.Optimizer]]:
    """One or several optimizers, each with the name that it has in fingerprints."""
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    return [(f"optimizer.{i}", optimizer) for i, optimizer in enumerate(optimizers)]


def _tensors(prefix: str, module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"{prefix}{name}", parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"{prefix}{name}", buffer


def _add(digest: xxhash.xxh3_128, path: str, value: Any) -> None:
    """Hash `value` under `path`: a kind, the length of what follows, and the bytes."""
    if isinstance(value, torch.Tensor):
        local = local_tensor(value)
        placed = placements_of(value)
        head, body = f"{_kind(local)}{placed or ''}".encode(), raw_bytes(local)
    elif isinstance(value, list | tuple):
        _add(digest, path, f"{type(value).__name__} of {len(value)}")
        for i, item in enumerate(value):
            _add(digest, f"{path}.{i}", item)
        return
    elif isinstance(value, dict):
        _add(digest, path, f"dict of {len(value)}")
        for key in sorted(value, key=str):
            _add(digest, f"{path}.{type(key).__name__}:{key}", value[key])
        return
    else:
        head, body = type(value).__name__.encode(), memoryview(_scalar_bytes(path, value))
    name = path.encode()
    digest.update(struct.pack("<QQQ", len(name), len(head), body.nbytes))
    digest.update(name + head)
    digest.update(body)


def _scalar_bytes(path: str, value: Any) -> bytes:
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.device):
        return str(value).encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"{path or 'a value'} is {article(type(value).__name__)}: it cannot be fingerprinted")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _spread(tensor: torch.Tensor) -> str:
    """How a distributed tensor lies on its mesh; empty for a plain one."""
    placements = placements_of(tensor)
    if placements is None:
        return ""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    size = "x".join(map(str, mesh.shape))
    names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    part = list(local_tensor(tensor).shape)
    return f" placed {', '.join(map(repr, placements))} on a mesh of {size}{names}, here {part}"


def _hyper_parameters(group: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in group.items() if key != "params"}
    if "initial_lr" in shown:
        shown.pop("lr", None)
    settings = ", ".join(f"{key}={_plain(shown[key])}" for key in sorted(shown))
    return f"{len(group['params'])} parameters, {settings}"


def _plain(value: Any) -> str:
    return repr(value.item()) if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
