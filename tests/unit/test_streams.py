"""`StreamLoader`: over the committed steps each slot's stream is read item by item, whoever reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.data import StreamLoader, streams
from lightkeeper.data.positions import (
    PositionsBroken,
    StateTooLarge,
    advance,
    pack_state,
    unpack_state,
    words_for,
)
from lightkeeper.data.streams import NEAR_ITEMS, STATE_BYTES_MAX, StreamEnded
from lightkeeper.errors import UsageError
from lightkeeper.lighthouse.deal import deal, deal_rest
from lightkeeper.manager.within import Place


class Group:
    """Stands for a manager of one group: keeps what is contributed."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place(0, 1)
        self.page = type("Page", (), {"step": 0})()
        self.extras: dict[str, tuple[int, ...]] = {}
        self.registered: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.watchers: list[Any] = []
        self.steady_total: int | None = 2

    def total(self, step: int) -> int:
        return self.steady_total or 1 + step

    def extra(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        assert dtype == torch.int64
        self.extras[name] = shape

    def register(self, name: str, obj: torch.Tensor) -> None:
        self.registered[name] = obj

    def watch(self, watcher: Any) -> None:
        self.watchers.append(watcher)

    def contribute(self, name: str, value: torch.Tensor) -> None:
        assert tuple(value.shape) == self.extras[name]
        self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value


class Counting:
    """A stream with a state: slot k yields k * 1000, k * 1000 + 1, ..."""

    def __init__(self, slot: int, length: int = 1000) -> None:
        self.slot, self.length, self.n = slot, length, 0
        self.loaded: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.n < self.length:
            self.n += 1
            yield self.slot * 1000 + self.n - 1

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "note": "ä" * (self.n % 3), "pair": (self.n, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pair"] == (state["n"], None) and state["note"] == "ä" * (state["n"] % 3)
        self.n = state["n"]
        self.loaded.append(self.n)


def endless(slot: int) -> Iterator[int]:
    n = slot * 1000
    while True:
        yield n
        n += 1


def commit(groups: list[Group], step: int) -> None:
    """All groups commit the entry that holds what they contributed."""
    names = groups[0].extras
    reduced = {
        name: sum((group.sums[name] for group in groups if name in group.sums), torch.zeros(shape, dtype=torch.int64))
        for name, shape in names.items()
    }
    for group in groups:
        for watcher in group.watchers:
            watcher.committed(step, reduced)
        group.sums, group.page.step = {}, step + 1


def heal(joiner: Group, donor: Group) -> None:
    joiner.page.step = donor.page.step
    for name, tensor in donor.registered.items():
        joiner.registered[name].copy_(tensor)


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 60])
def test_a_state_travels_as_numbers(size: int) -> None:
    state = {"a": "x" * size, "b": [1, (2.5, None)], "c": -(2**70), "d": True}
    words = pack_state(state, 300)
    assert words.shape == (words_for(300),) and int(words.max()) < 2**48 and int(words.min()) >= 0
    assert unpack_state(words) == state
    with pytest.raises(StateTooLarge, match="and state_bytes is 20"):
        pack_state(state, 20)


def test_what_cannot_be_copied_exactly_is_refused() -> None:
    with pytest.raises(UsageError, match="state.generator is a torch.Tensor"):
        pack_state({"generator": torch.zeros(1)}, 100)


def test_positions_go_one_item_further_or_stay() -> None:
    positions = torch.tensor([[4, 4, 0]])
    assert advance(positions, torch.tensor([[5, 0, 1]])).tolist() == [[True, False, True]]
    assert positions.tolist() == [[5, 4, 1]]
    for wrong in ([7, 0, 0], [10, 0, 0], [0, 0, 1]):
        with pytest.raises(PositionsBroken, match="place 0.: a stream was read from elsewhere, or twice"):
            advance(positions, torch.tensor([wrong]))
        assert positions.tolist() == [[5, 4, 1]], "nothing was taken"


# ---------------------------------------------------------------- the loader


def test_an_heir_reads_on_where_the_last_committed_step_ended(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, endless, 2) for group in groups]
    for step in range(3):
        assert [loader.batch(step, k) for k, loader in enumerate(loaders)] == [step, 1000 + step]
        commit(groups, step)
    assert loaders[1].batch(3, 1) == 1003, "read, but its reader dies before the step is committed"
    assert loaders[0].batch(3, 0) == 3 and loaders[0].batch(3, 1) == 1003
    assert loaders[0].batch(3, 1) == 1003, "asked for twice in a step, read once"
    commit(groups[:1], 3)
    assert loaders[0].positions.tolist() == [4, 4]
    told = [line for line in capsys.readouterr().err.splitlines() if "took over the stream" in line]
    assert len(told) == 1, told
    assert told[0].startswith(
        "lightkeeper: step 3: took over the stream of slot 1: 3 items read again and thrown away, 0 states "
    )


def test_states_spare_the_reading(capsys: pytest.CaptureFixture[str]) -> None:
    groups, made = [Group(), Group()], []

    def make(slot: int) -> Counting:
        made.append(Counting(slot))
        return made[-1]

    loaders = [StreamLoader(group, make, 2, state_bytes=200) for group in groups]
    for step in range(3):
        assert [loader.batch(step, k) for k, loader in enumerate(loaders)] == [step, 1000 + step]
        commit(groups, step)
    joiner = Group()
    late = StreamLoader(joiner, make, 2, state_bytes=200)
    heal(joiner, groups[0])
    assert late.batch(3, 1) == 1003 and made[-1].loaded == [3]
    assert loaders[0].batch(3, 0) == 3
    commit([groups[0], joiner], 3)
    assert loaders[0].positions.tolist() == [4, 4]
    assert (
        "took over the stream of slot 1: 0 items read again and thrown away, 1 state loaded" in capsys.readouterr().err
    )


def test_who_skips_a_stream_that_has_a_state_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SAY_EVERY_S", 0.0)
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, Counting, 1) for group in groups]
    for step in range(4 * NEAR_ITEMS + 4):
        loaders[step // (NEAR_ITEMS + 1) % 2].batch(step, 0)
        commit(groups, step)
    said = capsys.readouterr().err
    assert said.count("took over") == 3 and said.count("state_bytes would spare that") == 2, "once in each group"


def test_what_is_taken_over_soon_after_is_summed_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, Counting, 1, state_bytes=100) for group in groups]
    for step in range(8):
        loaders[step % 2].batch(step, 0)
        commit(groups, step)
        if step == 5:
            monkeypatch.setattr(streams, "SAY_EVERY_S", 0.0)
    lines = capsys.readouterr().err.splitlines()
    told = [line.removeprefix("lightkeeper: ").rpartition(", ")[0] for line in lines]
    cost = "took over the stream of slot 0: {} read again and thrown away, {} loaded"
    assert told == [
        "step 1: " + cost.format("0 items", "1 state"),  # the first of each group at once
        "step 2: " + cost.format("1 item", "0 states"),
        "steps 4 to 6: " + cost.format("2 items", "0 states"),
        "steps 3 to 6: " + cost.format("2 items", "0 states"),
        "step 7: " + cost.format("1 item", "0 states"),
    ]


def test_each_place_in_a_microbatch_has_streams_of_its_own() -> None:
    ranks = [Group(Place(index, 2)) for index in range(2)]
    loaders = [StreamLoader(rank, lambda slot, r=i: Counting(10 * r + slot), 2, state_bytes=100)  # type: ignore[misc]
               for i, rank in enumerate(ranks)]  # fmt: skip
    for step in range(2):
        assert [loader.batch(step, 1) for loader in loaders] == [1000 + step, 11000 + step]
        commit(ranks, step)
    assert [loader.positions.tolist() for loader in loaders] == [[0, 2]] * 2
    heirs = [Group(Place(index, 2)) for index in range(2)]
    for index, heir in enumerate(heirs):
        late = StreamLoader(heir, lambda slot, r=index: Counting(10 * r + slot), 2, state_bytes=100)  # type: ignore[misc]
        heal(heir, ranks[0])
        assert late.batch(2, 1) == [1002, 11002][index]


def test_a_stream_that_ends_is_told() -> None:
    group = Group()
    loader = StreamLoader(group, lambda slot: [slot], 2)
    assert loader.batch(0, 1) == 1
    commit([group], 0)
    with pytest.raises(StreamEnded, match="stream of slot 1 has ended after 1 items, and step 1 needs one more"):
        loader.batch(1, 1)
    other = Group()
    short = StreamLoader(other, lambda slot: [], 2)
    heal(other, group)
    with pytest.raises(StreamEnded, match="ended after 0 items, and 1 were read from it before"):
        short.batch(1, 1)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"slots": 0}, "slots 0"),
        ({"state_bytes": -1}, "state_bytes -1"),
        ({"state_bytes": STATE_BYTES_MAX + 1}, "0 .states do not travel. to"),
    ],
)
def test_bad_arguments_are_told(over: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        StreamLoader(Group(), **{"make_stream": endless, "slots": 2, **over})


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(UsageError, match="microbatch 2 of step 0: there are 2 slots"):
        StreamLoader(Group(), endless, 2).batch(0, 2)
    with pytest.raises(UsageError, match="of step 1 is asked for in step 0"):
        StreamLoader(Group(), endless, 2).batch(1, 0)
    with pytest.raises(UsageError, match="slot 0's generator has no state_dict"):
        StreamLoader(Group(), endless, 2, state_bytes=100).batch(0, 0)
    with pytest.raises(
        UsageError, match=r"slot 0's stream has \d+ bytes, and state_bytes is 10: give StreamLoader more"
    ):
        StreamLoader(Group(), Counting, 2, state_bytes=10).batch(0, 0)


def test_slots_that_are_not_those_of_the_loop_are_told() -> None:
    """Too few show where the step is dealt, too many in no read at all: their streams would stand still for ever."""
    group = Group()
    for slots in (1, 3):
        with pytest.raises(UsageError, match=f"step 0 has 2 microbatches, and StreamLoader slots={slots}: give it as"):
            StreamLoader(group, endless, slots).begins(0)
    group.steady_total = None
    ramp = StreamLoader(group, endless, 2, name="ramp")
    ramp.begins(0)
    ramp.begins(1)
    with pytest.raises(UsageError, match="step 2 has 3 microbatches, and StreamLoader slots=2"):
        ramp.begins(2)


def test_two_loaders_have_names_of_their_own() -> None:
    group = Group()
    StreamLoader(group, endless, 2)
    StreamLoader(group, endless, 3, state_bytes=100, name="images")
    assert list(group.extras) == ["stream positions", "images positions", "images states"]
    assert list(group.registered) == ["stream-positions", "images-positions", "images-states"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_no_item_is_lost_or_read_twice_whatever_happens(data: st.DataObject, stateful: bool) -> None:
    """Groups die before, in and after their share, orphans are dealt as the lighthouse does, joiners come in."""
    slots, born = data.draw(st.integers(1, 5)), 0
    state_bytes = 100 if stateful else 0

    def start() -> tuple[str, Group, StreamLoader]:
        nonlocal born
        born += 1
        group = Group()
        return f"g{born}", group, StreamLoader(group, Counting, slots, state_bytes=state_bytes)

    members = {name: (group, loader) for name, group, loader in (start() for _ in range(data.draw(st.integers(1, 3))))}
    consumed: dict[int, list[int]] = {k: [] for k in range(slots)}
    for step in range(8):
        total = data.draw(st.integers(1, slots))  # a ramp
        held = dict(zip(members, deal(total, [1] * len(members)), strict=True))
        read: dict[str, dict[int, int]] = {name: {} for name in members}
        for name, (_, loader) in members.items():
            for k in held[name]:
                read[name][k] = loader.batch(step, k)
        while len(members) > 1 and data.draw(st.booleans()):
            del members[data.draw(st.sampled_from(sorted(members)))]
            held = deal_rest(total, {name: held[name] for name in members}, list(members))
            for name, (_, loader) in members.items():
                for k in held[name]:
                    if k not in read[name]:
                        read[name][k] = loader.batch(step, k)
        for name in members:
            for k, item in read[name].items():
                consumed[k].append(item)
        commit([group for group, _ in members.values()], step)
        if len(members) < 3 and data.draw(st.booleans()):
            name, group, loader = start()
            heal(group, next(iter(members.values()))[0])
            members[name] = (group, loader)
    for k, items in consumed.items():
        assert items == [k * 1000 + n for n in range(len(items))]
