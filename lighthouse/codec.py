"""Dataclasses to protobuf and back, by equal names of types and fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from lightkeeper.lighthouse import messages
from lightkeeper.protos import lighthouse_pb2


def to_wire(value: Any) -> Any:
    """The protobuf message with the name and the fields of this dataclass."""
    wire = getattr(lighthouse_pb2, type(value).__name__)()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item is None:
            continue
        if dataclasses.is_dataclass(item):
            getattr(wire, field.name).CopyFrom(to_wire(item))
        elif isinstance(item, Mapping):
            getattr(wire, field.name).update(item)
        elif isinstance(item, tuple):
            target = getattr(wire, field.name)
            target.extend(to_wire(x) if dataclasses.is_dataclass(x) else x for x in item)
        else:
            setattr(wire, field.name, item)
    return wire


def from_wire(wire: Message) -> Any:
    """The dataclass with the name and the fields of this protobuf message.

    Raises:
        ValueError: if a message field that must be there is missing.
    """
    cls = getattr(messages, wire.DESCRIPTOR.name)
    values: dict[str, Any] = {}
    for field in wire.DESCRIPTOR.fields:
        value = getattr(wire, field.name)
        if field.is_repeated:
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if is_map:
                values[field.name] = dict(value)
            else:
                values[field.name] = tuple(from_wire(x) if isinstance(x, Message) else x for x in value)
        elif isinstance(value, Message):
            if wire.HasField(field.name):
                values[field.name] = from_wire(value)
            elif field.has_presence and _is_optional(cls, field.name):
                values[field.name] = None
            else:
                raise ValueError(f"{wire.DESCRIPTOR.name} without {field.name}")
        else:
            values[field.name] = value
    return cls(**values)


def _is_optional(cls: type, name: str) -> bool:
    (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
    return "None" in str(field.type)


def wrap(message: messages.ToLighthouse | messages.ToManager) -> Any:
    """A stream's envelope (``FromManager`` or ``ToManager``) around a message."""
    envelope = (
        lighthouse_pb2.FromManager if isinstance(message, messages.ToLighthouse) else lighthouse_pb2.ToManager
    )()
    getattr(envelope, type(message).__name__.lower()).CopyFrom(to_wire(message))
    return envelope


def unwrap(envelope: Any) -> Any:
    """The message in a stream's envelope.

    Raises:
        ValueError: if the envelope is empty or the message is malformed.
    """
    which = envelope.WhichOneof("message")
    if which is None:
        raise ValueError("empty message")
    return from_wire(getattr(envelope, which))
