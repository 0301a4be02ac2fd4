"""A TOML table as a frozen dataclass: every key known, every value of its type, and one line for what is not.

As a customs form: each field has its own box, and whoever writes beside the boxes is told which box was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lightkeeper.errors import UsageError

T = TypeVar("T")


def read_table(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """The table as a `kind`: a dataclass of str, int, float, bool, tuples and dicts of such, and tables.

    Args:
        kind: the dataclass; fields without a default must be given.
        table: as `tomllib` gives it.
        where: its name for messages, such as "job.toml [checkpoint]".

    Raises:
        UsageError: an unknown key (the nearest known one is named), one that is missing, or a value of another type.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            known = f"did you mean {near[0]}?" if near else f"it takes {', '.join(fields)}"
            raise UsageError(f"{where}: unknown key {key!r}; {known}")
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _value(hints[name], table[name], f"{where} {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where}: {name} is missing")
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
        return _value(hint, value, where)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} is a table, not {_named(value)}")
        return read_table(typing.cast(Any, hint), value, where)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{where} is a list, not {_named(value)}")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} is a table, not {_named(value)}")
        item = typing.get_args(hint)[1]
        return {str(key): _value(item, one, f"{where}.{key}") for key, one in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is float and not math.isfinite(value):
        raise UsageError(f"{where} is a number, and {value} is none that can be meant")
    if type(value) is not hint:
        raise UsageError(f"{where} is {_KINDS[hint]}, not {_named(value)}")
    return value


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _named(value: Any) -> str:
    return f"{value!r}"[:80]
