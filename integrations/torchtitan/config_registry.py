"""Configs by name: `llama3_8b_ft` is torchtitan's `llama3_8b`, made fault tolerant.

torchtitan asks for the attribute that ``--config`` names. Every config function that it ships is found with `_ft`
appended; a dotted name, ``my.module.my_config_ft``, is that of a function of anybody's. Its module is looked for as
torchtitan does for ``--module``: ``llama3`` is one that it ships, and of a package its `config_registry` is meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.config import fault_tolerant
from lightkeeper.manager.usererrors import tell_in_one_line

SUFFIX = "_ft"


def __getattr__(name: str) -> Callable[[], Any]:
    if not name.endswith(SUFFIX) or name.startswith("_"):
        raise AttributeError(f"no config {name!r}: those of this module end in {SUFFIX}")
    tell_in_one_line()
    module, _, function = name.removesuffix(SUFFIX).rpartition(".")
    make = _named(_module(module), function) if module else _shipped(function)
    return lambda: fault_tolerant(make())


def _module(name: str) -> ModuleType:
    """The module that ``--module`` would find under this name.

    Raises:
        UsageError: there is none.
        ImportError: it is there, and cannot be imported.
    """
    short = name in _supported_models or name in _supported_experiments
    places = ("torchtitan.models.{}", "torchtitan.experiments.{}") if short else ("{}",)
    tried = [f"{place.format(name)}.config_registry" for place in places] + ([] if short else [name])
    for candidate in tried:
        try:
            return import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                raise  # it is there, and what it needs is missing
    raise UsageError(f"there is no module {name} with configs: tried {', '.join(tried)}")


def _named(module: ModuleType, function: str) -> Callable[[], Any]:
    make = getattr(module, function, None)
    if not callable(make):
        raise UsageError(f"{module.__name__} has no config function {function}")
    return make


def _shipped(function: str) -> Callable[[], Any]:
    """The config function of that name of any model that torchtitan ships."""
    names: set[str] = set()
    for module in _registries():
        if callable(make := getattr(module, function, None)) and function.islower():
            return make
        names.update(name for name in vars(module) if name[0].islower() and callable(getattr(module, name)))
    near = difflib.get_close_matches(function, sorted(names), 3)
    hint = f"; near are {', '.join(one + SUFFIX for one in near)}" if near else ""
    raise UsageError(f"torchtitan ships no config {function!r}, so there is no {function}{SUFFIX}{hint}")


def _registries() -> Iterator[ModuleType]:
    for model in sorted(_supported_models):
        try:
            yield import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:  # a model whose own requirements are not installed
            continue
