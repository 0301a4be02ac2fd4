"""`lightkeeper simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightkeeper.cli.app import run
from lightkeeper.simulator import mutants, show
from lightkeeper.simulator.checkers import Violation
from lightkeeper.simulator.faults import KINDS, Faults
from lightkeeper.simulator.phases import PHASES


def test_json_holds_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seeds", "6", "--first", "11", "--groups", "3", "--workers", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["histories"] + said["idle"] == 6 and said["violations"] == [] and said["workers"] == 1
    assert set(said["kinds"]) == set(KINDS) == set(said["cells"]) and set(said["cells"]["kill_rank"]) == set(PHASES)
    assert said["faults"] == sum(said["kinds"].values()) and said["messages"] > 30


def test_the_table_says_what_never_struck(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seeds", "2", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "kinds that never struck:" in said and "empty cells:" in said and "violations: 0" in said


def test_more_faults_an_hour_are_more_faults(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for rate in ("900", "3600"):
        assert run(["simulate", "--seeds", "8", "--workers", "1", "--json", "--faults-per-hour", rate]) == 0
        counts.append(json.loads(capsys.readouterr().out)["faults"])
    assert counts[1] > 2 * counts[0]


def test_a_violation_is_shown_small_kept_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks(faults: Faults, fault: object) -> bool:
        raise Violation("I2", "injected")

    monkeypatch.setattr(Faults, "kill_rank", breaks)
    arguments = ["simulate", "--seeds", "8", "--workers", "1"]
    assert run([*arguments, "--keep", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "I2: injected" in said.err and "FAULT kill_rank" in said.err and "violations: 8" not in said.out
    (path,) = tmp_path.glob("i2-*.json")
    assert [fault["kind"] for fault in json.loads(path.read_text())["faults"]] == ["kill_rank"]
    assert run(["simulate", "--replay", str(path)]) == 1
    assert "I2: injected" in capsys.readouterr().out
    monkeypatch.undo()
    assert run(["simulate", "--replay", str(path)]) == 0
    assert "every invariant held" in capsys.readouterr().out


def test_mutants_are_listed_with_their_seeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tuple(mutants.named(name) for name in ("no fence", "fresh deal in a recovery"))
    monkeypatch.setattr(show.mutants, "MUTANTS", chosen)
    assert run(["simulate", "--mutants", "--seeds", "60", "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert "no fence" in said and "I2" in said and "I5" in said and "NOT NOTICED" not in said


def test_a_mutant_that_nothing_notices_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = mutants.Caught("no fence", None, "", "", 1)
    monkeypatch.setattr(show.mutants, "MUTANTS", (mutants.named("no fence"),))
    monkeypatch.setattr(show.mutants, "run", lambda *given: same)
    assert run(["simulate", "--mutants", "--seeds", "1", "--workers", "1"]) == 1
    assert "NOT NOTICED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "0"], "--seeds must be within"),
        (["--groups", "40"], "--groups must be within"),
        (["--hours", "0"], "--hours must be within"),
        (["--faults-per-hour", "0"], "makes 0 faults a history"),
        (["--first", "-1"], "--first must be within"),
        (["--workers", "-2"], "--workers must be within"),
        (["--replay", "/nonexistent.json"], "cannot read"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
