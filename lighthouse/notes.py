"""The machine's notes as typed events."""

from __future__ import annotations

from typing import Any

from lightkeeper.events.schema import BY_NAME, Event
from lightkeeper.lighthouse.actions import Note
from lightkeeper.lighthouse.names import Epoch


def event(note: Note) -> Event:
    """The event a note stands for: an epoch becomes its number and its term's number, a list a tuple."""
    fields: dict[str, Any] = {}
    for name, value in note.fields.items():
        if isinstance(value, Epoch):
            fields[name] = value.number
            if name == "epoch":
                fields["term"] = value.term.number
        else:
            fields[name] = tuple(value) if isinstance(value, list) else value
    return BY_NAME[note.kind](**fields)
