"""Every rule that is undone is noticed: by the seed that is kept with it on every push, by a scan in the long tier.

A history is another one as soon as a machine says one message more. If the seed of a rule that only few histories
notice shows nothing any more, ``lightkeeper simulate --mutants`` finds the one to put in its place.
"""

from __future__ import annotations

import pytest

from lightkeeper.simulator import mutants

MORE = 60  # histories after the one that is kept, which may have become another
BOTH = (*mutants.MUTANTS, *mutants.UNNOTICED)
each_mutant = pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)


def test_there_are_enough_and_their_names_differ() -> None:
    assert len(mutants.MUTANTS) >= 24
    assert len({mutant.name for mutant in BOTH}) == len(BOTH)


@pytest.mark.parametrize("mutant", BOTH, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_there_exactly_once(mutant: mutants.Mutant) -> None:
    text = mutants.source_of(mutant)
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.module, "exec")


@each_mutant
def test_a_rule_undone_is_noticed_by_its_seed(mutant: mutants.Mutant) -> None:
    """And the same history holds with the rule in place, else it would show nothing of the rule."""
    caught = mutants.run(mutant, mutant.seed, 1 + MORE)
    assert caught.seed is not None, f"{mutant.name!r} broke nothing in {1 + MORE} histories from seed {mutant.seed} on"


def test_a_history_that_breaks_by_itself_shows_nothing_of_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightkeeper.simulator import history

    found = iter([mutants.Caught("no fence", 3, "I2", "", 4), mutants.Caught("no fence", 7, "I2", "", 4)])
    broken = {3: history.Outcome(3, "I1", "a bug"), 7: history.Outcome(7)}
    monkeypatch.setattr(mutants, "_fresh", lambda *_words: next(found))
    monkeypatch.setattr(history, "run_history", lambda plan: broken[plan.seed])
    caught = mutants.run(mutants.named("no fence"))
    assert (caught.seed, caught.histories) == (7, 8)


def test_the_faults_under_which_a_rule_matters_fill_its_histories() -> None:
    mutant = mutants.named("old term acknowledged")
    kinds = [fault.kind for seed in range(20) for fault in mutants.plan_of(mutant, seed).faults]
    assert sum(kind in mutant.favoured for kind in kinds) > 0.6 * len(kinds)
    shaped = mutants.named("a lighthouse without log leaves out whom it does not hear")
    assert {mutants.plan_of(shaped, seed).shape.groups for seed in range(20)} == {shaped.shape["groups"]}


@pytest.mark.long
@pytest.mark.timeout(7200)
@each_mutant
def test_every_rule_undone_is_noticed(mutant: mutants.Mutant) -> None:
    caught = mutants.run(mutant)
    assert caught.seed is not None, f"{mutant.name!r} broke nothing in {mutants.HISTORIES_MAX} histories"
