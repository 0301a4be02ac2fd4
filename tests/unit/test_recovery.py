"""What promises conclude, as pure functions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.messages import Promise
from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, Term, origin
from lightkeeper.lighthouse.recovery import Contradiction, conclude, most_blamed, newest_known, of_one_history, unheard

TERM = Term(1, "lh")


def epoch(number: int) -> Epoch:
    return Epoch(number, TERM)


def membership(number: int, *groups: str, base: int | None = None) -> Membership:
    return Membership(epoch(number), tuple(Member(g, "i1", "") for g in groups), None if base is None else epoch(base))


def promise(
    step: int = -1,
    held: tuple[int, ...] = (),
    total: int = 12,
    entry: int = 1,
    known: Membership | None = None,
    prepared: tuple[Membership, ...] = (),
) -> Promise:
    return Promise(epoch(9), known, prepared, None if step < 0 else Entry(epoch(entry), step), held, total)


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=6), st.integers(0, 20))
def test_all_that_lag_by_at_most_one_go_on_together_at_one_step_with_all_its_microbatches(
    steps: list[int], total: int
) -> None:
    names = [f"g{i}" for i in range(len(steps))]
    concluded = conclude(names, {n: promise(s, total=total) for n, s in zip(names, steps, strict=True)})
    high = max(steps)
    assert concluded.first_step == high + 1 and concluded.total == total
    assert concluded.members == tuple(n for n, s in zip(names, steps, strict=True) if s >= high - 1)
    assert concluded.behind == tuple(n for n, s in zip(names, steps, strict=True) if s < high - 1)
    assert sorted(k for share in concluded.shares for k in share.microbatches) == list(range(total))
    late = [n for n in concluded.members if steps[names.index(n)] == high - 1]
    assert [donor.group for donor in concluded.donors] == late
    assert all(steps[names.index(donor.donor)] == high for donor in concluded.donors)


def donors_by_hand(steps: list[int]) -> list[tuple[str, str]]:
    """Each that lags by one, in slot order, asks the one with the entry who was asked least, the lowest slot first."""
    asked = {slot: 0 for slot, step in enumerate(steps) if step == max(steps)}
    pairs = []
    for slot, step in enumerate(steps):
        if step == max(steps) - 1:
            donor = next(s for s in sorted(asked) if asked[s] == min(asked.values()))
            asked[donor] += 1
            pairs.append((f"g{slot}", f"g{donor}"))
    return pairs


@given(st.lists(st.integers(2, 4), min_size=1, max_size=9))
def test_donors_are_those_that_choosing_by_hand_gives(steps: list[int]) -> None:
    names = [f"g{i}" for i in range(len(steps))]
    concluded = conclude(names, {n: promise(s) for n, s in zip(names, steps, strict=True)})
    assert [(donor.group, donor.donor) for donor in concluded.donors] == donors_by_hand(steps)


GROUPS = ("g0", "g1", "g2")
subsets = st.lists(st.sampled_from(GROUPS), unique=True, min_size=1).map(lambda names: tuple(sorted(names)))


@st.composite
def recoveries(draw: st.DrawFn) -> tuple[Membership | None, dict[str, Promise]]:
    """A log, and promises of some groups: each knows an epoch, and planned changes on it."""
    chain = [membership(number, *draw(subsets)) for number in (1, 2)]
    on = {
        m.epoch: [membership(10 * m.epoch.number + i, *draw(subsets), base=m.epoch.number) for i in (0, 1)]
        for m in chain
    }
    logged = draw(st.sampled_from([None, *chain]))
    promises = {}
    for name in draw(st.lists(st.sampled_from(GROUPS), unique=True)):
        known = draw(st.sampled_from(chain))
        prepared = tuple(draw(st.lists(st.sampled_from(on[known.epoch]), unique_by=lambda m: m.epoch, max_size=2)))
        promises[name] = promise(known=known, prepared=prepared)
    return logged, promises


def all_heard_by_hand(logged: Membership | None, promises: dict[str, Promise]) -> bool:
    """Whether each epoch that may be in force has a member that has promised: listed one by one."""
    named = {m for m in (logged, *(p.known for p in promises.values())) if m is not None}
    if not named:
        return True
    newest = next(m for m in named if all(m.epoch.number >= other.epoch.number for other in named))
    may_be_in_force = [newest]
    for one in promises.values():
        for planned in one.prepared:
            if planned.base == newest.epoch:
                may_be_in_force.append(planned)
    return all(set(m.groups) & set(promises) for m in may_be_in_force)


@given(recoveries())
def test_a_recovery_is_concluded_when_somebody_of_each_epoch_that_may_be_in_force_has_promised(
    case: tuple[Membership | None, dict[str, Promise]],
) -> None:
    logged, promises = case
    assert (unheard(newest_known(logged, promises), promises) is None) == all_heard_by_hand(logged, promises)


def test_what_the_late_held_was_for_another_step() -> None:
    concluded = conclude(["g0", "g1"], {"g0": promise(4, (0, 1), 4), "g1": promise(3, (0, 1, 2, 3), 99)})
    assert [share.microbatches for share in concluded.shares] == [(0, 1), (2, 3)] and concluded.total == 4


def test_the_first_step_may_be_one_ahead_of_those_who_have_none() -> None:
    concluded = conclude(["g0", "g1"], {"g0": promise(0), "g1": promise(-1)})
    assert concluded.first_step == 1 and concluded.donors[0].donor == "g0" and concluded.entry == Entry(epoch(1), 0)


@pytest.mark.parametrize(
    ("promises", "line"),
    [
        (
            {"g0": promise(4, entry=1), "g1": promise(4, entry=2)},
            "two entries for one step: step 4 of e1/1@lh; step 4 of e2",
        ),
        ({"g0": promise(4, total=3), "g1": promise(4, total=4)}, r"disagree on the microbatches of step 5: \[3, 4\]"),
        ({"g0": promise(4, (1,)), "g1": promise(4, (1,))}, "g0 and g1 both hold microbatch 1"),
        ({"g0": promise(4, (12,)), "g1": promise(4)}, "g0 holds microbatch 12 of a step that has 12"),
    ],
)
def test_contradictions_are_told(promises: dict[str, Promise], line: str) -> None:
    with pytest.raises(Contradiction, match=line):
        conclude(["g0", "g1"], promises)


def test_who_begins_a_job_holds_the_newest_entry_that_anybody_has() -> None:
    """Two joiners outlive the members that they followed; one of them has an entry that the other never got."""
    assert begins(g0=promise(), g1=promise()) == ["g0", "g1"]
    assert begins(g0=promise(7, entry=3), g1=promise(7, entry=1), g2=promise(), g3=promise(7, entry=3)) == ["g0", "g3"]
    assert begins(g0=promise(6, entry=3), g1=promise(7, entry=3)) == ["g1"]
    assert begins(g0=promise(9, entry=1), g1=promise(7, entry=3)) == ["g1"], "epoch 3 went on without step 9 of epoch 1"


def begins(same: str = "", **promises: Promise) -> list[str]:
    """Who of these groups begins; of those in `same` the states are alike, each other one has its own."""
    fingerprints = {group: "" if not same or group in same.split() else group for group in promises}
    return of_one_history(list(promises), promises, fingerprints)


def resumed(step: int, healed: bool = False) -> Promise:
    """Of a group that committed nothing here, and whose state has so many steps behind it."""
    return Promise(epoch(9), last=origin(step) if step else None, total=12, healed=healed)


def test_of_checkpoints_the_furthest_begins_the_job() -> None:
    assert begins(g0=resumed(5), g1=resumed(7), g2=resumed(0), g3=resumed(7)) == ["g1", "g3"]
    assert begins("g2 g3", g1=resumed(7), g2=resumed(7), g3=resumed(7)) == ["g1"], "the lowest slot's, of two states"
    concluded = conclude(["g1", "g3"], {"g1": resumed(7), "g3": resumed(7)})
    assert (concluded.first_step, concluded.entry) == (7, origin(7)) and not concluded.donors and not concluded.behind


def test_a_checkpoint_and_an_entry_are_told_apart_by_their_step() -> None:
    """A joiner outlived the members at step 7 of epoch 3; the others were started again from a checkpoint."""
    assert begins(g0=resumed(7), g1=promise(7, entry=3)) == ["g1"]
    assert begins(g0=resumed(8), g1=promise(7, entry=3)) == ["g1"], "the state after step 7, and its entry is held"
    assert begins(g0=resumed(9), g1=promise(7, entry=3)) == ["g0"], "step 8 is final: a checkpoint holds it"


def test_a_state_that_came_from_others_is_not_the_one_that_the_group_joined_with() -> None:
    """It healed before anything was committed, so no entry names what it holds."""
    assert begins(g0=resumed(7), g1=resumed(7, healed=True), g2=resumed(7)) == ["g0", "g2"]
    assert begins(g0=resumed(7, healed=True), g1=resumed(7), g2=resumed(7, healed=True)) == ["g0"]
    assert begins(g0=resumed(0, healed=True), g1=resumed(0)) == ["g0"]


def test_the_newest_is_the_highest_that_anybody_names() -> None:
    old, new = membership(1, "g0"), membership(2, "g0")
    assert newest_known(None, {}) is None
    assert newest_known(old, {"g0": promise()}) == old
    assert newest_known(old, {"g0": promise(known=new), "g1": promise(known=old)}) == new
    assert newest_known(new, {"g0": promise(known=old)}) == new


def test_an_epoch_of_which_nobody_promised_may_be_in_force_elsewhere() -> None:
    newest, rest = membership(1, "g0", "g1", "g2"), membership(2, "g0", "g1", base=1)
    assert unheard(None, {}) is None
    assert unheard(newest, {}) == newest
    assert unheard(newest, {"g2": promise(prepared=(rest,))}) == rest
    assert unheard(newest, {"g2": promise(prepared=(rest,)), "g0": promise(known=newest)}) is None
    joins = {"g0": promise(prepared=(rest,))}
    assert unheard(rest, joins) == rest, "a joiner that has not switched does not know what its epoch committed"
    assert unheard(newest, {"g0": promise()}) is None, "of a first epoch nobody has more to tell"
    other = membership(3, "g9", base=7)
    assert unheard(newest, {"g2": promise(prepared=(other,))}) is None, "prepared on another base"


def test_blame_needs_somebody_who_stands_out() -> None:
    assert most_blamed(Counter(), Counter(), ["g0"], 3) is None
    assert most_blamed(Counter(g0=2, g1=1), Counter(), ["g0", "g1"], 3) == "g0"
    assert most_blamed(Counter(g0=2, g1=2), Counter(), ["g0", "g1"], 3) is None
    assert most_blamed(Counter(g0=9, g1=1), Counter(), ["g1", "g2"], 3) == "g1", (
        "who is gone already is not asked about"
    )


def test_who_alone_fails_by_itself_every_time_stands_out() -> None:
    named = Counter(g0=3, g2=3)  # the others lose their connections to each other meanwhile
    assert most_blamed(named, Counter(g1=3), ["g0", "g1", "g2"], 3) == "g1"
    assert most_blamed(named, Counter(g1=2), ["g0", "g1", "g2"], 3) is None
    assert most_blamed(named, Counter(g1=3, g0=1), ["g0", "g1", "g2"], 3) is None, "it is not alone"
