"""Configs by name: `llama3_8b_ft` is torchtitan's `llama3_8b`, made fault tolerant.

torchtitan asks for the attribute that ``--config`` names. Every config function that it ships is found with `_ft`
appended; a dotted name, ``my.module.my_config_ft``, is that of a function of anybody's. Its module is looked for as
torchtitan does for ``--module``: ``llama3`` is one that it ships, and of a package its `config_registry` is meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, cast

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models

from lightkeeper.cli.titan import SUFFIX
from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.config import fault_tolerant
from lightkeeper.manager.usererrors import tell_in_one_line


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    tell_in_one_line()
    if not name.endswith(SUFFIX):
        if name in _shipped():
            raise UsageError(f"the configs of this module end in {SUFFIX}: give --config {name}{SUFFIX}")
        raise AttributeError(f"no config {name!r}: those of this module end in {SUFFIX}")
    module, _, function = name.removesuffix(SUFFIX).rpartition(".")
    make = _of_module(module, function) if module else _of_torchtitan(function)
    return lambda: fault_tolerant(make())


def _of_module(path: str, function: str) -> Callable[[], Any]:
    """The config function of that name of any module."""
    module = _module(path)
    make = getattr(module, function, None)
    if not callable(make):
        near = _near(function, _functions(module), f"{path}.")
        raise UsageError(f"{module.__name__} has no config function {function!r}{near}")
    return cast(Callable[[], Any], make)


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


def _of_torchtitan(function: str) -> Callable[[], Any]:
    """The config function of that name of any model that torchtitan ships."""
    shipped = _shipped()
    if function in shipped:
        return shipped[function]
    raise UsageError(
        f"torchtitan ships no config {function!r}, so there is no {function}{SUFFIX}{_near(function, shipped)}"
    )


def _near(function: str, known: Iterable[str], before: str = "") -> str:
    near = difflib.get_close_matches(function, sorted(known), 3)
    return f"; near are {', '.join(f'{before}{one}{SUFFIX}' for one in near)}" if near else ""


def _shipped() -> dict[str, Callable[[], Any]]:
    return {name: make for module in _registries() for name, make in _functions(module).items()}


def _functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """The functions that a module defines itself: of what it imports none is a config."""
    here = ((name, one) for name, one in vars(module).items() if isinstance(one, FunctionType) and name[0] != "_")
    return {name: one for name, one in here if one.__module__ == module.__name__}


def _registries() -> Iterator[ModuleType]:
    for model in sorted(_supported_models):
        try:
            yield import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:  # a model whose own requirements are not installed
            continue
