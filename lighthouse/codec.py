"""Messages on a stream, there and back: each in an envelope, its member lists as the stream's `Rosters` say them."""

from __future__ import annotations

from typing import Any

from lightkeeper.lighthouse import messages
from lightkeeper.lighthouse.fields import from_wire, to_wire
from lightkeeper.lighthouse.rosters import Rosters
from lightkeeper.protos import lighthouse_pb2


def wrap(message: messages.ToLighthouse | messages.ToManager, rosters: Rosters | None = None) -> Any:
    """A stream's envelope (``FromManager`` or ``ToManager``) around a message.

    Args:
        message: what is said.
        rosters: what the stream has carried; None: nothing yet.
    """
    envelope = (
        lighthouse_pb2.FromManager if isinstance(message, messages.ToLighthouse) else lighthouse_pb2.ToManager
    )()
    wire = to_wire(message, (rosters or Rosters()).put_in)
    getattr(envelope, type(message).__name__.lower()).CopyFrom(wire)
    return envelope


def unwrap(envelope: Any, rosters: Rosters | None = None) -> Any:
    """The message in a stream's envelope.

    Args:
        envelope: what came.
        rosters: what the stream has carried; None: nothing yet.

    Raises:
        UnknownEpoch: if it names a membership by an epoch that is not known here.
        ValueError: if the envelope is empty or the message is malformed.
    """
    which = envelope.WhichOneof("message")
    if which is None:
        raise ValueError("empty message")
    return from_wire(getattr(envelope, which), (rosters or Rosters()).take_out)
