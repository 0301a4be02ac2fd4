"""Commands that reach a supervised run by its folder alone: lighthouse, job and token are read there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from cli_said import one_line, only_the_token

from lightkeeper.cli import drain, fence, status
from lightkeeper.cli.app import run
from lightkeeper.cli.calls import Said
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE
from lightkeeper.cli.runfolder import Reach, reach
from lightkeeper.errors import UsageError
from lightkeeper.events import EventLog
from lightkeeper.events.schema import ProcessStarted

AT = "127.0.0.1:4711"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    only_the_token(monkeypatch)
    monkeypatch.delenv("LIGHTKEEPER_TOKEN")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("of-the-run")
    (tmp_path / "lighthouse.address").write_text(AT)
    (tmp_path / "supervisor.json").write_text(json.dumps({"job": "big"}))
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Who would be asked, for which job and with what token; nobody answers."""
    made: list[tuple[str, str, str]] = []

    def keep(service: str, method: str, address: str, request: Any, job: str, token: str) -> Said:
        made.append((address, job, token))
        return Said(address, None, "UNAVAILABLE", "nobody")

    for module in (drain, fence, status):
        monkeypatch.setattr(module, "call", keep)
    return made


@pytest.mark.parametrize(
    "words", ["status --run-folder RUN", "status RUN", "drain g1 --run-folder RUN", "fence --group g1 --run-folder RUN"]
)
def test_the_folder_alone_is_enough(words: str, folder: Path, calls: list[tuple[str, str, str]]) -> None:
    assert run(words.replace("RUN", str(folder)).split()) != 0
    assert calls == [(AT, "big", "of-the-run")]


def test_what_is_given_goes_before_the_folder(
    folder: Path, calls: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine").write_text("mine")
    given = ["--lighthouse", "127.0.0.1:1", "--job", "j", "--token-file", str(folder / "mine")]
    for word in (["status"], ["drain", "g1"], ["fence", "--group", "g1"]):
        assert run([*word, "--run-folder", str(folder), *given]) != 0
    assert set(calls) == {("127.0.0.1:1", "j", "mine")}
    monkeypatch.setenv("LIGHTKEEPER_LIGHTHOUSE", "127.0.0.1:2")
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "env")
    monkeypatch.setenv("LIGHTKEEPER_RUN_FOLDER", str(folder))
    calls.clear()
    assert run(["drain", "g1"]) == 1
    assert calls == [("127.0.0.1:2", "big", "env")]


def test_the_job_is_that_of_the_newest_event_if_the_supervisor_does_not_say(folder: Path) -> None:
    for state in ("{}", "[]", "torn{"):
        (folder / "supervisor.json").write_text(state)
        assert reach(folder, None, None, None) == Reach(f"file:{folder}/lighthouse.address", "job", "of-the-run")
    EventLog(folder, "supervisor", job="old").write(ProcessStarted())
    EventLog(folder, "manager g0", job="new").write(ProcessStarted())
    assert reach(folder, None, None, None).job == "new"


def test_the_folder_of_a_run_that_nobody_supervises_names_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EventLog(tmp_path, "manager g0", job="hand").write(ProcessStarted())
    with pytest.raises(UsageError, match=f"no job token: {tmp_path} holds none; give --token-file FILE or set"):
        reach(tmp_path, None, None, None)
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "env")
    assert reach(tmp_path, None, None, None) == Reach(DEFAULT_LIGHTHOUSE, "hand", "env")


def test_a_folder_of_no_run_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (["status"], ["drain", "g1"], ["fence", "--group", "g1"]):
        assert run([*word, "--run-folder", str(tmp_path)]) == 2
        assert one_line(capsys).startswith(f"{tmp_path} is not the folder of a run: it holds no token, ")


def test_a_lighthouse_that_has_not_said_where_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lighthouse.address").unlink()
    assert run(["drain", "g1", "--run-folder", str(folder)]) == 2
    assert "lighthouse.address" in one_line(capsys)


def test_the_folder_is_given_once(
    folder: Path, calls: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", str(folder), "--run-folder", "elsewhere"]) == 2
    assert "the run's folder is given twice" in one_line(capsys)
    monkeypatch.setenv("LIGHTKEEPER_RUN_FOLDER", "elsewhere")
    run(["status", str(folder)])
    assert calls == [(AT, "big", "of-the-run")]
