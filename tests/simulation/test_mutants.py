"""Every rule that is undone is noticed; a few of them on every push, all of them in the long tier."""

from __future__ import annotations

import pytest

from lightkeeper.simulator import mutants

QUICK = (
    "no fence",
    "no lease",
    "fresh deal in a recovery",
    "an incomplete sum is committed",
    "finished before closing",
    "activation spoken of before it is logged",
    "share dealt twice: to the joiner of a first step too",
    "store key without epoch",
)
QUICK_HISTORIES = 60


def test_there_are_enough_and_their_names_differ() -> None:
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 20
    assert set(QUICK) < {mutant.name for mutant in mutants.MUTANTS}


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_there_exactly_once(mutant: mutants.Mutant) -> None:
    text = mutants.source_of(mutant)
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.module, "exec")


@pytest.mark.parametrize("name", QUICK)
def test_a_rule_undone_is_noticed(name: str) -> None:
    caught = mutants.run(mutants.named(name), count=QUICK_HISTORIES)
    assert caught.seed is not None and caught.invariant, f"{name!r} broke nothing in {QUICK_HISTORIES} histories"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_rule_undone_is_noticed(mutant: mutants.Mutant) -> None:
    caught = mutants.run(mutant)
    assert caught.seed is not None, f"{mutant.name!r} broke nothing in {mutants.HISTORIES_MAX} histories"
