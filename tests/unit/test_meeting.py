"""How the ranks of a node meet at a store that may hold what ranks before them left."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lightkeeper.manager import meeting


@pytest.fixture
def there(tmp_path: Path) -> Path:
    path = tmp_path / "manager.sock"
    path.touch()
    return path


def met(store: dist.Store, path: Path, ranks: range) -> list[Path]:
    """What each rank but the first is told, in a thread each."""
    with ThreadPoolExecutor(len(ranks) + 1) as threads:
        telling: Future[None] = threads.submit(meeting.tell, store, path, ranks, 20.0)
        asking = [threads.submit(meeting.ask, store, rank, ranks.start - 1, 20.0) for rank in ranks]
        telling.result()
        return [one.result() for one in asking]


def test_every_rank_of_a_node_is_told(there: Path) -> None:
    assert met(dist.HashStore(), there, range(5, 8)) == [there] * 3


def test_ranks_that_are_started_again_are_told_anew(there: Path) -> None:
    """The store still holds all that the ranks before them said."""
    store = dist.HashStore()
    assert met(store, there, range(1, 3)) == [there] * 2
    again = there.with_name("again.sock")
    again.touch()
    assert met(store, again, range(1, 3)) == [again] * 2


def test_the_first_rank_waits_for_those_that_live_though_dead_ones_had_asked(there: Path) -> None:
    """Rank 1 of before asked and was killed before it was answered."""
    store = dist.HashStore()
    store.set("lightkeeper/asks/1", "a name of before")
    telling = threading.Thread(target=meeting.tell, args=(store, there, range(1, 2), 20.0))
    telling.start()
    store.wait(["lightkeeper/answer/a name of before"])
    assert telling.is_alive(), "nobody has thanked"
    assert meeting.ask(store, 1, 0, 20.0) == there
    telling.join(20)
    assert not telling.is_alive()


def test_who_is_missing_is_named(there: Path) -> None:
    with pytest.raises(meeting.NotMet, match="^ranks 1, 2 made no lightkeeper.Manager within 0 s"):
        meeting.tell(dist.HashStore(), there, range(1, 3), 0.0)
    with pytest.raises(meeting.NotMet, match="^rank 0 made no lightkeeper.Manager within 0 s, as rank 1 did"):
        meeting.ask(dist.HashStore(), 1, 0, 0.0)


def test_a_socket_of_another_machine_is_told_in_one_line(there: Path) -> None:
    with pytest.raises(meeting.NotMet, match="LOCAL_WORLD_SIZE must say so"):
        met(dist.HashStore(), there.with_name("not here"), range(1, 2))


def test_a_store_that_is_gone_is_told_in_one_line(there: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(meeting.NotMet, match="^the store of torch's process group is gone"):
        meeting.ask(client, 1, 0, 20.0)
