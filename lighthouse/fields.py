"""Dataclasses to protobuf and back, by equal names of types and fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from lightkeeper.lighthouse import messages
from lightkeeper.lighthouse.names import Membership
from lightkeeper.protos import lighthouse_pb2


def to_wire(value: Any, roster: Callable[[Membership], Any] | None = None) -> Any:
    """The protobuf message with the name and the fields of this dataclass.

    Args:
        value: the dataclass.
        roster: how a membership within it is said; None: as it is.
    """
    if roster is not None and isinstance(value, Membership):
        return roster(value)
    wire = getattr(lighthouse_pb2, type(value).__name__)()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item is None:
            continue
        if dataclasses.is_dataclass(item):
            getattr(wire, field.name).CopyFrom(to_wire(item, roster))
        elif isinstance(item, Mapping):
            getattr(wire, field.name).update(item)
        elif isinstance(item, tuple):
            target = getattr(wire, field.name)
            target.extend(to_wire(x, roster) if dataclasses.is_dataclass(x) else x for x in item)
        else:
            setattr(wire, field.name, item)
    return wire


def from_wire(wire: Message, roster: Callable[[Any], Membership] | None = None) -> Any:
    """The dataclass with the name and the fields of this protobuf message.

    Args:
        wire: the protobuf message.
        roster: what reads a `Roster` within it.

    Raises:
        ValueError: if a message field that must be there is missing.
    """
    if roster is not None and isinstance(wire, lighthouse_pb2.Roster):
        return roster(wire)
    cls = getattr(messages, wire.DESCRIPTOR.name)
    values: dict[str, Any] = {}
    for field in wire.DESCRIPTOR.fields:
        value = getattr(wire, field.name)
        if field.is_repeated:
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if is_map:
                values[field.name] = dict(value)
            else:
                values[field.name] = tuple(from_wire(x, roster) if isinstance(x, Message) else x for x in value)
        elif isinstance(value, Message):
            if wire.HasField(field.name):
                values[field.name] = from_wire(value, roster)
            elif field.has_presence and _is_optional(cls, field.name):
                values[field.name] = None
            else:
                raise ValueError(f"{wire.DESCRIPTOR.name} without {field.name}")
        else:
            unsaid = field.has_presence and not wire.HasField(field.name)
            values[field.name] = None if unsaid else value
    return cls(**values)


def _is_optional(cls: type, name: str) -> bool:
    (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
    return "None" in str(field.type)
