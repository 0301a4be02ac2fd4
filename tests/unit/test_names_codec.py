"""Names in order, and every message there and back over the wire."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.codec import unwrap, wrap
from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, Term
from lightkeeper.protos import lighthouse_pb2

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.integers(0, 2**32 - 1)
terms = st.builds(Term, number, text)
epochs = st.builds(Epoch, number, terms)
entries = st.builds(Entry, epochs, number)
members = st.builds(Member, text, text, text, st.lists(text, max_size=3).map(tuple))
memberships = st.builds(Membership, epochs, st.lists(members, max_size=3).map(tuple), st.none() | epochs)
FIELDS = {
    "str": text, "int": number, "bool": st.booleans(), "float": st.floats(0, 1e6),
    "Member": members, "Term": terms, "Epoch": epochs, "Entry": entries, "Membership": memberships,
    "UserError": st.builds(m.UserError, number, text, text, text),
    "Died": st.builds(m.Died, text, number, text, number),
    "Overdue": st.builds(m.Overdue, number, text, number, number),
    "Doing": st.builds(m.Doing, st.lists(number, max_size=3).map(tuple), text, number, number, number, number),
    "Share": st.builds(m.Share, text, st.lists(number, max_size=3).map(tuple)),
    "Donor": st.builds(m.Donor, text, text),
    "Mapping[str, str]": st.dictionaries(text, text, max_size=3),
}  # fmt: skip
ALL = (*typing.get_args(m.ToLighthouse), *typing.get_args(m.ToManager))


def strategy_for(kind: str) -> st.SearchStrategy[typing.Any]:
    if kind.endswith(" | None"):
        return st.none() | strategy_for(kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        return st.lists(strategy_for(kind[len("tuple[") : -len(", ...]")]), max_size=3).map(tuple)
    return FIELDS[kind]


def messages(kind: type) -> st.SearchStrategy[typing.Any]:
    return st.builds(kind, **{field.name: strategy_for(str(field.type)) for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(messages(kind))
    def there_and_back(message: typing.Any) -> None:
        sent = wrap(message)
        read = type(sent)()
        read.ParseFromString(sent.SerializeToString())
        assert unwrap(read) == message

    there_and_back()


def test_absent_is_not_empty() -> None:
    promise = m.Promise(Epoch(1, Term(1, "a")), None, (), None)
    assert unwrap(wrap(promise)) == promise
    other = dataclasses.replace(promise, known=Membership(Epoch(0, Term(0, "")), ()))
    assert unwrap(wrap(other)).known is not None


def test_an_empty_envelope_and_a_message_without_its_epoch_are_malformed() -> None:
    with pytest.raises(ValueError, match="empty message"):
        unwrap(lighthouse_pb2.FromManager())
    envelope = lighthouse_pb2.FromManager()
    envelope.promise.SetInParent()
    with pytest.raises(ValueError, match="Promise without epoch"):
        unwrap(envelope)
    envelope.promise.epoch.number = 3
    with pytest.raises(ValueError, match="Epoch without term"):
        unwrap(envelope)


@given(epochs, epochs)
def test_epochs_are_ordered_by_number_and_then_by_term(a: Epoch, b: Epoch) -> None:
    key = [(e.number, e.term.number, e.term.lighthouse) for e in (a, b)]
    assert (a < b) == (key[0] < key[1]) and (a == b) == (key[0] == key[1])


def test_names_read_well() -> None:
    epoch = Epoch(3, Term(2, "lh"))
    assert str(epoch) == "e3/2@lh" and str(Entry(epoch, 7)) == "step 7 of e3/2@lh"


def test_a_slot_belongs_to_an_incarnation() -> None:
    membership = Membership(Epoch(1, Term(1, "a")), (Member("g0", "i1", ""), Member("g1", "i1", "")))
    assert membership.slot_of("g1") == membership.slot_of("g1", "i1") == 1
    assert membership.slot_of("g1", "i2") is None and membership.slot_of("g2") is None
    assert membership.groups == ("g0", "g1")
