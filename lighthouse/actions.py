"""What the membership machine asks the service to do, in the order in which it must be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightkeeper.lighthouse.messages import ToManager
from lightkeeper.lighthouse.names import Membership, Term


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a manager's stream."""

    connection: int
    message: ToManager


@dataclass(frozen=True, slots=True)
class Close:
    """End a stream after what was sent on it."""

    connection: int


@dataclass(frozen=True, slots=True)
class Promised:
    """Log, fsynced before anything that follows: this epoch number is used up; `planned` is prepared with it."""

    number: int
    planned: Membership | None = None


@dataclass(frozen=True, slots=True)
class Activated:
    """Log, fsynced before anything that follows: this membership is in force."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class Ended:
    """Log, fsynced: the job has ended; the next epoch is a first one.

    Attributes:
        ok: whether its last step is final; who was a member may still come to close it.
    """

    reason: str
    ok: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Write an event: its kind and fields are those of ``events/schema.py``."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rise:
    """Log, fsynced before anything that follows: this lighthouse met a higher term and takes a still higher one."""

    term: Term


@dataclass(frozen=True, slots=True)
class Superseded:
    """Log, fsynced before anything that follows: this log no longer says who is a member; another lighthouse may."""


Record = Promised | Activated | Ended | Superseded
Action = Send | Close | Record | Rise | Note
