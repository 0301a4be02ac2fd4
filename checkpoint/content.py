"""A copy of the state as `torch.distributed.checkpoint` knows it, and the names that its tensors have there.

Names are those of torch's own `get_state_dict`: a model's by its qualified names without what compiling or wrapping
puts into them, an optimizer's state by those of its parameters. So torch's own tools load what is written here, on any
number of ranks. What torch's format would change (tuples, integer keys, the order of things) is kept exactly in the
description beside it (`manager.state.layout`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from lightkeeper.manager.buckets import local_tensor, placements_of
from lightkeeper.manager.state.codec import decode
from lightkeeper.manager.state.layout import Layout, ObjectHeader, TensorHeader, with_tensors
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.restore import tensors_by_path
from lightkeeper.manager.state.tree import extra_state_modules, parameters_of

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)")

Tensors = Mapping[str, torch.Tensor]


class Names:
    """What the tensors of a registry's objects are called in a checkpoint.

    Args:
        registry: the objects.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self.registry = registry
        modules = {name: obj for name, obj in registry.shared.items() if isinstance(obj, nn.Module)}
        self._of: dict[int, str] = {}
        for name, module in modules.items():
            prefix = f"{name}." if len(modules) > 1 else ""
            for key, parameter in module.named_parameters():
                self._of.setdefault(id(parameter), prefix + plain(key, module))

    def parameters(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Of an optimizer's parameters, in its order."""
        return [self._of.get(id(p), f"parameter-{i}") for i, p in enumerate(parameters_of(optimizer))]

    def tied(self, name: str) -> dict[str, str]:
        """Of a module's tensors that go by several names: the further ones, and the first of each."""
        module = self.registry.shared[name]
        first: dict[int, str] = {}
        found = {}
        for key, tensor in _with_duplicates(module):
            if id(tensor) in first:
                found[plain(key, module)] = plain(first[id(tensor)], module)
            else:
                first[id(tensor)] = key
        return found


def plain(key: str, module: nn.Module) -> str:
    """A qualified name without the parts that wrappers put into it."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        key = key.removeprefix("module.")
    return _WRAPPERS.sub(r"\1", key).replace("..", ".").lstrip(".")


def state_dict_of(layout: Layout, tensors: Tensors, names: Names) -> dict[str, Any]:
    """The whole state, nested as torch's `get_state_dict` nests it.

    Args:
        layout: what the state is.
        tensors: its tensors by path, distributed ones whole.
        names: of the objects here, which are those of the layout.
    """
    found: dict[str, Any] = {}
    for one in layout.objects:
        obj = names.registry.shared[one.name]
        if one.kind == "module":
            found[one.name] = _module(one.name, obj, one.tree, layout, tensors, names)
        elif one.kind == "optimizer":
            found[one.name] = _optimizer(names.parameters(obj), one.tree, tensors)
        elif one.kind == "tensor":
            found[one.name] = tensors[one.name]
        else:
            found[one.name] = _listed(decode(one.tree, tensors.__getitem__))
    return found


def flat_tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a nested state by their keys in a checkpoint."""
    return {".".join(map(str, path)): tensor for path, tensor in _walk((), state_dict)}


def wholes(registry: StateRegistry) -> dict[str, torch.Tensor]:
    """The tensors of modules and optimizers as they are held now, by path; only distributed ones."""
    found = {}
    for name, obj in registry.shared.items():
        for path, tensor in tensors_by_path(name, obj).items():
            if placements_of(tensor) is not None:
                found[path] = tensor
    return found


def around(local: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    """A tensor that is distributed as `whole` is, with `local` as its part here, wherever that lies."""
    if whole is None:
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(whole, DTensor)
    make: Any = DTensor  # from_local would move it to the mesh's device
    return cast(torch.Tensor, make(local, whole._spec, requires_grad=False))


def plainly(layout: Layout, registry: StateRegistry) -> Layout:
    """The description with the names that modules' tensors have without wrappers."""
    modules = {name: obj for name, obj in registry.shared.items() if isinstance(obj, nn.Module)}
    headers = []
    for header in layout.tensors:
        owner, _, key = header.path.partition(".")
        path = f"{owner}.{plain(key, modules[owner])}" if owner in modules else header.path
        headers.append(dataclasses.replace(header, path=path))
    objects = [
        dataclasses.replace(one, tree={plain(key, modules[one.name]): value for key, value in one.tree.items()})
        if one.name in modules
        else one
        for one in layout.objects
    ]
    return Layout(layout.name, headers, objects, layout.range_bytes)


def laid_out_here(saved: Layout, registry: StateRegistry) -> Layout:
    """The description of a saved state as it is to lie on this rank, which may hold other parts of its tensors.

    A module's tensors lie as they do here. So does an optimizer's state that has the shape of its parameter; what has
    another shape stays as it was.

    Args:
        saved: as `plainly` made it.
        registry: the objects here.
    """
    layout = registry.layout(saved.name, saved.range_bytes)
    own = {named.path: header for named, header in zip(plainly(layout, registry).tensors, layout.tensors, strict=True)}
    modules = {name: obj for name, obj in registry.shared.items() if isinstance(obj, nn.Module)}
    parameters = {
        name: parameters_of(obj)
        for name, obj in registry.shared.items()
        if isinstance(obj, torch.optim.Optimizer)
    }  # fmt: skip
    placed = []
    for header in saved.tensors:
        here = own.get(header.path)
        owner = header.path.partition(".")[0]
        if owner in parameters:
            placed.append(_as_parameter(header, parameters[owner]))
        elif here is not None and here.dtype == header.dtype and here.global_shape == header.global_shape:
            placed.append(here)
        else:
            placed.append(header)
    objects = [_as_here(one, modules[one.name]) if one.name in modules else one for one in saved.objects]
    return with_tensors(Layout(saved.name, saved.tensors, objects, saved.range_bytes), placed)


def _as_here(one: ObjectHeader, module: nn.Module) -> ObjectHeader:
    """A module's extra states by the names that its parts have here."""
    here = {plain(key, module): key for key, _ in extra_state_modules(module)}
    return dataclasses.replace(one, tree={here.get(key, key): value for key, value in one.tree.items()})


def _as_parameter(header: TensorHeader, parameters: list[torch.Tensor]) -> TensorHeader:
    _, section, rest = (*header.path.split(".", 2), "", "")[:3]
    index = rest.partition(".")[0]
    if section != "state" or not index.isdecimal() or int(index) >= len(parameters):
        return header
    parameter = parameters[int(index)]
    if tuple(parameter.shape) != header.global_shape or header.wrap:
        return header
    placements = tuple(map(str, placements_of(parameter) or ()))
    shape = tuple(local_tensor(parameter).shape)
    return dataclasses.replace(header, shape=shape, placements=placements, device=parameter.device.type)


def _with_duplicates(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def _module(
    name: str, module: nn.Module, tree: Any, layout: Layout, tensors: Tensors, names: Names
) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {}
    for header in layout.tensors:
        if header.path.startswith(f"{name}."):
            found[plain(header.path[len(name) + 1 :], module)] = tensors[header.path]
    for key, first in names.tied(name).items():
        if first in found:
            found[key] = found[first]
    for key, value in tree.items():
        found[plain(f"{key}._extra_state" if key else "_extra_state", module)] = decode(value)
    return found


def _optimizer(parameters: list[str], tree: Any, tensors: Tensors) -> dict[str, Any]:
    groups, at = [], 0
    for count, hyper in tree["groups"]:
        groups.append({**decode(hyper, tensors.__getitem__), "params": parameters[at : at + count]})
        at += count
    state = {parameters[index]: decode(values, tensors.__getitem__) for index, values in tree["state"]}
    return {"state": state, "param_groups": groups}


def _listed(value: Any) -> Any:
    """A tuple with tensors in it as a list: torch's format would pickle it whole."""
    if isinstance(value, Mapping):
        return {key: _listed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_listed(one) for one in value]
        return items if isinstance(value, list) or any(True for _ in _walk((), items)) else value
    return value


def _walk(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _walk((*path, str(key)), one)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _walk((*path, number), one)
