"""What the next supervisor of a run makes of what runs already, and of what has changed since."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from supervised_job import WITHIN_S, Job, Nodes

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.supervisor.clusters.interface import Heard
from lightkeeper.supervisor.single import Held


async def trains(job: Job) -> None:
    """Until both groups run; then this supervisor dies, and they go on."""
    await job.until_started(("n0", "g0"), ("n1", "g1"))
    raise KeyError("a bug")


def taken_up(folder: Path, **more: Any) -> Job:
    """The next supervisor of a job whose first has died."""
    with pytest.raises(KeyError):
        Job(folder).run(trains)
    return Job(folder, Nodes([("n0", "g0"), ("n1", "g1"), ("n2", "lighthouse")]), **more)


def test_an_operators_word_during_a_take_up_is_told_to_the_groups(tmp_path: Path) -> None:
    later = taken_up(tmp_path)
    opened = later.nodes.open

    async def slowly(heard: Heard) -> list[tuple[str, str]]:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        return await opened(heard)

    later.nodes.open = slowly  # type: ignore[method-assign]

    async def meanwhile(job: Job) -> None:
        await job.until(lambda: len(job.nodes.signals) == 2)
        for node, name in (("n0", "g0"), ("n1", "g1")):
            job.nodes.ends(node, name, 0)

    assert later.run(meanwhile) == 0
    assert {name for _, name, number in later.nodes.signals if number == signal.SIGUSR1} == {"g0", "g1"}
    assert sorted(later.judged()) == [("g0", "nobody", "left"), ("g1", "nobody", "left")]


@pytest.mark.parametrize(
    "changed", [{"checkpoints": "elsewhere"}, {"lighthouse": {"address": "127.0.0.1:1"}}, {"command": ["other.py"]}]
)
def test_what_groups_were_told_cannot_change_while_they_run(tmp_path: Path, changed: dict[str, Any]) -> None:
    (name,) = changed
    later = taken_up(tmp_path, **changed)
    with pytest.raises(UsageError, match=f"has changed while the job runs .*{name} was "):
        later.run(lambda job: asyncio.sleep(WITHIN_S))
    assert later.nodes.closed is False


def test_another_token_while_groups_run_is_told(tmp_path: Path) -> None:
    later = taken_up(tmp_path)
    (tmp_path / "token").write_text("another")
    with pytest.raises(ToldError, match="token is not the one that what runs was told"):
        later.run(lambda job: asyncio.sleep(WITHIN_S))
    assert later.nodes.closed is False


@pytest.mark.parametrize("before", [False, True])
def test_nodes_that_cannot_be_opened_are_told_and_end_nothing_that_runs(tmp_path: Path, before: bool) -> None:
    later = taken_up(tmp_path) if before else Job(tmp_path)

    async def fails(heard: Heard) -> list[tuple[str, str]]:
        assert (tmp_path / "logs").is_dir(), "a terminal that goes is told of there"
        raise FileExistsError(17, "File exists", "nodes/n2")

    later.nodes.open = fails  # type: ignore[method-assign]
    with pytest.raises(ToldError, match="nodes/n2: File exists"):
        later.run(lambda job: asyncio.sleep(WITHIN_S))
    assert later.nodes.closed is not before


def test_who_is_not_in_the_state_is_ended_with_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    later = taken_up(tmp_path)
    (tmp_path / "supervisor.json").unlink()

    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        job.finish()

    assert later.run(meanwhile) == 0
    assert "g0 on n0 is ended: " in capfd.readouterr().err


def test_a_lock_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(UsageError, match="cannot use .*: No space left on device"):
        Held(tmp_path).__enter__()


def test_a_token_that_is_no_text_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\x83\xff\x00")
    with pytest.raises(ToldError, match="token is no text"):
        Job(tmp_path).run(trains)
