"""How a member list travels: once on a stream, and after that by its epoch, or by what has changed.

The messages name whole memberships, and the machines know nothing else. A thousand groups that are each told of a
thousand members at every change would be a hundred megabytes; so each end of a stream remembers the lists that the
stream has carried in either direction, as both ends of a telephone line know what was said on it, and says only the
difference. A list that is said in full is packed, once for all streams.

A manager only ever names memberships that a lighthouse told it. So its `Hello` names them by their epochs alone; a
lighthouse that does not know one (its log is lost) answers `Unknown`, and gets the next in full.

Rejected: to send names without addresses and incarnations. A manager needs the addresses of donors and of the
rendezvous keys, and a lighthouse that lost its log must be able to learn from one manager who the members were.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from lightkeeper.lighthouse.fields import from_wire, to_wire
from lightkeeper.lighthouse.names import Epoch, Member, Membership
from lightkeeper.protos import lighthouse_pb2
from lightkeeper.wire import MESSAGE_BYTES_MAX

KEPT_MAX = 16


class UnknownEpoch(ValueError):
    """A membership was named by an epoch that is not known here."""

    def __init__(self, epoch: Epoch) -> None:
        super().__init__(f"the members of {epoch} are not known here")
        self.epoch = epoch


class Rosters:
    """The memberships that both ends of one stream know.

    Args:
        brief: whether the other end told us all that we name, so that it is named by its epoch from the start.
        elsewhere: finds a membership that this end knows from outside the stream, or None.
    """

    def __init__(
        self, brief: bool = False, elsewhere: Callable[[Epoch], Membership | None] = lambda epoch: None
    ) -> None:
        self._brief, self._elsewhere = brief, elsewhere
        self._kept: dict[Epoch, Membership] = {}

    def put_in(self, membership: Membership) -> Any:
        """The `Roster` that says this membership on this stream."""
        roster = lighthouse_pb2.Roster(epoch=to_wire(membership.epoch))
        if membership.base is not None:
            roster.base.CopyFrom(to_wire(membership.base))
        like = self._like(membership)
        change = None if like is None else _change(like, membership)
        if like is not None and change is not None:
            roster.like.CopyFrom(to_wire(like.epoch))
            roster.without.extend(change[0])
            roster.more.extend(to_wire(member) for member in change[1])
        else:
            roster.packed = _packed(membership)
        if like is None or like.epoch != membership.epoch:
            roster.speeds.extend(membership.speeds)
        self._keep(membership)
        return roster

    def take_out(self, roster: Any) -> Membership:
        """The membership that a `Roster` says.

        Raises:
            UnknownEpoch: if it is like one that is not known here.
            ValueError: if it is malformed or too large.
        """
        epoch, base = from_wire(roster.epoch), from_wire(roster.base) if roster.HasField("base") else None
        if roster.HasField("like"):
            like = from_wire(roster.like)
            known = self._kept.get(like) or self._elsewhere(like)
            if known is None:
                raise UnknownEpoch(like)
            if known.epoch == epoch and known.base == base and not roster.without and not roster.more:
                self._keep(known)
                return known
            without = set(roster.without)
            members = tuple(member for member in known.members if member.group not in without)
            members += tuple(from_wire(member) for member in roster.more)
        else:
            members = _unpacked(roster.packed)
        membership = Membership(epoch, members, base, tuple(roster.speeds))
        self._keep(membership)
        return membership

    def _like(self, membership: Membership) -> Membership | None:
        """What to say the difference to: itself if it was said before, else what was said last."""
        if self._brief or self._kept.get(membership.epoch) == membership:
            return membership
        return next(reversed(self._kept.values()), None)

    def _keep(self, membership: Membership) -> None:
        self._kept.pop(membership.epoch, None)
        self._kept[membership.epoch] = membership
        while len(self._kept) > KEPT_MAX:
            self._kept.pop(next(iter(self._kept)))


@lru_cache(maxsize=64)
def _change(known: Membership, new: Membership) -> tuple[tuple[str, ...], tuple[Member, ...]] | None:
    """Who is no longer there, and who was appended; None if that does not say it, or not shortly."""
    if known == new:
        return (), ()
    there = {member.group: member for member in new.members}
    if len(there) < len(new.members) or len(set(known.groups)) < len(known.members):
        return None  # a name that is there twice says nothing
    kept = tuple(member for member in known.members if there.get(member.group) == member)
    more = new.members[len(kept) :]
    if new.members[: len(kept)] != kept or len(more) > len(kept):
        return None
    staying = {member.group for member in kept}
    return tuple(member.group for member in known.members if member.group not in staying), more


@lru_cache(maxsize=16)
def _packed(membership: Membership) -> bytes:
    members = lighthouse_pb2.Members(members=[to_wire(member) for member in membership.members])
    return zlib.compress(members.SerializeToString())


@lru_cache(maxsize=2)  # to a lighthouse that lost its log all managers say the same
def _unpacked(packed: bytes) -> tuple[Member, ...]:
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(packed, MESSAGE_BYTES_MAX)
        if not inflate.eof:
            raise ValueError(f"a member list of more than {MESSAGE_BYTES_MAX} bytes, or cut short")
        return tuple(from_wire(member) for member in lighthouse_pb2.Members.FromString(data).members)
    except (zlib.error, DecodeError) as error:
        raise ValueError(f"a member list that cannot be read ({error})") from error
