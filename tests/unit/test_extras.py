"""The extras vector: exact sums, clear refusals, and what it proves about an entry."""

from __future__ import annotations

import pytest
import torch

from lightkeeper.manager.extras import (
    ELEMENTS_MAX,
    NAMES_MAX,
    READY_MAX,
    Contributions,
    ExtrasLayout,
    Part,
    check,
    microbatch_hash,
    pack,
    unpack,
)


def layout(*declared, parameters: int = 3, kind="sum") -> ExtrasLayout:
    made = ExtrasLayout()
    for name, shape, dtype in declared:
        made.declare(name, shape, dtype, kind)
    made.freeze(parameters)
    return made


def reduced(made: ExtrasLayout, *parts: Part, sums=()):
    total = torch.zeros(made.numel, dtype=torch.float64)
    for i, part in enumerate(parts):
        vector = torch.empty_like(total)
        pack(made, part, sums[i] if sums else {}, vector)
        total += vector
    return unpack(made, total)


def part(step=5, microbatches=(0, 1), presence=(True, False, False), ready=0, again=False) -> Part:
    return Part(step, microbatches, presence, ready, again)


@pytest.mark.parametrize(("settings", "alike"), [((7, 7, 7), True), ((7, 7, 8), False), ((0, 2, 1), False)])
def test_members_see_whether_their_optimizers_are_set_alike(settings: tuple[int, ...], alike: bool):
    made = layout()
    total = reduced(made, *(Part(3, [], [], settings=one) for one in settings))
    assert total.alike == alike


def test_a_right_entry_passes():
    total = reduced(layout(), part(), part(microbatches=[2, 3], presence=[False, False, True]))
    assert check(total, 5, 4, 2) is None
    assert total.presence == (True, False, True)
    assert (total.ready, total.again, total.members) == (0, 0, 2)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part()], "1 members took part in a reduce of 2"),
        ([part(), part(step=6, microbatches=[2, 3])], "different steps"),
        ([part(step=4), part(step=6, microbatches=[2, 3])], "different steps"),
        ([part(), part(microbatches=[2])], "3 microbatches were summed instead of 4"),
        ([part(), part(microbatches=[1, 2])], "not each of them exactly once"),
        ([part(), part(microbatches=[2, 4])], "not each of them exactly once"),
    ],
)
def test_a_wrong_entry_is_named(parts, says):
    assert says in (check(reduced(layout(), *parts), 5, 4, 2) or "")


def test_large_step_numbers_sum_exactly():
    step = 123_456_789
    parts = [part(step=step, microbatches=range(i, 1000, 50)) for i in range(50)]
    assert check(reduced(layout(), *parts), step, 1000, 50) is None


@pytest.mark.parametrize(("flags", "ready"), [([7, 7, 7], 7), ([7, 7, 0], 0), ([6, 7, 8], 0), ([0, 0, 0], 0)])
def test_ready_needs_the_same_epoch_from_all(flags, ready):
    assert reduced(layout(), *(part(ready=flag) for flag in flags)).ready == ready


def test_ready_flag_is_bounded():
    with pytest.raises(ValueError, match="ready flag"):
        pack(layout(), part(ready=READY_MAX), {}, torch.zeros(11, dtype=torch.float64))


def test_user_extras_keep_shape_and_dtype():
    made = ExtrasLayout()
    made.declare("loss")
    made.declare("load", (2, 3), torch.float32)
    made.declare("tokens", (), torch.int64)
    first, second = Contributions(made), Contributions(made)
    for contributions in (first, second):
        contributions.add("load", torch.ones(2, 3))
        contributions.add("load", torch.ones(2, 3))
        contributions.add("tokens", 2**51 + 1)
    first.add("loss", torch.tensor(0.5, requires_grad=True))
    made.freeze(1)
    one = Part(0, [0], [True])
    user = reduced(made, one, one, sums=[first.sums, second.sums]).user
    assert user["loss"].item() == 0.5 and user["loss"].dtype == torch.float64
    assert torch.equal(user["load"], torch.full((2, 3), 4.0)) and user["load"].dtype == torch.float32
    assert user["tokens"].item() == 2**52 + 2 and user["tokens"].dtype == torch.int64
    assert made.describe() == {"loss": "float64[]", "load": "float32[2, 3]", "tokens": "int64[]"}


def test_what_is_contributed_stays_on_its_device_until_the_step_is_reduced():
    """A meta tensor has a device that nothing can be fetched from: whoever waits for it fails."""
    made = layout(("loss", (), torch.float64), ("load", (2,), torch.float32), parameters=0)
    contributions = Contributions(made)
    for _ in range(3):
        contributions.add("loss", torch.zeros((), device="meta"))
        contributions.add("load", torch.zeros(2, device="meta"))
    with pytest.raises(NotImplementedError):
        contributions.sums  # noqa: B018
    contributions.clear()
    value = torch.ones(2)
    contributions.add("load", value)
    value.zero_()  # the loop may go on with its tensor
    assert {name: one.tolist() for name, one in contributions.sums.items()} == {"load": [1.0, 1.0]}


def test_a_follower_that_contributes_nothing_reads_the_sum():
    made = ExtrasLayout()
    made.declare("loss", (2,))
    contributions = Contributions(made)
    contributions.add("loss", torch.tensor([1.0, 2.0]))
    made.freeze(0)
    total = reduced(made, Part(0, [0], []), Part(0, [], []), sums=[contributions.sums, {}])
    assert total.user["loss"].tolist() == [1.0, 2.0]


def test_integers_that_would_not_sum_exactly_are_refused_by_name():
    made = layout(("tokens", (), torch.int64), parameters=0)
    contributions = Contributions(made)
    contributions.add("tokens", 2**53)
    with pytest.raises(OverflowError, match="'tokens'"):
        pack(made, Part(0, [], []), contributions.sums, torch.zeros(made.numel, dtype=torch.float64))


def test_wrong_use_is_refused_by_name():
    made = ExtrasLayout()
    made.declare("a", (2,))
    with pytest.raises(ValueError, match="'a' is declared twice"):
        made.declare("a")
    with pytest.raises(ValueError, match="'b' has dtype"):
        made.declare("b", (), torch.float16)
    with pytest.raises(ValueError, match="'c' of 1048577 elements"):
        made.declare("c", (ELEMENTS_MAX + 1,))
    made.declare("n", (), torch.int64)
    contributions = Contributions(made)
    with pytest.raises(KeyError, match=r"'x' was not declared .*declared: a, n"):
        contributions.add("x", 1)
    with pytest.raises(ValueError, match=r"'a' was declared \(2,\), given \(\)"):
        contributions.add("a", 1.0)
    with pytest.raises(ValueError, match="'n' was declared int64"):
        contributions.add("n", 0.5)
    made.freeze(1)
    with pytest.raises(RuntimeError, match="'d' is declared after the first step"):
        made.declare("d")


def test_an_agreed_value_is_the_lowest_slots_whatever_the_others_gave():
    made = layout(("stop", (), torch.int64), ("lr", (2,), torch.float32), parameters=0, kind="agreed")
    members = [Contributions(made) for _ in range(3)]
    for slot, contributions in enumerate(members):
        contributions.agree("stop", 7)
        contributions.agree("stop", 10 + slot)  # the last word counts
        contributions.agree("lr", torch.tensor([0.1 + slot, 2.0]))
    one = Part(0, [], [])
    sums = [contributions.of_slot(slot, contributions.agreed) for slot, contributions in enumerate(members)]
    user = reduced(made, one, one, one, sums=sums).user
    assert user["stop"].item() == 10 and torch.equal(user["lr"], torch.tensor([0.1, 2.0]))
    assert made.describe() == {"stop": "int64[] agreed", "lr": "float32[2] agreed"}


def test_an_agreed_value_that_the_lowest_slot_did_not_give_is_missing_and_says_so():
    made = layout(("stop", (), torch.int64), parameters=0, kind="agreed")
    other = Contributions(made)
    other.agree("stop", 1)
    user = reduced(made, Part(0, [], []), Part(0, [], []), sums=[{}, other.of_slot(1, other.agreed)]).user
    assert "stop" not in user
    with pytest.raises(KeyError, match=r"no extra 'stop'.*did not call step.agree"):
        user["stop"]


def test_extras_of_one_kind_are_not_given_as_another():
    made = layout(("a", (), torch.int64), parameters=0, kind="agreed")
    with pytest.raises(ValueError, match="'a' is not contributed: .* kind 'agreed'"):
        Contributions(made).add("a", 1)
    made = layout(("b", (), torch.int64), parameters=0, kind="before")
    with pytest.raises(ValueError, match="'b' is not agreed on: .* kind 'before'"):
        Contributions(made).agree("b", 1)


def test_number_of_extras_is_bounded():
    made = ExtrasLayout()
    for i in range(NAMES_MAX):
        made.declare(str(i))
    with pytest.raises(ValueError, match="one too many"):
        made.declare("more")


def test_microbatch_hash_is_fixed():
    assert microbatch_hash(0, 0) != microbatch_hash(0, 1) != microbatch_hash(1, 0)
    assert all(0 <= microbatch_hash(s, k) < 1 << 32 for s in range(10) for k in range(10))
