"""The link between a supervisor and the host of a node on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

import lightkeeper.supervisor.clusters.local
from lightkeeper.supervisor.clusters.interface import CannotStart, Happening, NodeCame, NodeLost
from lightkeeper.supervisor.clusters.local import Local


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host stood still for longer than is borne, and goes on: it is killed, and the node's next host is asked."""

    async def run() -> None:
        heard: list[Happening] = []
        cluster = Local(tmp_path / "nodes", ["n0"], orphan_s=5.0)
        await cluster.open(heard.append)
        first = cluster.pid_of("n0")
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr(lightkeeper.supervisor.clusters.local, "HOST_S_MAX", 0.3)
        with pytest.raises(CannotStart, match="does not answer"):
            await cluster.start("n0", "g0", [sys.executable, "-c", ""], {}, tmp_path / "g0.log")
        monkeypatch.setattr(lightkeeper.supervisor.clusters.local, "HOST_S_MAX", 60.0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGCONT)
        try:
            async with asyncio.timeout(60.0):
                while NodeCame("n0") not in heard:
                    await asyncio.sleep(0.02)
            assert heard[0] == NodeLost("n0", "its host ended") and cluster.pid_of("n0") != first
            await cluster.start("n0", "g0", [sys.executable, "-c", ""], {}, tmp_path / "g0.log")
        finally:
            await cluster.close(end=True)

    asyncio.run(run())
