"""The kinds of events about what is done from outside of a job: who was told of it."""

from __future__ import annotations

from lightkeeper.events.header import Event


class Notified(Event, frozen=True, kw_only=True):
    """A person was told of `what` happened; `via`: by which notifier. `seconds`: over all `tries`."""

    what: str
    via: str
    summary: str = ""
    seconds: float = 0.0
    tries: int = 1


class NotNotified(Event, frozen=True, kw_only=True):
    """A person was not told, and why not; nothing else follows from that."""

    what: str
    via: str
    reason: str
    summary: str = ""
    tries: int = 0
