"""The quarantine as a run sees it."""

from __future__ import annotations

from pathlib import Path

from lightkeeper.supervisor.aside import Aside
from lightkeeper.supervisor.burn_in import Result
from lightkeeper.supervisor.quarantine_file import QuarantineFile


def aside(folder: Path) -> tuple[Aside, QuarantineFile]:
    file = QuarantineFile(folder / "quarantine.json")
    return Aside(file, "j"), file


def test_one_failure_is_mended_by_a_burn_in_and_two_in_a_week_are_not(tmp_path: Path) -> None:
    own, _ = aside(tmp_path)
    own.exclude("n1", "Xid 79", "incidents/a")
    assert own.excluded(["n0", "n1"]) == {"n1": "n1 is in quarantine: Xid 79"}
    assert own.before_burn_in("n1") == (1, "")
    assert own.burned_in("n1", Result(3, 1.0, ""), 1) == (True, "passed a burn-in of 3 rounds")
    assert own.excluded(["n1"]) == {}
    own.exclude("n1", "Xid 79", "")
    count, why = own.before_burn_in("n1")
    assert count == 2 and why == "2 failures in a week: lightkeeper quarantine burn-in n1, then release n1"


def test_a_burn_in_that_fails_is_a_failure(tmp_path: Path) -> None:
    own, file = aside(tmp_path)
    own.exclude("n1", "Xid 79", "")
    assert own.burned_in("n1", Result(1, 1.0, "round 1: ecc"), 1) == (False, "round 1: ecc")
    assert [one.burn_in for one in file.read().nodes["n1"].failures] == [False, True]


def test_what_a_person_put_aside_is_left_to_them(tmp_path: Path) -> None:
    own, file = aside(tmp_path)
    with file.change() as held:
        held[0] = held[0].add("n1", "new cable", 1.0)
    assert own.before_burn_in("n1")[1].startswith("a person put it aside")


def test_a_node_that_was_put_aside_during_its_burn_in_stays(tmp_path: Path) -> None:
    own, _ = aside(tmp_path)
    own.exclude("n1", "Xid 79", "")
    own.exclude("n1", "ecc", "")
    assert own.burned_in("n1", Result(3, 1.0, ""), 1)[0] is False


def test_the_stamp_changes_with_the_file(tmp_path: Path) -> None:
    own, _ = aside(tmp_path)
    before = own.stamp()
    own.exclude("n1", "x", "")
    assert own.stamp() != before
