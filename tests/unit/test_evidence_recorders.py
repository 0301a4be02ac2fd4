"""The flight recorders of several ranks compared: who is missing in a collective, and who called another one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightkeeper.events import schema, signals
from lightkeeper.manager.evidence import compare
from lightkeeper.manager.evidence.recorder import NoDump, as_file, dump_of


def entry(name: str, number: int, retired: bool = True, op: str = "all_reduce", desc: str = "") -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": [name, desc], "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": f"gloo:{op}", "time_created_ns": number, "input_sizes": [[10]],
        "output_sizes": [[10]], "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "scheduled",
        "retired": retired, "is_p2p": False, "timeout_ms": 1000,
    }  # fmt: skip


def dump(group: str, rank: int, own: list[Any], epoch: list[Any] = (), groups=("g0", "g1")) -> dict[str, Any]:  # type: ignore[assignment]
    entries = [*own, *epoch]
    epochs = {f"e7r{rank}": list(groups)} if epoch else {}
    return {
        "group": group, "rank": rank, "own": {"0": [0, 1]} if own else {}, "epochs": epochs,
        "dump": {"version": "2.10", "entries": entries, "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}},
    }  # fmt: skip


def own(number: int, retired: bool = True, op: str = "all_reduce") -> dict[str, Any]:
    return entry("0", number, retired, op, "default_pg")


@pytest.fixture(scope="module")
def compared():
    """Torch's analysis in a process of its own, as the manager has it done."""

    def of(folder_: Path, *dumps: dict[str, Any]) -> tuple[str, str]:
        paths = []
        for number, one in enumerate(dumps):
            paths.append(folder_ / f"dump{number}.json")
            paths[-1].write_text(json.dumps(one))
        return compare_files(*paths)

    return of


def compare_files(*paths: Path) -> tuple[str, str]:
    words = [sys.executable, "-m", "lightkeeper.manager.evidence.compare", *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    return found["line"], found["text"]


def test_who_never_arrived_in_a_collective_of_the_group(tmp_path: Path, compared) -> None:
    line, text = compared(tmp_path, dump("g0", 0, [own(1), own(2, False)]), dump("g0", 1, [own(1)]))
    assert line == "all_reduce #2 of default_pg: rank 1 of g0 never arrived; rank 0 of g0 waits"
    assert "Not all ranks joining collective" in text, "it is torch's own analysis that says so"


def test_who_called_another_collective(tmp_path: Path, compared) -> None:
    line, _ = compared(tmp_path, dump("g0", 0, [own(1, False)]), dump("g0", 1, [own(1, False, "all_gather")]))
    assert line == (
        "all_reduce #1 of default_pg: ranks call different things: all_gather [[10]] by 1 of g0, all_reduce [[10]] by "
        "the others (COLLECTIVE_TYPE_MISMATCH)"
    ), "of two nobody is to be blamed"
    three = [dump("g0", rank, [own(1, False, "all_gather" if rank == 0 else "all_reduce")]) for rank in range(3)]
    for one in three:
        one["own"] = {"0": [0, 1, 2]}
    line, _ = compared(tmp_path, *three)
    assert line.startswith("all_gather #1 of default_pg: rank 0 of g0 called all_gather [[10]] where the others called")


def test_a_rank_without_a_dump_is_named(tmp_path: Path, compared) -> None:
    many = [own(number) for number in range(1, 40)]
    line, text = compared(tmp_path, dump("g0", 0, [*many, own(40, False)]))
    assert line == "all_reduce #40 of default_pg: no dump of rank 1 of g0; rank 0 of g0 waits"
    assert len(text.splitlines()) < 10


def test_nobody_stands(tmp_path: Path, compared) -> None:
    assert compared(tmp_path, dump("g0", 0, [own(1)]), dump("g0", 1, [own(1)]))[0] == ""


def test_across_groups_a_rank_is_named_with_its_group(tmp_path: Path, compared) -> None:
    """Each group numbers its ranks from 0 and calls its own process group 0; an epoch's group goes across."""
    epoch = [entry("e7r0", 1, desc="epoch")]
    waits = dump("g0", 0, [own(1)], [*epoch, entry("e7r0", 2, False, desc="epoch")])
    line, _ = compared(tmp_path, waits, dump("g1", 0, [own(1), own(2)], epoch))
    assert line == "all_reduce #2 of e7r0: rank 0 of g1 never arrived; rank 0 of g0 waits"


def test_a_survivor_that_was_only_late_is_not_named(tmp_path: Path, compared) -> None:
    """Of three groups one is lost; another had not come to the reduce yet, in which the third stood."""
    recovery, incident = tmp_path / "recovery-e8", tmp_path / "incident"
    recovery.mkdir(), incident.mkdir()
    three, begun = ("g0", "g1", "g2"), [entry("e7r0", 1, desc="epoch")]
    stands = dump("g0", 0, [], [*begun, entry("e7r0", 2, False, desc="epoch")], three)
    late, lost = dump("g1", 0, [], begun, three), dump("g2", 0, [], begun, three)
    for path, one in ((recovery / "a.json", stands), (recovery / "b.json", late), (incident / "c.json", lost)):
        path.write_text(json.dumps(one))

    def line(*paths: Path) -> str:
        return compare_files(*paths)[0]

    files = (recovery / "a.json", recovery / "b.json", incident / "c.json")
    assert line(*files) == "all_reduce #2 of e7r0: rank 0 of g2 never arrived; rank 0 of g0 waits"
    assert line(*files[:2]) == "all_reduce #2 of e7r0: no dump of rank 0 of g2; rank 0 of g0 waits"
    for path in files:
        one = json.loads(path.read_text())
        path.write_text(json.dumps({**one, "epochs": {"e7r0": ["g0", "g1"]}}))
    assert line(*files[:2]) == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_verdict_reads_the_line(tmp_path: Path, compared, rank: int) -> None:
    """Who is missing is named first: that is who it blames."""
    line, _ = compared(tmp_path, dump("g1", 1 - rank, [own(1), own(2, False)]), dump("g1", rank, [own(1)]))
    (signal_,) = signals._evidence(schema.Evidence(folder="f", recorder=line))
    assert (signal_.group, signal_.rank) == ("g1", rank)
    line, _ = compared(tmp_path, dump("g1", 1 - rank, [own(1), own(2, False)]))
    (signal_,) = signals._evidence(schema.Evidence(folder="f", recorder=line))
    assert (signal_.group, signal_.rank) == ("g1", rank)


def test_what_is_no_dump_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoDump, match="no dump"):
        as_file("g0", 0, tmp_path, b"nonsense")
    with pytest.raises(NoDump, match="nothing is recorded"):
        as_file("g0", 0, tmp_path, b'{"entries": []}')
    with pytest.raises(NoDump, match="cannot be asked"):
        asyncio.run(dump_of("g0", 0, tmp_path, time.monotonic() + 1))


def test_no_analysis_without_torch(monkeypatch) -> None:
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if not k.startswith("torch")})
    monkeypatch.setattr(compare.importlib.machinery.PathFinder, "find_spec", lambda name, path: None)
    with pytest.raises(ImportError, match="no torch"):
        compare.load_analysis()
