"""What a user gives a manager (modules, optimizers, extras), each as one thing, several or named ones, taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightkeeper.errors import UsageError
from lightkeeper.manager.fingerprint import Modules, Optimizers, named_optimizers
from lightkeeper.manager.state.registry import StateRegistry


def all_modules(model: Modules) -> list[nn.Module]:
    """In the order in which they were given."""
    if isinstance(model, nn.Module):
        return [model]
    return list(model.values()) if isinstance(model, Mapping) else list(model)


def trained_parameters(model: Modules) -> list[tuple[str, nn.Parameter]]:
    """Those that require a gradient, by name.

    Raises:
        UsageError: there are none.
    """
    if isinstance(model, nn.Module):
        modules: dict[Any, nn.Module] = {"": model}
    else:
        modules = dict(model) if isinstance(model, Mapping) else dict(enumerate(model))
    named = []
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                named.append((f"{prefix}.{name}" if prefix != "" else name, parameter))
    if not named:
        raise UsageError("the model has no parameter that is trained")
    return named


def check_optimizers(optimizers: Optimizers, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Sees that every parameter that is updated is one whose gradient is reduced.

    Raises:
        UsageError: one is not.
    """
    known = {id(parameter) for _, parameter in parameters}
    for _, optimizer in named_optimizers(optimizers):
        given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        strange = [p for p in given if id(p) not in known]
        if strange:
            raise UsageError(
                f"{type(optimizer).__name__} updates {len(strange)} parameters (of {len(given)}) that are not the "
                "model's: nobody would reduce their gradients; give Manager every module that is trained"
            )


def register(registry: StateRegistry, name: str, given: Any, exclude: Sequence[str] = ()) -> None:
    """Registers one object, or several under numbered or given names."""
    if isinstance(given, Mapping):
        for key, obj in given.items():
            registry.register(f"{name}-{key}", obj, exclude=exclude)
    elif isinstance(given, Sequence):
        for number, obj in enumerate(given):
            registry.register(f"{name}-{number}", obj, exclude=exclude)
    else:
        registry.register(name, given, exclude=exclude)


def shape_and_dtype(given: Any) -> tuple[Any, ...]:
    """Of an extra that was given as its shape, or as shape and dtype."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], torch.dtype):
        return given
    return (given,)
