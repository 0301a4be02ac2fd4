"""A supervised job whose lighthouse does not come up: who is told, and what goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervised_job import Job, Nodes

from lightkeeper.errors import ToldError


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.PAUSE_S", 0.01)
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.PAUSE_S_MAX", 0.02)


def refuses(node: str, name: str) -> str:
    return "no port" if name == "lighthouse" else ""


def test_one_that_never_comes_up_ends_the_run_and_somebody_is_told(tmp_path: Path) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until(lambda: job.nodes.closed is not None)

    nodes = Nodes()
    nodes.refuses = refuses
    job = Job(tmp_path, nodes)
    with pytest.raises(ToldError, match="the lighthouse does not come up"):
        job.run(meanwhile)
    ((what, summary),) = job.told
    assert (what, summary) == ("failed", "the lighthouse does not come up: no port")


def test_one_that_stays_away_for_long_is_told_of_once_and_is_back_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.service.MISSING_LONG_S", 0.1)
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.MISSING_LONG_S", 0.1)
    tried = []

    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        job.nodes.refuses = lambda node, name: tried.append(node) or refuses(node, name)  # type: ignore[func-returns-value]
        job.nodes.ends("n2", "lighthouse", 1)
        await job.until(lambda: bool(job.told))
        more = len(tried) + 5
        await job.until(lambda: len(tried) >= more)
        job.nodes.refuses = lambda node, name: ""
        await job.until(lambda: job.nodes.starts.count(("n2", "lighthouse")) == 2)
        job.finish()

    job = Job(tmp_path)
    assert job.run(meanwhile) == 0
    assert [what for what, _ in job.told] == ["no_lighthouse", "finished"]
    assert "there has been none for 0.1 s: no port" in job.told[0][1]
    assert {("n0", "g0"), ("n1", "g1")} <= set(job.nodes.starts) and job.nodes.starts.count(("n0", "g0")) == 1
