"""A line of the lighthouse's log: what it may hold, to JSON and back. What does not fit is refused with the reason."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from lightkeeper.lighthouse.actions import Activated, Ended, Promised, Record, Superseded
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term

NUMBER_MAX = 1 << 62  # far from the end of what the wire carries, so that the next may be one higher

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
EpochLine = tuple[Number, Number, Name]


class _Line(msgspec.Struct, tag_field="kind", frozen=True):
    """Any line; its kind is the name of its class, without "Line", in small letters."""


class MembershipLine(msgspec.Struct, frozen=True):
    """A membership: each member's group, incarnation, manager and ranks."""

    epoch: EpochLine
    base: EpochLine | None
    members: Annotated[tuple[tuple[Name, Name, str, tuple[str, ...]], ...], msgspec.Meta(min_length=1)]
    speeds: tuple[Number, ...] = ()  # as lines of earlier versions are read

    def __post_init__(self) -> None:
        if self.speeds and len(self.speeds) != len(self.members):
            raise ValueError(f"{len(self.members)} members with {len(self.speeds)} speeds")

    def read(self) -> Membership:
        """The membership itself."""
        members = tuple(Member(*line) for line in self.members)
        base = None if self.base is None else _epoch(self.base)
        return Membership(_epoch(self.epoch), members, base, self.speeds)


class TermLine(_Line, tag="term", frozen=True):
    """A start of this lighthouse, or a rise of its term."""

    number: Number
    lighthouse: Name


class PromisedLine(_Line, tag="promised", frozen=True):
    """An epoch number given out, and the planned change that it names."""

    job: Name
    number: Number
    planned: MembershipLine | None


class ActivatedLine(_Line, tag="activated", frozen=True):
    """A membership in force."""

    job: Name
    membership: MembershipLine


class EndedLine(_Line, tag="ended", frozen=True):
    """The end of a job, and whether it was a good one."""

    job: Name
    reason: str
    ok: bool = False  # as lines of earlier versions are read


class SupersededLine(_Line, tag="superseded", frozen=True):
    """Another lighthouse has been obeyed."""

    job: Name


JobLine = PromisedLine | ActivatedLine | EndedLine | SupersededLine
_decoder = msgspec.json.Decoder(TermLine | JobLine)
_KINDS = ("term", "promised", "activated", "ended", "superseded")


class _Kind(msgspec.Struct):
    kind: str


def decode(line: bytes) -> TermLine | JobLine:
    """One line of the log.

    Raises:
        ValueError: it is none; the message says why, in one line.
    """
    try:
        kind = msgspec.json.decode(line, type=_Kind).kind
        if kind not in _KINDS:
            raise ValueError(f"a record of kind {kind[:100]!r}, which this version does not know")
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def record_in(line: JobLine) -> Record:
    """What a line says of its job."""
    if isinstance(line, PromisedLine):
        return Promised(line.number, None if line.planned is None else line.planned.read())
    if isinstance(line, ActivatedLine):
        return Activated(line.membership.read())
    return Ended(line.reason, line.ok) if isinstance(line, EndedLine) else Superseded()


def encode_term(term: Term) -> bytes:
    """The line of a term."""
    return _encode({"kind": "term", "number": term.number, "lighthouse": term.lighthouse})


def encode(job: str, record: Record) -> bytes:
    """The line of a job's record."""
    if isinstance(record, Promised):
        planned = None if record.planned is None else _membership_out(record.planned)
        return _encode({"job": job, "kind": "promised", "number": record.number, "planned": planned})
    if isinstance(record, Activated):
        return _encode({"job": job, "kind": "activated", "membership": _membership_out(record.membership)})
    if isinstance(record, Superseded):
        return _encode({"job": job, "kind": "superseded"})
    return _encode({"job": job, "kind": "ended", "reason": record.reason, "ok": record.ok})


def _encode(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw).encode() + b"\n"


def _epoch(line: EpochLine) -> Epoch:
    return Epoch(line[0], Term(line[1], line[2]))


def _epoch_out(epoch: Epoch) -> list[Any]:
    return [epoch.number, epoch.term.number, epoch.term.lighthouse]


def _membership_out(membership: Membership) -> dict[str, Any]:
    speeds = {"speeds": list(membership.speeds)} if membership.speeds else {}
    return {
        **speeds,
        "epoch": _epoch_out(membership.epoch),
        "base": None if membership.base is None else _epoch_out(membership.base),
        "members": [[m.group, m.incarnation, m.manager, list(m.ranks)] for m in membership.members],
    }
