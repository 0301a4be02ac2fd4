"""Histories that once broke an invariant, made small.

The rule that each broke is kept by a transcript under ``tests/machines`` and by the mutant that its note names: a
history is another one as soon as a machine says one message more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.simulator import mutants
from lightkeeper.simulator.history import run_history
from lightkeeper.simulator.shrink import from_file, to_json

SEEDS = sorted((Path(__file__).parent / "seeds").glob("*.json"))
each_seed = pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)


def test_there_are_seeds() -> None:
    assert len(SEEDS) >= 6


@each_seed
def test_what_once_broke_holds(path: Path) -> None:
    outcome = run_history(from_file(path))
    assert not outcome.invariant, outcome.what


@each_seed
def test_its_note_names_the_rule_that_it_broke(path: Path) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    assert mutants.named(fields["note"]) and fields["broke"]


@each_seed
def test_a_plan_is_the_same_after_writing_and_reading(path: Path, tmp_path: Path) -> None:
    plan = from_file(path)
    again = tmp_path / "again.json"
    again.write_text(to_json(plan, run_history(plan)), encoding="utf-8")
    assert from_file(again) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not the file of a simulated history"),
        ('{"seed": 1, "shape": {"wheels": 4}, "faults": []}', "wheels"),
        ('{"seed": 1, "shape": {}, "faults": [{"kind": "flood", "at_s": 1}]}', "does not know"),
        ('{"seed": 1, "shape": {}, "faults": [{"kind": "kill_rank", "at_s": 1, "phase": "noon"}]}', "does not know"),
    ],
)
def test_a_file_that_is_no_plan_is_told_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        from_file(path)
    with pytest.raises(UsageError, match="cannot read"):
        from_file(tmp_path / "none.json")
