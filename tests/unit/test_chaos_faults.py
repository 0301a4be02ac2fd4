"""The table of faults, what a seed decides, and the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightkeeper.chaos import journal
from lightkeeper.chaos.acts import ACTS
from lightkeeper.chaos.faults import FAULTS, FIRST_STEP, LAST_STEP, OTHER, SPARE, VICTIM, Fault, named, plan
from lightkeeper.chaos.soak import schedule
from lightkeeper.chaos.strikes import KINDS
from lightkeeper.errors import RunFolderError, UsageError
from lightkeeper.events.schema import KINDS as EVENT_KINDS
from lightkeeper.manager.faults import ANY_STEP, parse_faults

EVENTS = {str(kind.__struct_config__.tag) for kind in EVENT_KINDS}
each = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


@each
def test_a_fault_is_done_in_one_way_that_there_is(fault: Fault) -> None:
    planned = plan(fault, 3)
    assert bool(fault.act) != bool(fault.inside)
    assert not fault.act or fault.act in ACTS or fault.shape.apart
    if fault.inside:
        (parsed,) = parse_faults(planned.inside)
        assert (parsed.group, parsed.rank, parsed.step) == (planned.victim, planned.rank, planned.step)
    if fault.inside_again:
        assert parse_faults(planned.inside_again)[0].step == ANY_STEP
    assert not (fault.live or fault.soak) or fault.act in ACTS
    assert fault.what and "\n" not in fault.what


@each
def test_what_must_follow_can_be_asked_of_the_log(fault: Fault) -> None:
    expected, planned = fault.expected, plan(fault, 0)
    assert {*expected.kinds, *expected.none} <= EVENTS and set(expected.kinds) <= set(KINDS)
    assert bool(expected.lost) == bool(expected.by), "who finds it is asked of every loss"
    assert expected.lost or "group_lost" in expected.none
    assert bool(expected.away) == bool(expected.codes) and set(expected.away) <= set(expected.lost)
    assert set(expected.lost) <= set(planned.roles) and not set(expected.kinds) & set(expected.none)
    if fault.then is not None:
        kind, about, act, role = fault.then
        assert kind in KINDS and act in ("kill", "freeze") and {about, role} <= set(planned.roles)


@each
def test_whom_it_hits_is_drawn_from_the_seed(fault: Fault) -> None:
    plans = [plan(fault, seed) for seed in range(40)]
    assert plans == [plan(fault, seed) for seed in range(40)]
    assert {p.step for p in plans} <= set(range(FIRST_STEP, LAST_STEP + 1)) and len({p.step for p in plans}) > 3
    for planned in plans:
        assert set(planned.roles.values()) <= set(fault.shape.names)
        assert len(set(planned.roles.values())) == len(planned.roles), "one group in two roles"
    victims = {p.victim for p in plans}
    if fault.shape.nodes > 1:
        assert victims == {"g0"}
    elif fault.shape.apart:
        assert victims == {"g2"}
    elif fault.shape.spares:
        assert victims == {"g0", "g1"} and {p.roles[SPARE] for p in plans} == {"g2"}
    else:
        assert victims == set(fault.shape.names)
    assert fault.rank == 0 or {p.rank for p in plans} == {0, 1}


def test_the_faults_that_were_promised_are_there() -> None:
    text = " ".join(FAULTS)
    for word in ("kill", "freeze", "stall-in-compute", "stall-in-reduce", "slow", "cut-link", "cut-host"):
        assert word in text
    for word in (
        "lighthouse-kill",
        "manager-kill",
        "agent-kill",
        "log-unwritable",
        "clock",
        "donor",
        "joiner",
        "spare",
    ):
        assert word in text
    with pytest.raises(UsageError, match="no fault 'meteor' .there are: kill, "):
        named("meteor")


def test_a_soak_has_one_schedule_per_seed() -> None:
    dues = schedule(10, 7, 20)
    assert dues == schedule(10, 7, 20) and dues != schedule(10, 8, 20)
    assert [due.at_s for due in dues] == [20.0 * n for n in range(30)]
    assert all(due.plan.fault.soak for due in dues) and len({due.plan.fault.name for due in dues}) > 5
    assert schedule(5, 7, 20) == dues[:15], "a shorter one is the beginning of a longer one"
    assert {due.plan.roles[VICTIM] for due in dues} == {"g0", "g1", "g2"}
    assert all(due.plan.roles[VICTIM] != due.plan.roles[OTHER] for due in dues)


def test_the_journal_says_what_was_done_and_what_repeats_it(tmp_path: Path) -> None:
    told: list[str] = []
    book = journal.Journal(tmp_path, "lightkeeper chaos run kill --seed 3", {"name": "kill", "seed": 3}, told.append)
    book.write("injected", "kill of rank g1/0", group="g1")
    book.write("result", ok=True)
    with book.path.open("ab") as file:
        file.write(b'{"what": "cut sho')
    entries = journal.read_journal(tmp_path)
    assert [entry["what"] for entry in entries] == ["begun", "injected", "result"]
    assert entries[1]["group"] == "g1" and len(told) == 1 and told[0].endswith("kill of rank g1/0")
    begun = journal.begun(tmp_path)
    assert begun["command"] == "lightkeeper chaos run kill --seed 3" and begun["asked"] == {"name": "kill", "seed": 3}


def test_a_folder_without_a_journal_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no journal in"):
        journal.begun(tmp_path)
    (tmp_path / journal.FILE).write_text('{"what":"injected"}\n')
    with pytest.raises(RunFolderError, match="does not say how the run was begun"):
        journal.begun(tmp_path)
    with pytest.raises(RunFolderError, match="cannot write the journal"):
        journal.Journal(tmp_path / "nowhere", "x", {}, print)


def test_a_supervised_soak_does_every_class_once_before_any_comes_again() -> None:
    classes = {fault.name for fault in FAULTS.values() if fault.soak}
    assert {"node-kill", "supervisor-kill", "kill-all", "kill", "freeze", "cut-link"} <= classes
    dues = schedule(60, 3, 60, supervised=True)
    names = [due.plan.fault.name for due in dues]
    assert len(names) == 60 and set(names[: len(classes)]) == classes and names != sorted(names)
    assert dues == schedule(60, 3, 60, supervised=True)
    assert not any(due.plan.fault.shape.supervised for due in schedule(60, 3, 60)), "no supervisor, no nodes"
