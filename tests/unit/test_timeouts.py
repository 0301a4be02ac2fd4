"""One number, and the order of all that is derived from it (scenario 23)."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies

from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import PREFIX, Settings, read_settings
from lightkeeper.manager.timeouts import BUDGET, BUDGET_S_MAX, DERIVED, LEASE_PAIRS, MAY_BE_0, PAIRS, Pair

BUDGETS = strategies.floats(1, BUDGET_S_MAX)


def by_order(pair: Pair) -> str:
    return f"{pair.lower} < {pair.upper}"


@settings(deadline=None)
@given(BUDGETS)
def test_whatever_the_number_what_is_derived_is_in_order(budget_s: float) -> None:
    timeouts = Settings(outage_budget_s=budget_s).timeouts
    for pair in PAIRS:
        assert getattr(timeouts, pair.lower) < getattr(timeouts, pair.upper), by_order(pair)
    assert timeouts.collective_timeout_s < timeouts.heartbeat_s


@settings(deadline=None)
@given(BUDGETS, strategies.floats(0.001, 0.79))
def test_a_lease_below_the_budget_inverts_nothing_that_is_derived(budget_s: float, share: float) -> None:
    timeouts, lease_s = Settings(outage_budget_s=budget_s).timeouts, share * budget_s
    assert timeouts.against(lease_s) == "" and lease_s < timeouts.stall_floor(lease_s) < budget_s


@settings(deadline=None)
@given(BUDGETS, strategies.sampled_from(PAIRS), strategies.floats(0, 1))
def test_any_pair_that_is_inverted_is_refused_by_its_names_and_values(budget_s: float, pair: Pair, by: float) -> None:
    """Scenario 23: whatever else is inverted with it, one pair of the table is named, with the value that was given."""
    right = Settings(outage_budget_s=budget_s).timeouts
    name, other = (pair.lower, pair.upper) if pair.lower != BUDGET else (pair.upper, pair.lower)
    bound = getattr(right, other)
    value = bound * (1 + by) if name == pair.lower else bound * (1 - by * 0.99)
    with pytest.raises(UsageError) as raised:
        read_settings({PREFIX + name.upper(): repr(value), PREFIX + "OUTAGE_BUDGET_S": repr(budget_s)})
    said = str(raised.value)
    assert f"{name} {value:g} (LIGHTKEEPER_{name.upper()})" in said and "\n" not in said
    named = next(one for one in PAIRS if f"{one.lower} " in said and f"must be below {one.upper} " in said)
    assert name in (named.lower, named.upper) and named.why in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"reduce_timeout_s": 300},
            "first_step_s 600 (10 x outage_budget_s) must be below reduce_timeout_s 300 (--reduce-timeout-s): the "
            "others stand in their reduce while one does its first step; raise reduce_timeout_s or leave it out",
        ),
        (
            {"stall_floor_s": 90},
            "stall_floor_s 90 (--stall-floor-s) must be below outage_budget_s 60 (the default): a stuck rank must be "
            "found before those that wait for it give up; lower stall_floor_s or leave it out, or raise "
            "outage_budget_s",
        ),
        (
            {"outage_budget_s": 30, "first_step_s": 900},
            "first_step_s 900 (--first-step-s) must be below reduce_timeout_s 360 (12 x outage_budget_s): the others "
            "stand in their reduce while one does its first step; lower first_step_s or leave it out, or raise "
            "outage_budget_s, from which reduce_timeout_s is derived",
        ),
    ],
)
def test_the_line_says_what_where_from_why_and_what_to_do(given: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_settings({}, **given)
    assert str(raised.value) == said


def test_what_is_given_in_the_right_order_is_taken() -> None:
    wanted = {"evidence_s": 1.0, "stall_floor_s": 5.0, "form_timeout_s": 7.0, "quorum_wait_s": 0.0,
              "stop_deadline_s": 65.0, "start_budget_s": 70.0,
              "first_step_s": 80.0, "reduce_timeout_s": 90.0, "collective_timeout_s": 100.0}  # fmt: skip
    assert wanted.keys() == DERIVED.keys()
    timeouts = read_settings({}, **wanted).timeouts
    assert {name: getattr(timeouts, name) for name in wanted} == wanted
    child = read_settings(Settings(outage_budget_s=50, **wanted).to_environment())
    assert child.timeouts == Settings(outage_budget_s=50, **wanted).timeouts, "as a child of a launcher reads it"
    assert child.timeouts.source("evidence_s") == "LIGHTKEEPER_EVIDENCE_S"


def test_what_is_derived_is_derived_again_under_another_number() -> None:
    changed = dataclasses.replace(Settings(evidence_s=1.0), outage_budget_s=120.0)
    assert (changed.timeouts.reduce_timeout_s, changed.timeouts.evidence_s) == (1440.0, 1.0)
    assert not any(PREFIX + name.upper() in Settings().to_environment() for name in DERIVED)


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e12])
def test_seconds_that_make_no_sense_are_refused(name: str, value: float) -> None:
    if name in MAY_BE_0 and value == 0.0:
        assert getattr(Settings(**{name: value}).timeouts, name) == 0.0
        return
    with pytest.raises(UsageError, match=f"{name} .*: give (seconds above 0|0 or more seconds)"):
        Settings(**{name: value})


@pytest.mark.parametrize(("lease_s", "pair"), [*zip((20.0, 70.0), LEASE_PAIRS, strict=True)])
def test_a_lease_that_is_too_long_names_the_lighthouses_option(lease_s: float, pair: Pair) -> None:
    given = Settings(stall_floor_s=15.0 if pair.upper == "stall_floor_s" else None).timeouts
    said = given.against(lease_s)
    assert said.startswith(f"lease_s {lease_s:g} (--lease-s of the lighthouse) must be below {pair.upper} ")
    assert pair.why in said and "give the lighthouse a shorter --lease-s" in said
    assert given.against(2.0) == ""


def test_a_floor_that_had_to_give_way_to_the_lease_says_so() -> None:
    said = Settings(outage_budget_s=10).timeouts.against(9.0)
    assert said.startswith("stall_floor_s 11.25 (1.25 x lease_s) must be below outage_budget_s 10 (given)")


def test_declared_work_is_shorter_than_the_reduce_of_the_others() -> None:
    timeouts = Settings(reduce_timeout_s=700.0).timeouts
    timeouts.check_declared(600)
    with pytest.raises(UsageError, match=r"seconds=700 must be below reduce_timeout_s 700 \(given\): the other groups"):
        timeouts.check_declared(700)
    for strange in (0, -1, math.nan, math.inf):
        with pytest.raises(UsageError, match="give a number of seconds above 0"):
            timeouts.check_declared(strange)


def test_the_chain_from_the_shortest_to_the_longest() -> None:
    """As `docs/timeouts.md` shows it."""
    t = Settings().timeouts
    chain = (2.0, t.stall_floor(2.0), t.form_timeout_s, t.outage_budget_s, t.first_step_s, t.reduce_timeout_s,
             t.collective_timeout_s, t.heartbeat_s)  # fmt: skip
    assert chain == (2.0, 15.0, 30.0, 60.0, 600.0, 720.0, 1200.0, 1500) and all(a < b for a, b in pairwise(chain))
