"""Takes an object apart into leaves (plain tensors with their paths) and a JSON tree of everything else.

Nothing is copied here: a leaf refers to the live tensor's memory. A module counts by its parameters and
persistent buffers (a tied one once), an optimizer by the index of its parameters, anything else by what its
`state_dict()` returns now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from lightkeeper.manager.buckets import local_tensor, placements_of
from lightkeeper.manager.state.codec import Json, StateRefused, dtype_name, encode
from lightkeeper.words import article

Kind: TypeAlias = Literal["module", "optimizer", "tensor", "object"]

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class Leaf:
    """A plain strided tensor of the state.

    Attributes:
        path: Its name in the whole state.
        tensor: The live tensor, detached: this rank's shard, or an inner tensor of a subclass.
        shape: Of the tensor that the user sees, if this is a shard of it; else the tensor's own.
        placements: How that one is placed on its mesh, one text per mesh dimension; () if not distributed.
        wrap: What this tensor is the inner of: the subclass and its settings; "" for none.
    """

    path: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    placements: tuple[str, ...] = ()
    wrap: str = ""


@dataclass(frozen=True)
class Captured:
    """One registered object, taken apart.

    Attributes:
        kind: How it is taken apart and put back.
        leaves: Its tensors.
        tree: The rest, with the tensors by their paths.
    """

    kind: Kind
    leaves: list[Leaf] = field(default_factory=list)
    tree: Json = None


def kind_of(obj: Any, name: str) -> Kind:
    """How `obj` is taken apart.

    Raises:
        StateRefused: it has no state that could be read and put back.
    """
    if isinstance(obj, nn.Module):
        return "module"
    if isinstance(obj, torch.optim.Optimizer):
        own = type(obj)
        if own.state_dict is not torch.optim.Optimizer.state_dict:
            raise StateRefused(
                f"{name} is {article(own.__qualname__)} with a state_dict() of its own, which may hold more than the "
                "state of its parameters: register an object with state_dict() and load_state_dict() that wraps it"
            )
        return "optimizer"
    if isinstance(obj, torch.Tensor):
        return "tensor"
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return "object"
    raise StateRefused(f"{name} is {article(type(obj).__qualname__)}: it has no state_dict() and load_state_dict()")


def capture(name: str, obj: Any) -> Captured:
    """Take `obj` apart; on the training thread, at a step boundary.

    Raises:
        StateRefused: a part of it cannot be copied exactly.
    """
    kind = kind_of(obj, name)
    if kind == "module":
        return _capture_module(name, obj)
    if kind == "optimizer":
        return _capture_optimizer(name, obj)
    if kind == "tensor":
        return Captured(kind, list(leaves_of(name, obj)))
    captured = Captured(kind)

    def plain_only(path: str, tensor: torch.Tensor) -> None:
        if type(tensor) not in _PLAIN:
            raise StateRefused(
                f"{path} is {article(type(tensor).__qualname__)}: register the module or optimizer it is of"
            )
        captured.leaves.extend(leaves_of(path, tensor))

    return Captured(kind, captured.leaves, encode(obj.state_dict(), name, plain_only))


def leaves_of(path: str, tensor: torch.Tensor, wrap: str = "") -> Iterator[Leaf]:
    """The plain tensors that make up a tensor: itself, its local shard, or the inner tensors of a subclass.

    Raises:
        StateRefused: it has no bytes of its own, or is of a subclass that does not say what it is made of.
    """
    placed = placements_of(tensor)
    if placed is not None:
        for leaf in leaves_of(path, local_tensor(tensor), wrap):
            yield Leaf(leaf.path, leaf.tensor, tuple(tensor.shape), tuple(map(str, placed)), leaf.wrap)
    elif type(tensor) in _PLAIN:
        _check_plain(path, tensor)
        yield Leaf(path, tensor.detach(), tuple(tensor.shape), (), wrap)
    elif hasattr(tensor, "__tensor_flatten__"):
        inner, settings = tensor.__tensor_flatten__()
        kind = f"{wrap}{type(tensor).__module__}.{type(tensor).__qualname__}{_settings_text(path, settings)}"
        for attribute in inner:
            yield from leaves_of(f"{path}.{attribute}", getattr(tensor, attribute), f"{kind}.{attribute} ")
    else:
        raise StateRefused(f"{path} is {article(type(tensor).__qualname__)}, which does not say what it is made of")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters, group by group: their places are their indices."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_path(name: str, index: int, key: str) -> str:
    """Path of one value of an optimizer's state."""
    return f"{name}.state.{index}.{key}"


def extra_state_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in it that have a state beside parameters and buffers, each with its name."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield name, part


def _capture_module(name: str, module: nn.Module) -> Captured:
    leaves: list[Leaf] = []
    for key, parameter in module.named_parameters():
        leaves.extend(leaves_of(f"{name}.{key}", parameter))
    for key, buffer in _persistent_buffers(module):
        leaves.extend(leaves_of(f"{name}.{key}", buffer))
    extra = {
        key: encode(part.get_extra_state(), f"{name}.{key}.extra_state") for key, part in extra_state_modules(module)
    }
    return Captured("module", leaves, extra)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is None or key in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, buffer


def _capture_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Captured:
    leaves: list[Leaf] = []

    def out(path: str, tensor: torch.Tensor) -> None:
        leaves.extend(leaves_of(path, tensor))

    groups = []
    for g, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append([len(group["params"]), encode(hyper, f"{name}.groups.{g}", out)])
    parameters = parameters_of(optimizer)
    state = []
    for i, parameter in enumerate(parameters):
        if parameter in optimizer.state:
            state.append([i, encode(optimizer.state[parameter], f"{name}.state.{i}", out)])
    if len(state) < len(optimizer.state):
        raise StateRefused(f"{name}.state has a key that is not one of the optimizer's parameters")
    return Captured("optimizer", leaves, {"groups": groups, "state": state})


def _check_plain(path: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise StateRefused(f"{path} is a {kind} tensor: only dense ones are copied")
    if tensor.device.type not in ("cpu", "cuda"):
        raise StateRefused(f"{path} is on device {tensor.device}: only cpu and cuda tensors are copied")
    dtype_name(tensor.dtype, path)


def _settings_text(path: str, settings: Any) -> str:
    try:
        return f"{encode(_describable(settings), path)}"
    except StateRefused as e:
        raise StateRefused(f"{path}: the settings of its tensor subclass cannot be compared: {e}") from e


def _describable(settings: Any) -> Any:
    """Settings of a subclass with devices and layouts as text, so that they can be compared as such."""
    if isinstance(settings, dict):
        return {str(key): _describable(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_describable(value) for value in settings]
    if isinstance(settings, torch.device):
        return settings.type
    return str(settings) if isinstance(settings, torch.layout | torch.memory_format) else settings
