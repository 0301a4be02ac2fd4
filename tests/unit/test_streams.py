"""`StreamLoader`: over the committed steps each slot's stream is read item by item, whoever reads it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.data import StreamLoader, streams
from lightkeeper.data.positions import PositionsBroken, Turns, advance
from lightkeeper.data.states import STATE_BYTES_MAX
from lightkeeper.data.streams import NEAR_ITEMS, StreamEnded, every_for
from lightkeeper.errors import UsageError
from lightkeeper.lighthouse.deal import deal, deal_rest
from lightkeeper.manager.state import codec
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


def test_positions_go_one_item_further_or_stay() -> None:
    positions = torch.tensor([[4, 4, 0]])
    assert advance(positions, torch.tensor([[5, 0, 1]])).tolist() == [[True, False, True]]
    assert positions.tolist() == [[5, 4, 1]]
    for wrong in ([7, 0, 0], [10, 0, 0], [0, 0, 1]):
        with pytest.raises(PositionsBroken, match="place 0.: a stream was read from elsewhere, or twice"):
            advance(positions, torch.tensor([wrong]))
        assert positions.tolist() == [[5, 4, 1]], "nothing was taken"


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 9), st.integers(0, 1000))
def test_states_take_turns_and_never_share_a_place(places: int, slots: int, every: int, first: int) -> None:
    turns = Turns(places, slots, every)
    streams = [(place, slot) for place in range(places) for slot in range(slots)]
    due: list[tuple[int, int]] = []
    for step in range(first, first + every):
        taken = {one: column for one in streams if (column := turns.column(step, *one)) is not None}
        assert len(set(taken.values())) == len(taken) and all(column < turns.columns for column in taken.values())
        due += taken
    assert sorted(due) == streams, "each once in so many steps"


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


class Sized(Counting):
    """A state that no compression helps, of so many bytes after each number of items; tells what was read."""

    def __init__(self, slot: int, sizes: dict[int, int], reads: list[tuple[int, int]]) -> None:
        super().__init__(slot)
        self.sizes, self.reads = sizes, reads

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            self.reads.append((self.slot, self.n))
            yield item

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "rest": random.Random(self.n).randbytes(self.sizes.get(self.n, 10))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        self.loaded.append(self.n)


def test_a_state_that_is_too_large_stays_behind_and_the_heir_reads_on_from_the_one_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reads: list[tuple[int, int]] = []
    sizes = {7: 900, 8: 900, 9: 900}
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, lambda slot: Sized(slot, sizes, reads), 2, state_bytes=400) for group in groups]
    for step in range(9):
        assert [loader.batch(step, k) for k, loader in enumerate(loaders)] == [step, 1000 + step]
        commit(groups, step)
    for name in ("stream-states", "stream-states-at", "stream-positions"):
        assert torch.equal(groups[0].registered[name], groups[1].registered[name])
    assert groups[0].registered["stream-states-at"].tolist() == [6, 6]
    reads.clear()
    joiner = Group()
    late = StreamLoader(joiner, lambda slot: Sized(slot, sizes, reads), 2, state_bytes=400)
    heal(joiner, groups[0])
    assert late.batch(9, 1) == 1009 and late._readers[1].stream.loaded == [6]
    assert reads == [(1, 7), (1, 8), (1, 9), (1, 10)], "3 items again"
    assert loaders[0].batch(9, 0) == 9
    commit([groups[0], joiner], 9)
    assert joiner.registered["stream-states-at"].tolist() == [10, 10], "the next one fits again"
    said = capsys.readouterr().err
    told = [line for line in said.splitlines() if "does not travel" in line]
    assert len(told) == 2 and "took over the stream of slot 1: 3 items read again and thrown away, 1 state" in said
    size = re.search(
        r"the state of slot ([01])'s stream does not travel: it has (\d+) bytes packed, and state_bytes is 400; "
        r"a group that takes .* or give StreamLoader state_bytes=\2$",
        told[0],
    )
    assert size is not None and 900 < int(size[2]) * 4 / 3 < 1600, told


def test_a_state_that_cannot_travel_is_told_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Tensors(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"n": torch.tensor(self.n)}

    groups = [Group(), Group()]
    loaders = [StreamLoader(group, Tensors, 1, state_bytes=400) for group in groups]
    for step in range(3):
        assert loaders[0].batch(step, 0) == step
        commit(groups, step)
    assert loaders[1].batch(3, 0) == 3
    told = [line for line in capsys.readouterr().err.splitlines() if "does not travel" in line]
    assert len(told) == 2, "each group for itself"
    assert "slot 0's stream does not travel: state.n is a torch.Tensor: no tensor" in told[0]


def test_with_turns_an_heir_reads_again_at_most_what_was_read_since(capsys: pytest.CaptureFixture[str]) -> None:
    """Positions travel in every step, states in every fourth; the entry has room for a fourth of them."""
    every, reads = 4, []
    groups = [Group() for _ in range(2)]
    loaders = [
        StreamLoader(group, lambda slot: Sized(slot, {}, reads), 6, state_bytes=400, state_every=every)
        for group in groups
    ]
    assert groups[0].extras["stream states"][0] == 2
    for step in range(11):
        for k in range(6):
            assert loaders[k % 2].batch(step, k) == k * 1000 + step
        commit(groups, step)
    at = groups[0].registered["stream-states-at"].tolist()
    assert sorted(at) == [8, 8, 9, 9, 10, 11]
    reads.clear()
    joiner = Group()
    late = StreamLoader(joiner, lambda slot: Sized(slot, {}, reads), 6, state_bytes=400, state_every=every)
    heal(joiner, groups[0])
    for k in range(6):
        assert late.batch(11, k) == k * 1000 + 11
    assert [sum(1 for slot, _ in reads if slot == k) - 1 for k in range(6)] == [11 - one for one in at]
    assert every_for(Turns(8, 64, 1), 1 << 14, 1 << 17) == 11 and every_for(Turns(1, 4, 1), 100) == 1


def test_who_asks_first_learns_that_a_stream_has_ended() -> None:
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, lambda slot: Counting(slot, 1 + slot), 2) for group in groups]
    assert loaders[0].has(0, 0) and loaders[0].has(0, 1) and loaders[0].batch(0, 1) == 1000
    commit(groups, 0)
    assert not loaders[1].has(1, 0) and loaders[1].has(1, 1) and not loaders[1].has(1, 0)
    assert loaders[1].batch(1, 1) == 1001
    with pytest.raises(StreamEnded, match="stream of slot 0 has ended after 1 items, and step 1 needs"):
        loaders[1].batch(1, 0)


def test_a_run_goes_on_from_its_state_on_disk() -> None:
    reads: list[tuple[int, int]] = []
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, lambda slot: Sized(slot, {}, reads), 3, state_bytes=300, state_every=2)
               for group in groups]  # fmt: skip
    for step in range(5):
        for k in range(3):
            loaders[k % 2].batch(step, k)
        commit(groups, step)
    saved = json.loads(json.dumps(codec.encode(loaders[0].state_dict(), "saved")))
    alone = Group()
    alone.page.step = 5
    after = StreamLoader(alone, lambda slot: Sized(slot, {}, reads), 3, state_bytes=300, state_every=7)
    after.load_state_dict(codec.decode(saved))
    reads.clear()
    assert [after.batch(5, k) for k in range(3)] == [5, 1005, 2005] and len(reads) <= 3 + 3
    commit([alone], 5)
    assert after.positions.tolist() == [6, 6, 6]
    without = Group()
    without.page.step = 5
    bare = StreamLoader(without, lambda slot: Sized(slot, {}, reads), 3)
    bare.load_state_dict(loaders[0].state_dict())
    assert bare.batch(5, 2) == 2005, "read from its beginning"
    for slots, place, says in ((4, Place(0, 1), "of 3 slots .* here there are 4"), (3, Place(0, 2), "of 1 places")):
        with pytest.raises(UsageError, match=says):
            StreamLoader(Group(place), Counting, slots).load_state_dict(loaders[0].state_dict())


def test_what_was_read_before_a_heal_is_read_and_said_anew() -> None:
    """A member that is left out heals, and may be named in the very step that it had begun."""
    groups = [Group(), Group()]
    loaders = [StreamLoader(group, endless, 2) for group in groups]
    assert loaders[1].batch(0, 1) == 1000
    groups[1].sums = {}  # the manager begins the step anew
    heal(groups[1], groups[0])
    loaders[1].healed()
    assert [loader.batch(0, k) for k, loader in enumerate(loaders)] == [0, 1000]
    commit(groups, 0)
    assert loaders[0].positions.tolist() == [1, 1]


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
        heal(heir, ranks[index])
        assert late.batch(2, 1) == [1002, 11002][index] and late._readers[1].stream.loaded == [2]


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
        ({"state_every": 0}, "state_every 0: steps between"),
        (
            {"slots": 30, "state_bytes": 300_000},
            "for 30 streams makes 1500030 elements.*give StreamLoader less, or .*=3$",
        ),
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
    assert list(group.registered) == ["stream-positions", "images-positions", "images-states", "images-states-at"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_no_item_is_lost_or_read_twice_whatever_happens(data: st.DataObject, stateful: bool) -> None:
    """Groups die before, in and after their share, orphans are dealt as the lighthouse does, joiners come in.

    Some states are too large to travel.
    """
    slots, born = data.draw(st.integers(1, 5)), 0
    state_bytes, state_every = 100 if stateful else 0, data.draw(st.integers(1, 4))
    sizes = dict.fromkeys(data.draw(st.sets(st.integers(1, 8))), 200)
    reads: list[tuple[int, int]] = []

    def start() -> tuple[str, Group, StreamLoader]:
        nonlocal born
        born += 1
        group = Group()
        loader = StreamLoader(
            group, lambda slot: Sized(slot, sizes, reads), slots, state_bytes=state_bytes, state_every=state_every
        )
        return f"g{born}", group, loader

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
        for name in ("stream-states", "stream-states-at") if stateful else ():
            held = [group.registered[name] for group, _ in members.values()]
            assert all(torch.equal(one, held[0]) for one in held)
        if len(members) < 3 and data.draw(st.booleans()):
            name, group, loader = start()
            heal(group, next(iter(members.values()))[0])
            members[name] = (group, loader)
    for k, items in consumed.items():
        assert items == [k * 1000 + n for n in range(len(items))]
