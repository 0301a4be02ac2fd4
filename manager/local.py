"""What a rank and its group's manager say to each other over the local socket, and the frames it travels in.

On a node without the manager an agent serves the socket, and hands on what is said (`folding.py`).

A frame is a four-byte length and a msgpack object; its size is limited. Nothing is unpickled.
"""

from __future__ import annotations

import struct

import msgspec

from lightkeeper.lighthouse.deal import at_work

FRAME_BYTES_MAX = 16 << 20
HEADER = struct.Struct("<I")
OWN_KEYS = 0  # in the place of an epoch: rendezvous keys among the ranks of one group, which no other manager sees

# ---------------------------------------------------------------- rank to manager


class Message(msgspec.Struct, frozen=True, tag_field="kind", array_like=False):
    """Base of all local messages."""


class Register(Message, frozen=True, kw_only=True):
    """First message on the socket: which rank this is.

    Attributes:
        token: the job's token.
        transfer: address of the rank's transfer server, ``host:port``.
        progress: path of the file that shows the rank's phase.
    """

    token: str
    rank: int
    pid: int
    transfer: str
    progress: str


class Ready(Message, frozen=True, kw_only=True):
    """The rank stands before its first step.

    Attributes:
        signature: what must be alike in all groups, name to value.
        total: microbatches of the first step.
        fingerprint: of the state with which it comes.
        step: how many steps that state has behind it: the index of the first step.
    """

    signature: dict[str, str]
    total: int
    fingerprint: str = ""
    step: int = 0


class Vote(Message, frozen=True, kw_only=True):
    """The one call of a step.

    Attributes:
        epoch: number of the epoch in which the rank reduced.
        step: the step voted on.
        attempt: counts the tries at the step within the epoch (``again``).
        outcome: ``reduced``, ``again``, ``adopted``, ``closed`` or ``failed``; of a joiner ``healed``, ``followed``,
            ``idle`` (no further entry yet) or ``lost`` (it needs another snapshot).
        torn: of a joiner that is ``lost``: its state was overwritten in part, so nobody may go on from it.
        entry: after ``healed`` and ``followed``: epoch, term, lighthouse of the newest entry in the state.
        next_total: microbatches of the step after it; 0 if the run ends there.
        activates: number of the prepared epoch whose ready flag every member carries in this entry, 0 if none.
        error: why it failed.
        echo: whether it failed in another rank of this group, which says so itself.
        suspects: groups whose connection broke; the own group if it failed here and no connection broke.
    """

    epoch: int
    step: int
    outcome: str
    attempt: int = 0
    next_total: int = 0
    activates: int = 0
    error: str = ""
    suspects: tuple[str, ...] = ()
    entry: tuple[int, int, str] | None = None
    torn: bool = False
    echo: bool = False


class Built(Message, frozen=True, kw_only=True):
    """The process groups of a planned epoch are built here."""

    epoch: int


class BuildFailed(Message, frozen=True, kw_only=True):
    """The process groups of a planned epoch cannot be built here."""

    epoch: int
    error: str


class RankError(Message, frozen=True, kw_only=True):
    """An exception that started in the user's code is about to end this rank.

    Attributes:
        broken: whether it says that a connection to another process broke: then the cause is likely another rank.
    """

    step: int
    type: str
    message: str
    where: str
    traceback: str
    broken: bool = False


class AskLeave(Message, frozen=True, kw_only=True):
    """The rank asks for its group to leave at a step boundary.

    Attributes:
        signal: whether the rank got a signal (a second one ends the group at once).
    """

    reason: str
    signal: bool = False


class SetKey(Message, frozen=True, kw_only=True):
    """Set a rendezvous key of an epoch (or of `OWN_KEYS`); answered by `Key` with the same `request`."""

    epoch: int
    key: str
    value: bytes
    timeout_ms: int
    request: int


class GetKey(Message, frozen=True, kw_only=True):
    """Wait for a rendezvous key of an epoch (or of `OWN_KEYS`); answered by `Key` with the same `request`."""

    epoch: int
    key: str
    timeout_ms: int
    request: int


FromRank = Register | Ready | Vote | Built | BuildFailed | RankError | AskLeave | SetKey | GetKey

# ---------------------------------------------------------------- manager to rank


class Adopt(msgspec.Struct, frozen=True, kw_only=True):
    """The entry that this rank missed, and where to fetch it."""

    epoch: int
    term: int
    lighthouse: str
    step: int
    donor: str
    address: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch as one rank sees it.

    Attributes:
        members: groups in slot order.
        speeds: their relative speeds, by which microbatches are dealt; empty: all alike.
        step: the step that is done in it first.
        share: all microbatches of that step that belong to this group.
        total: microbatches of that step.
        adopt: the entry to be fetched and committed before that step, if this group missed it.
        planned: whether the entries activate it, not an answer.
    """

    epoch: int
    term: int
    lighthouse: str
    members: tuple[str, ...]
    slot: int
    step: int
    share: tuple[int, ...]
    total: int
    adopt: Adopt | None = None
    cause: str = ""
    planned: bool = False
    speeds: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether this group is the one that leads: the lowest slot of those that work."""
        speeds = at_work(self.speeds) or (1,)
        return self.slot == next(slot for slot, speed in enumerate(speeds) if speed)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a joiner heals from: the boundary, and each donor's name and transfer address for this rank."""

    step: int
    donors: tuple[tuple[str, str], ...]


class Answer(Message, frozen=True, kw_only=True):
    """The group's decision on a vote: the same for every rank, fixed once.

    Attributes:
        verdict: ``go`` (committed), ``again`` (reduce anew), ``recover`` (as the plan says), ``stop``, ``leave``,
            ``heal`` (from the source), ``copy`` (the state as it stands; the answer proper follows).
        copy: after ``go``: copy the state at the end of this step's body, and keep the entries after it.
        share: after ``go``: this group's microbatches of the next step.
        ready: number of the prepared epoch whose flag the next step's entry carries, 0 if none.
        ok: after ``stop``: whether the run ended well.
        asked: after ``stop``: whether somebody asked this group to leave.
        keep: after ``stop``: this group alone saves its last committed state before it ends.
    """

    verdict: str
    epoch: int = 0
    step: int = 0
    share: tuple[int, ...] = ()
    ready: int = 0
    plan: Plan | None = None
    source: Source | None = None
    copy: bool = False
    reason: str = ""
    ok: bool = False
    asked: bool = False
    keep: bool = False


class Registered(Message, frozen=True, kw_only=True):
    """The rank is known; its job and incarnation."""

    job: str
    group: str
    incarnation: str
    pid: int


class Abort(Message, frozen=True, kw_only=True):
    """Epochs below this number are over: abort their reduces. Nothing else follows from it.

    Attributes:
        recovery: the epoch that a recovery prepares; empty if the job ends.
    """

    below: int
    reason: str
    recovery: str = ""


class Build(Message, frozen=True, kw_only=True):
    """Build the process group of this epoch in the background."""

    plan: Plan


class Touch(Message, frozen=True, kw_only=True):
    """A copy of the state will be wanted at a boundary ahead: its memory is to be there by then."""


class Instead(Message, frozen=True, kw_only=True):
    """To a rank that waits for its donors to reach a boundary: another one. Of no effect once it has a state."""

    source: Source


class Release(Message, frozen=True, kw_only=True):
    """Nobody needs the copy and the kept entries any more."""


class Key(Message, frozen=True, kw_only=True):
    """A rendezvous key, or why there is none."""

    request: int
    value: bytes = b""
    error: str = ""


class Say(Message, frozen=True, kw_only=True):
    """A line for the person who reads this rank's log."""

    line: str


ToRank = Answer | Registered | Abort | Build | Touch | Instead | Release | Key | Say

_encoder = msgspec.msgpack.Encoder()
from_rank = msgspec.msgpack.Decoder(FromRank)
to_rank = msgspec.msgpack.Decoder(ToRank)


def body(message: Message) -> bytes:
    """A message as bytes.

    Raises:
        ValueError: if it is larger than a frame may be.
    """
    encoded = _encoder.encode(message)
    if len(encoded) > FRAME_BYTES_MAX:
        raise ValueError(f"{type(message).__name__} of {len(encoded)} bytes exceeds a frame's {FRAME_BYTES_MAX}")
    return encoded


def frame(message: Message) -> bytes:
    """A message with its length before it.

    Raises:
        ValueError: as `body`.
    """
    encoded = body(message)
    return HEADER.pack(len(encoded)) + encoded
