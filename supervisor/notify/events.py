"""What became of messages, as events."""

from __future__ import annotations

from lightkeeper.events.header import Event
from lightkeeper.events.of_supervisor import Notified, NotNotified
from lightkeeper.supervisor.notify.notifier import Outcome


def event_of(outcome: Outcome) -> Event:
    """`notified`, or `not_notified` with the reason."""
    message = outcome.message
    if not outcome.reason:
        seconds = round(outcome.seconds, 3)
        return Notified(
            what=message.what, via=outcome.via, summary=message.summary, seconds=seconds, tries=outcome.tries
        )
    return NotNotified(
        what=message.what, via=outcome.via, reason=outcome.reason, summary=message.summary, tries=outcome.tries
    )
