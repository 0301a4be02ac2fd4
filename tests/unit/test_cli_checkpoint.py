"""`lightkeeper checkpoint`: what is there, whether it is whole, what goes; without torch unless it is to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_made import published, written
from cli_said import one_line

from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.names import MANIFEST, MARKER, step_name
from lightkeeper.cli.app import run


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Steps 100 to 500, of which 300 lacks its marker; one that is half-written, one half-deleted, one put aside."""
    folder = Folder(tmp_path / "run" / "checkpoints", "g0-1")
    published(folder, 100, 200, 300, 400, 500, 600)
    folder.put_aside(500)
    (folder.path / step_name(300) / MARKER).unlink()
    written(Folder(folder.path, "g1-2"), 450)
    written(Folder(folder.path, "g1-2"), 600)
    (folder.path / ".dropped-step-00000001.ab").mkdir()
    (folder.path / "notes.txt").write_bytes(b"mine")
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr()
    assert said.err == ""
    return said.out.splitlines()


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = lines(capsys)
    return json.loads(line)


def turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- ls


@pytest.mark.parametrize("given", ["run", "run/checkpoints"])
def test_ls_shows_what_counts_and_why_the_rest_does_not(
    folder: Folder, tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / step_name(200) / MANIFEST).write_bytes(b"")
    assert run(["checkpoint", "ls", str(tmp_path / given)]) == 0
    rows = lines(capsys)
    assert [row.split()[:2] for row in rows[:5]] == [["step", str(step)] for step in (500, 400, 300, 200, 100)]
    assert all(row.endswith(" committed") and " e1/1@lh " in row and " g0 " in row for row in (rows[0], rows[4]))
    assert rows[2].endswith("does not count: it has no commit marker") and " g0 " in rows[2]
    assert rows[3].endswith("does not count: its manifest is empty") and " -" in rows[3]
    assert rows[5:] == ["not counted: 2 half-written, 1 put aside, 1 half deleted"]


def test_ls_as_json(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "ls", str(folder.path), "--json"]) == 0
    found = told(capsys)
    assert found["folder"] == str(folder.path)
    assert [(one["step"], one["committed"], one["reason"]) for one in found["checkpoints"]] == [
        (500, True, ""), (400, True, ""), (300, False, "it has no commit marker"), (200, True, ""), (100, True, ""),
    ]  # fmt: skip
    newest = found["checkpoints"][0]
    assert (newest["epoch"], newest["group"], newest["wall"], newest["bytes"]) == (1, "g0", 100.0, 118)
    assert found["half_written"] == [".saving-00000600.g1-2", ".saving-00000450.g1-2"]
    assert (found["aside"], found["dropped"]) == (["aside-step-00000600"], [".dropped-step-00000001.ab"])
    assert found["alien"] == ["notes.txt"]


def test_an_empty_folder_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "ls", str(tmp_path)]) == 0
    assert lines(capsys) == [f"no checkpoint in {tmp_path}"]
    assert run(["checkpoint", "verify", str(tmp_path)]) == 1
    assert lines(capsys) == [f"no checkpoint in {tmp_path} is whole"]
    assert run(["checkpoint", "prune", str(tmp_path), "--keep", "2"]) == 0
    assert lines(capsys) == ["nothing to delete; 0 committed stay"]


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["prune", "--keep", "3"]])
def test_a_folder_that_is_none_is_told_in_one_line(
    folder: Folder, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for given, why in ((tmp_path / "nowhere", "No such file or directory"), (tmp_path / "file", "Not a directory")):
        assert run(["checkpoint", *words, str(given)]) == 2
        assert one_line(capsys) == f"no folder of checkpoints at {given}: {why}"
    one = folder.path / step_name(100)
    assert run(["checkpoint", *words, str(one)]) == 2
    assert one_line(capsys) == f"{one} is one checkpoint: give the folder it is in, {folder.path}"


# ---------------------------------------------------------------- verify


def test_verify_reads_every_file(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(folder.path)]) == 0
    rows = lines(capsys)
    assert [row.split(" (")[0] for row in rows] == [
        "step 500: whole", "step 400: whole", "step 300: not committed: it has no commit marker",
        "step 200: whole", "step 100: whole",
    ]  # fmt: skip
    assert "(118 B read, " in rows[0]
    turn_a_bit(folder.path / step_name(400) / "__0_0.distcp")
    assert run(["checkpoint", "verify", str(folder.path)]) == 1
    assert lines(capsys)[1] == "step 400: damaged: __0_0.distcp has other bytes than were written"


@pytest.mark.parametrize("name", [MANIFEST, MARKER])
def test_verify_takes_one_that_was_committed_and_lost_its_head_for_damaged(
    folder: Folder, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / step_name(500) / name).write_bytes(b"{}")
    assert run(["checkpoint", "verify", str(folder.path), "--json"]) == 1
    found = told(capsys)
    assert (found["whole"], found["damaged"]) == (3, 1)
    assert [one["step"] for one in found["checkpoints"] if one["state"] == "damaged"] == [500]


def test_verify_of_one_step(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    turn_a_bit(folder.path / step_name(400) / ".metadata")
    assert [run(["checkpoint", "verify", str(folder.path), "--step", str(step)]) for step in (500, 400, 300)] == [
        0,
        1,
        1,
    ]
    rows = lines(capsys)
    assert rows[0].startswith("step 500: whole")
    assert rows[1:] == [
        "step 400: damaged: .metadata has other bytes than were written",
        "step 300: not committed: it has no commit marker",
    ]
    assert run(["checkpoint", "verify", str(folder.path), "--step", "42"]) == 2
    assert one_line(capsys) == (
        f"--step 42: there is no such checkpoint in {folder.path} (there are: 500, 400, 300, 200, 100)"
    )


def test_verify_bears_that_a_job_deletes_an_old_one_meanwhile(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightkeeper.checkpoint import files

    measured, going = files.measured, [folder.path / step_name(100)]

    def delete(path: Path) -> Any:
        if path.parent == going[0]:
            folder.drop(path.parent)
        return measured(path)

    monkeypatch.setattr(files, "measured", delete)
    assert run(["checkpoint", "verify", str(folder.path)]) == 0
    assert not going[0].exists() and [row.split()[1] for row in lines(capsys)] == ["500:", "400:", "300:", "200:"]


def test_verify_loads_each_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is torch's own, the second has files of the right sums, which torch cannot load."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = Folder(tmp_path, "g0-1")
    published(folder, 1)
    assert run(["checkpoint", "verify", str(tmp_path)]) == 0
    lines(capsys)
    assert run(["checkpoint", "verify", str(tmp_path), "--load"]) == 1
    assert lines(capsys)[0].startswith("step 1: damaged: torch cannot load it: UnpicklingError")

    def real(path: Path) -> None:
        dcp.save({"a": torch.ones(3), "b": torch.zeros(2)}, checkpoint_id=path, no_dist=True)

    with pytest.warns(UserWarning, match="single process"):
        published(folder, 2, fill=real)
    assert run(["checkpoint", "verify", str(tmp_path), "--load", "--step", "2"]) == 0
    assert "read, 2 names loaded, " in lines(capsys)[0]


# ---------------------------------------------------------------- prune


def test_prune_says_what_goes_and_does_that(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "prune", str(folder.path), "--keep", "2"]
    before = sorted(os.listdir(folder.path))
    assert run([*words, "--dry-run"]) == 0
    would = lines(capsys)
    assert [row.split(" (")[0] for row in would[:-1]] == [f"would delete {step_name(step)}" for step in (100, 200, 300)]
    assert would[-1].startswith("3 folders, ") and would[-1].endswith("; 4 committed are there")
    assert sorted(os.listdir(folder.path)) == before
    assert run(words) == 0
    assert [row.replace("deleted", "would delete") for row in lines(capsys)[:-1]] == would[:-1]
    assert set(before) - set(os.listdir(folder.path)) == {step_name(step) for step in (100, 200, 300)}
    assert run(words) == 0
    assert lines(capsys) == ["nothing to delete; 2 committed stay"]


def test_prune_keeps_every_so_many_and_removes_what_broke_off_if_asked(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "prune", str(folder.path), "--keep", "2", "--keep-every", "200", "--older-half-written"]
    assert run([*words, "--json"]) == 0
    found = told(capsys)
    assert set(found["deleted"]) == {
        step_name(100), step_name(300), ".saving-00000450.g1-2", ".dropped-step-00000001.ab",
    }  # fmt: skip
    assert found["bytes"] == sum(found["deleted"].values()) > 300 and found["dry_run"] is False
    assert sorted(os.listdir(folder.path)) == [
        ".saving-00000600.g1-2", "aside-step-00000600", "notes.txt", *(step_name(step) for step in (200, 400, 500)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--keep", "1"], "--keep must be within 2..1000000, got 1"),
        (["--keep", "-3"], "--keep must be within 2..1000000, got -3"),
        (["--keep", "2", "--keep-every", "-1"], "--keep-every must be within 0..1000000000000, got -1"),
    ],
)
def test_prune_refuses_to_leave_fewer_than_two(
    folder: Folder, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(folder.path))
    assert run(["checkpoint", "prune", str(folder.path), *words]) == 2
    assert one_line(capsys) == why and sorted(os.listdir(folder.path)) == before


# ---------------------------------------------------------------- all


def test_nothing_imports_torch_unless_it_is_to_load(folder: Folder) -> None:
    code = (
        "import sys; from lightkeeper.cli.app import run\n"
        "for words in (['ls'], ['verify'], ['prune', '--keep', '2']):\n"
        f"    run(['checkpoint', *words, {str(folder.path)!r}])\n"
        "bad = [n for n in ('torch', 'grpc', 'numpy') if n in sys.modules]; assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "step 500: whole" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_help_names_every_option_with_a_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    import typer.main

    from lightkeeper.cli.app import build

    assert run(["checkpoint", command, "--help"]) == 0
    assert command in capsys.readouterr().out
    group: Any = typer.main.get_command(build()).commands["checkpoint"]  # type: ignore[attr-defined]
    for parameter in group.commands[command].params:
        assert parameter.help, f"{command} {parameter.name} has no help"
