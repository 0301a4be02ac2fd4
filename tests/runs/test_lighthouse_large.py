"""A large job over real gRPC: whom the lighthouse asks, whom it leaves out, and what it says of member lists."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from lightkeeper.bench._managers import WAIT_S_MAX, Fleet, batches
from lightkeeper.demo.job import LocalJob
from lightkeeper.events import read_run
from lightkeeper.events.schema import GroupLost
from lightkeeper.lighthouse.silence import OFTEN_MAX

SIZE = OFTEN_MAX + 32
BOUND_S = 200.0


def play(folder: Path, act: Callable[[Fleet, LocalJob], Awaitable[None]]) -> None:
    async def go() -> None:
        with LocalJob(folder, ()) as job:
            fleet = Fleet(job.start_lighthouse(), job.token, SIZE)
            async with fleet.alive():
                await fleet.join()
                await act(fleet, job)

    asyncio.run(asyncio.wait_for(go(), BOUND_S))


def test_the_silent_host_is_asked_and_left_out_and_the_slow_one_is_asked_and_stays(tmp_path: Path) -> None:
    async def act(fleet: Fleet, job: LocalJob) -> None:
        silent, slow = fleet.managers[5], fleet.managers[6]
        silent.mute = slow.slow = True
        slow.beat_s = WAIT_S_MAX  # it says nothing unasked: only its answers tell the lighthouse that it lives
        asked = slow.told["Ask"]
        fleet.stands_since = time.monotonic()
        others = [manager for manager in fleet.managers if manager is not silent]
        await fleet.until(lambda: all(manager.number > 1 for manager in others), "an epoch without the silent")
        assert slow.known is not None and set(slow.known.groups) == {manager.group for manager in others}
        assert slow.told["Ask"] > asked, "it answered, or it would have been left out too"

    play(tmp_path, act)
    (lost,) = [event for event in read_run(tmp_path).events if isinstance(event, GroupLost)]
    assert (lost.group, lost.detected_by) == ("g5", "lease")


def test_all_come_back_to_a_lighthouse_that_was_killed_and_a_list_is_not_said_again(tmp_path: Path) -> None:
    async def act(fleet: Fleet, job: LocalJob) -> None:
        first = fleet.down_bytes
        job.children["lighthouse"].kill()
        job.children["lighthouse"].wait()
        (tmp_path / "output" / "lighthouse.txt").unlink()
        fleet.address = job.start_lighthouse()
        for some in batches(fleet.managers):
            await asyncio.gather(*(manager.connect_again() for manager in some))
        before = fleet.up_bytes + fleet.down_bytes
        for manager in fleet.managers:
            manager.join()
        await fleet.until(lambda: all("Welcome" in manager.heard for manager in fleet.managers), "a welcome")
        assert fleet.up_bytes + fleet.down_bytes - before < first / 2
        assert all(manager.number == 1 and manager.told["Unknown"] == 0 for manager in fleet.managers)

    play(tmp_path, act)
    assert not [event for event in read_run(tmp_path).events if isinstance(event, GroupLost)]
