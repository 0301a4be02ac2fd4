"""How member lists travel: whatever one end says, the other end reads; and it is said once."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.codec import unwrap, wrap
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term
from lightkeeper.lighthouse.rosters import KEPT_MAX, Rosters, UnknownEpoch
from lightkeeper.protos import lighthouse_pb2
from lightkeeper.wire import MESSAGE_BYTES_MAX

TERM = Term(1, "lh")


def epoch(number: int) -> Epoch:
    return Epoch(number, TERM)


def membership(number: int, *groups: str) -> Membership:
    """Members ``NAME`` or ``NAME/INCARNATION``."""
    parts = [group.partition("/") for group in groups]
    members = tuple(Member(name, more or "i1", f"{name}:1", (f"{name}:2",)) for name, _, more in parts)
    return Membership(epoch(number), members, epoch(number - 1))


def activate(of: Membership) -> m.Activate:
    return m.Activate(of, 5, 8, ())


def many(number: int, count: int = 1024) -> Membership:
    return membership(number, *(f"g{i}" for i in range(count)))


class Line:
    """Both ends of a stream."""

    def __init__(self, **known: Membership) -> None:
        lists = {one.epoch: one for one in known.values()}
        self.above, self.below = Rosters(elsewhere=lists.get), Rosters(brief=True)

    def down(self, message: m.ToManager) -> int:
        """From the lighthouse; returns its bytes."""
        return self._carry(message, self.above, self.below)

    def up(self, message: m.ToLighthouse) -> int:
        """From the manager; returns its bytes."""
        return self._carry(message, self.below, self.above)

    def _carry(self, message, sender: Rosters, receiver: Rosters) -> int:
        envelope = wrap(message, sender)
        data = envelope.SerializeToString()
        assert unwrap(type(envelope).FromString(data), receiver) == message
        return len(data)


names = st.lists(st.sampled_from(["g0", "g1", "g2", "g3", "g0/i2", "g1/i2"]), max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), names, st.integers(0, 3)), max_size=8))
def test_whatever_is_said_on_a_stream_is_read(said: list[tuple[bool, list[str], int]]) -> None:
    line = Line()
    known: Membership | None = None
    for number, (up, groups, speed) in enumerate(said, 1):
        if up and known is not None:
            line.up(m.Promise(epoch(number), known))
        else:
            known = replace(membership(number, *groups), speeds=tuple((i * speed) % 3 for i in range(len(groups))))
            line.down(m.Prepare(known.epoch, known.base, known))


def test_a_list_is_said_once_and_then_its_epoch_or_what_changed() -> None:
    line = Line()
    first = many(1)
    assert line.down(activate(first)) < 16 * 1024, "packed"
    assert line.down(activate(first)) < 100
    assert line.up(m.Promise(epoch(2), first)) < 100
    assert line.down(activate(membership(2, *first.groups[:500], *first.groups[501:]))) < 120
    assert line.down(activate(membership(3, *first.groups[:500], *first.groups[501:], "new"))) < 150


def test_another_order_is_said_in_full() -> None:
    line = Line()
    line.down(activate(membership(1, "g0", "g1", "g2")))
    line.down(activate(membership(2, "g2", "g1", "g0")))
    assert line.above.put_in(membership(3, "g0", "g1", "g2")).packed


def test_a_hello_names_what_a_lighthouse_told_by_its_epoch() -> None:
    known, planned = many(4), many(5, 1000)
    line = Line(known=known, planned=planned)
    assert line.up(m.Hello("job", "g0", "i1", "g0:1", 1024, 1, known=known, prepared=(planned,))) < 200


def test_what_is_not_known_is_asked_for_and_said_in_full() -> None:
    hello = m.Hello("job", "g0", "i1", "g0:1", 1024, 1, known=many(4))
    with pytest.raises(UnknownEpoch) as raised:
        unwrap(wrap(hello, Rosters(brief=True)), Rosters())
    assert raised.value.epoch == epoch(4)
    assert unwrap(wrap(hello, Rosters()), Rosters()) == hello


def test_both_ends_forget_alike() -> None:
    line = Line()
    for number in range(1, 3 * KEPT_MAX):
        line.down(activate(membership(number, "g0", f"g{number + 1}")))
        if number % 3 == 0:
            line.up(m.Promise(epoch(number + 1), membership(number, "g0", f"g{number + 1}")))
    assert len(line.above._kept) == len(line.below._kept) == KEPT_MAX


@pytest.mark.parametrize(
    "packed",
    [
        b"", b"nonsense", zlib.compress(b"\xff\xff\xff\xff"), zlib.compress(bytes(100))[:-3],
        zlib.compress(bytes(MESSAGE_BYTES_MAX + 1)), zlib.compress(bytes(1 << 30)),
    ],
    ids=["empty", "not packed", "no members", "cut short", "too large", "a bomb"],
)  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused(packed: bytes) -> None:
    envelope = lighthouse_pb2.FromManager()
    envelope.hello.known.epoch.number = 1
    envelope.hello.known.epoch.term.number = 1
    envelope.hello.known.packed = packed
    with pytest.raises(ValueError, match="member list"):
        unwrap(envelope)


def test_speeds_that_do_not_fit_the_members_are_refused() -> None:
    envelope = wrap(activate(replace(membership(1, "g0", "g1"), speeds=(3, 0))))
    del envelope.activate.membership.speeds[1]
    with pytest.raises(ValueError, match="2 members and 1 speeds"):
        unwrap(envelope)


def test_of_an_activation_each_is_told_its_own_share_and_donor() -> None:
    of = membership(1, "g0", "g1")
    shares = (m.Share("g0", (0, 1)), m.Share("g1", (2,)))
    whole = m.Activate(of, 3, 3, shares, (m.Donor("g1", "g0"),), None, "because")
    assert whole.for_one("g0") == m.Activate(of, 3, 3, shares[:1], (), None, "because")
    assert whole.for_one("g1") == m.Activate(of, 3, 3, shares[1:], (m.Donor("g1", "g0"),), None, "because")
