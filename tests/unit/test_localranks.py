"""The local socket of a node's ranks, by hand."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from lightkeeper.manager import local
from lightkeeper.manager.localranks import LocalRanks
from lightkeeper.manager.ranksocket import RankSocket

BOUND_S = 20.0


class Listener:
    """A manager that takes every rank."""

    def rank_registered(self, hello: local.Register) -> local.Registered:
        return local.Registered(job="job", group="g1", incarnation="i1", pid=os.getpid())

    def ranks_say(self, said: Any) -> None:
        raise AssertionError(said)

    def rank_ended(self, rank: int, exit_code: int | None, view: Any) -> None:
        raise AssertionError(rank)

    def stranger(self, peer: str, what: str) -> None:
        raise AssertionError(peer)

    def say(self, line: str) -> None:
        raise AssertionError(line)


def test_a_rank_that_comes_as_the_manager_ends_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that went on to serve it would never end, nor would the rank."""
    heard = RankSocket.receive

    async def heard_at_the_end(socket: RankSocket) -> local.FromRank | None:
        message = await heard(socket)
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__qualname__", "") == "LocalRanks._accept":
                task.cancel()
        return message

    async def go() -> None:
        monkeypatch.setattr(RankSocket, "receive", heard_at_the_end)
        ranks = LocalRanks(tmp_path / "socket", "secret", range(1), Listener())
        await ranks.open()
        reader, writer = await asyncio.open_unix_connection(ranks.path)
        register = local.Register(
            token="secret", rank=0, pid=os.getpid(), transfer="h:1", progress=str(tmp_path / "progress")
        )
        writer.write(local.frame(register))
        await reader.read()  # to the end of what it is told
        writer.close()
        ranks.close()

    asyncio.run(asyncio.wait_for(go(), BOUND_S))
