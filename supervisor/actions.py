"""What the supervisor's machine wants done, in this order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Action:
    """Base of all."""


@dataclass(frozen=True)
class Check(Action):
    """Preflight on a node, for a group; answered by `checked`."""

    node: str
    group: str


@dataclass(frozen=True)
class Launch(Action):
    """Start a group on these nodes, its part 0 on the first; answered by `ended`."""

    group: str
    nodes: tuple[str, ...]
    start: int


@dataclass(frozen=True)
class Finish(Action):
    """End what is left of a group, at once; `ended` comes if it was at work."""

    group: str
    why: str


@dataclass(frozen=True)
class Ask(Action):
    """Ask a group to leave in good order."""

    group: str
    why: str


@dataclass(frozen=True)
class StartLighthouse(Action):
    """Start the lighthouse, with its log."""


@dataclass(frozen=True)
class Exclude(Action):
    """A node goes into quarantine."""

    node: str
    reason: str
    evidence: str


@dataclass(frozen=True)
class BurnIn(Action):
    """A node in quarantine is tried for long; answered by `burned_in`."""

    node: str


@dataclass(frozen=True)
class Requeue(Action):
    """The run is put back where it came from: it goes on in another allocation."""

    why: str


@dataclass(frozen=True)
class Tell(Action):
    """A human is told: of which kind, in words, with the evidence, the classified cause, and of which group."""

    kind: str
    text: str
    evidence: str = ""
    cause: str = ""
    group: str = ""


@dataclass(frozen=True)
class Note(Action):
    """An event, by the name of its kind, and its fields."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Over(Action):
    """The supervisor ends, with this exit code."""

    code: int
    reason: str
