"""`ShareLoader` with real workers: same batches whoever makes them, failures told, no control sockets, no orphans."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from lightkeeper.data import DealtSampler, ShareLoader
from lightkeeper.data.share import DataStalled, SampleError, WorkerLost
from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.within import Place

WAIT_S = 20.0


class Noisy:
    """Samples that carry their index, three random numbers, and who made them."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), random.random(), float(np.random.rand())


class Odd:
    """Misbehaves at some samples."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("sample five is rotten")
        if index == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 7 and self.folder is not None:
            (self.folder / str(os.getpid())).touch()
            with (self.folder / "gate").open():  # until somebody opens its other end
                pass
        return index


class InOrder:
    """Sample i stands at place i: microbatch k of step s has the `size` numbers from (s * m + k) * size on."""

    def __init__(self, size: int, m: int) -> None:
        self.size, self.m = size, m

    def __call__(self, step: int, k: int) -> list[int]:
        start = (step * self.m + k) * self.size
        return list(range(start, start + self.size))


class Planned:
    """Stands for a manager: what it says is set by the test."""

    def __init__(self, shares: dict[int, tuple[int, ...]]) -> None:
        self.shares, self.seed, self.place = shares, 3, Place(0, 1)
        self.fear: tuple[int, ...] = ()
        self.settings = Settings(outage_budget_s=2.0)
        self.watchers: list[Any] = []
        self.microbatches = 3

    def total(self, step: int) -> int:
        return self.microbatches

    def watch(self, watcher: Any) -> None:
        self.watchers.append(watcher)

    def expected_share(self, step: int) -> tuple[int, ...]:
        return self.shares.get(step, ())

    def feared_share(self) -> tuple[int, ...]:
        return self.fear


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def ready(loader: ShareLoader) -> list[tuple[int, int]]:
    with loader._changed:
        return sorted(loader._ahead.ready)


# ---------------------------------------------------------------- the same batches


def test_a_batch_is_the_same_whoever_makes_it_and_whoever_splits_it() -> None:
    sampler = DealtSampler(100, 4, 3, seed=9)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    keys = [(step, k) for step in range(3) for k in range(3)]
    with ShareLoader(Noisy(), sampler, workers=0) as here, ShareLoader(Noisy(), sampler, prefetch=4) as there:
        wanted = {key: here.batch(*key) for key in keys}
        found = {key: there.batch(*key) for key in reversed(keys)}  # nothing is foreseen well
        halves = [ShareLoader(Noisy(), sampler, workers=0, part=(i, 2)) for i in range(2)]
        split = {key: [half.batch(*key) for half in halves] for key in keys}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.random.get_state()[1].tolist() == before[2]
    for key in keys:
        assert wanted[key][0].tolist() == sampler(*key).tolist()
        for part in range(4):
            assert torch.equal(wanted[key][part], found[key][part])
            assert torch.equal(wanted[key][part], torch.cat([half[part] for half in split[key]]))
    drawn = torch.cat([wanted[key][1] for key in keys])
    assert len(set(drawn.tolist())) == 36, "each sample draws its own"


def test_it_resumes_from_a_step_number_alone() -> None:
    """Scenario 48: restarted at step 9 with no loader state, sample 9 B is next."""
    with ShareLoader(Odd(), InOrder(2, 3), Planned({9: (0, 1, 2)}), workers=1) as loader:
        loader.begins(9)
        assert loader.batch(9, 0).tolist() == [9 * 6, 9 * 6 + 1]


def test_a_data_set_that_gives_samples_at_once_is_asked_so() -> None:
    class AtOnce:
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [1000 + index for index in indices]

    with ShareLoader(AtOnce(), InOrder(2, 3), Planned({}), workers=1) as loader:
        assert loader.batch(0, 1).tolist() == [1002, 1003]


@pytest.mark.long  # each imports torch
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_may_be_started_without_a_fork(context: str) -> None:
    sampler = DealtSampler(100, 4, 3, seed=9)
    with (
        ShareLoader(Noisy(), sampler, workers=1, context=context) as loader,
        ShareLoader(Noisy(), sampler, workers=0) as here,
    ):
        assert torch.equal(loader.batch(2, 1)[1], here.batch(2, 1)[1])


# ---------------------------------------------------------------- reading ahead


def test_own_shares_are_read_ahead_within_the_bound_and_replanned() -> None:
    manager = Planned({5: (0, 1), 6: (0, 1), 7: (0, 1)})
    with ShareLoader(Odd(), InOrder(1, 100), manager, workers=2, prefetch=4) as loader:
        assert manager.watchers == [loader]
        loader.begins(5)
        until(lambda: ready(loader) == [(5, 0), (5, 1), (6, 0), (6, 1)], "two steps are read ahead")
        assert loader.batch(5, 0).tolist() == [500]
        until(lambda: ready(loader) == [(5, 1), (6, 0), (6, 1), (7, 0)], "one more, in the place of what was taken")
        manager.shares = {5: (0, 1), 6: (0, 1, 2), 7: (0, 1, 2)}  # a member less
        loader.batch(5, 1)
        until(lambda: ready(loader) == [(6, 0), (6, 1), (6, 2), (7, 0)], "the new share")
        assert loader.batch(6, 9).tolist() == [609], "nobody foresaw it: made all the same"


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_kept_before_the_step_is_not_made_anew(workers: int, tmp_path: Path) -> None:
    class Told(Odd):
        def __getitem__(self, index: int) -> Any:
            with (tmp_path / "made").open("a") as file:
                file.write(f"{index}\n")
            return index

    manager = Planned({5: (0, 1), 6: (0,)})
    with ShareLoader(Told(), InOrder(1, 100), manager, workers=workers, prefetch=2) as loader:
        assert [loader.batch(5, k, keep=True).tolist() for k in (0, 1, 1)] == [[500], [501], [501]]
        loader.begins(5)
        assert [loader.batch(5, k).tolist() for k in (0, 1)] == [[500], [501]]
        if workers:
            until(lambda: (6, 0) in ready(loader), "the next step's is made, and none of this one's again")
        assert loader.batch(6, 0, keep=True).tolist() == [600]
        loader.begins(6)
        loader.begins(7)  # it is of a step that is over
        assert (tmp_path / "made").read_text().split() == ["500", "501", "600"]
        assert loader.batch(6, 0).tolist() == [600]
        assert (tmp_path / "made").read_text().split() == ["500", "501", "600", "600"]


def test_what_was_asked_for_before_the_step_is_made_anew_ahead_of_the_loop() -> None:
    """A token count that the loss is divided by is reduced when the step starts, and needs the batches."""
    manager = Planned({5: (0, 1)})
    with ShareLoader(Odd(), InOrder(1, 100), manager, workers=1, prefetch=2) as loader:
        assert [loader.batch(5, k).tolist() for k in (0, 1)] == [[500], [501]]
        loader.begins(5)
        until(lambda: ready(loader) == [(5, 0), (5, 1)], "both again")


def test_when_a_peer_is_suspected_its_share_is_made_before_what_is_wanted_later() -> None:
    manager = Planned({5: (0, 1), 6: (0, 1)})
    with ShareLoader(Odd(), InOrder(1, 100), manager, workers=2, prefetch=4) as loader:
        loader.begins(5)
        loader.batch(5, 0), loader.batch(5, 1)
        until(lambda: ready(loader) == [(6, 0), (6, 1)], "the next step is there")
        manager.shares[7] = manager.fear = (40, 41, 42)
        loader.feared()
        until(lambda: ready(loader) == [(5, 40), (5, 41), (5, 42), (6, 0)], "what may fall to us")
        manager.shares[5], manager.fear = (40, 42), ()
        loader.dealt()
        assert [loader.batch(5, k).tolist() for k in (40, 42)] == [[540], [542]]
        loader.begins(6)
        until(lambda: ready(loader) == [(6, 0), (6, 1), (7, 40), (7, 41)], "what did not fall to us is dropped")


# ---------------------------------------------------------------- failures


def test_an_exception_is_told_with_the_sample_and_its_traceback_where_it_is_asked_for() -> None:
    for workers in (0, 1):
        with ShareLoader(Odd(), InOrder(2, 3), Planned({0: (1, 2)}), workers=workers) as loader:
            loader.begins(0)
            assert loader.batch(0, 1).tolist() == [2, 3], "what failed was read ahead and not asked for"
            with pytest.raises(SampleError, match="sample 5 of the data set failed, for microbatch 2 of step 0") as e:
                loader.batch(0, 2)
            assert e.value.index == 5 and e.value.kind == "ValueError" and "in __getitem__" in str(e.value)
            assert "sample five is rotten" in str(e.value)
            assert loader.batch(0, 1).tolist() == [2, 3], "the worker lives"


def test_a_batch_that_cannot_be_made_or_sent_is_told() -> None:
    def collate(samples: list[int]) -> Any:
        return lambda: samples  # cannot be pickled

    def bad_init(number: int) -> None:
        raise OSError(f"worker {number} finds no storage")

    def bad_sampler(step: int, k: int) -> list[int]:
        raise LookupError("no such microbatch")

    with (
        ShareLoader(Odd(), InOrder(2, 3), Planned({}), collate=collate, workers=1) as loader,
        pytest.raises(SampleError, match="a batch failed.*pickle"),
    ):
        loader.batch(0, 0)
    with (
        ShareLoader(Odd(), InOrder(2, 3), Planned({}), worker_init=bad_init, workers=1) as loader,
        pytest.raises(SampleError, match="worker 0 finds no storage"),
    ):
        loader.batch(0, 0)
    with (
        ShareLoader(Odd(), bad_sampler, Planned({}), workers=1) as loader,
        pytest.raises(LookupError, match="no such microbatch"),
    ):
        loader.batch(0, 0)


def test_a_killed_worker_is_told_in_one_line_and_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    with ShareLoader(Odd(), InOrder(1, 100), Planned({}), workers=2) as loader:
        loader.batch(0, 0)
        assert loader.workers is not None
        killed = loader.workers.pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(loader._dead) == 2, "both deaths are seen")
        assert loader.batch(0, 1).tolist() == [1] and loader.batch(0, 2).tolist() == [2]
        assert not set(killed) & set(loader.workers.pids)
    lines = [line for line in capfd.readouterr().err.splitlines() if "data worker" in line]
    assert sorted(lines) == [
        f"lightkeeper: data worker {i} (pid {killed[i]}) was killed by SIGKILL while it had nothing to do; another one "
        "takes its place" for i in range(2)
    ]  # fmt: skip


def test_a_sample_that_kills_every_worker_ends_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        ShareLoader(Odd(), InOrder(2, 3), Planned({}), workers=2) as loader,
        pytest.raises(WorkerLost, match=r"SIGKILL while it made microbatch 0 of step 1 \(samples 6, 7\); that is 3"),
    ):
        loader.batch(1, 0)
    assert capfd.readouterr().err.count("another one takes its place") == 2


def test_a_batch_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with ShareLoader(Odd(tmp_path), InOrder(1, 100), Planned({}), workers=1, timeout_s=0.3) as loader:
        assert loader.workers is not None
        pids = loader.workers.pids
        with pytest.raises(DataStalled, match=r"\(samples 7\), made by data worker 0 did not come within 0.3 s"):
            loader.batch(0, 7)
    assert gone(pids), "a worker that does not end by itself is killed"
    with pytest.raises(UsageError, match="closed"):
        loader.batch(0, 0)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"workers": -1}, "workers -1"),
        ({"prefetch": 0}, "prefetch 0"),
        ({"workers": 3, "prefetch": 2}, r"at least 1 and the number of workers \(3\)"),
        ({"context": "thread"}, "one of fork, forkserver, spawn"),
        ({"part": (2, 2)}, "part"),
        ({"sampler": DealtSampler(9, 4, 1, world_size=2), "part": (0, 2)}, "splits each microbatch by 2 already"),
        ({"sampler": InOrder(1, 1), "manager": None}, "without a manager"),
        ({"sampler": [0, 1, 2]}, "a list cannot be asked for"),
        ({"dataset": iter([1, 2])}, "a list_iterator has no __getitem__: StreamLoader"),
        ({"dataset": [1, 2], "sampler": DealtSampler(3, 1, 1)}, "deals 3 samples, the data set has 2"),
    ],
)
def test_bad_arguments_are_told(over: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ShareLoader(**{"dataset": Odd(), "sampler": InOrder(2, 3), "manager": Planned({}), **over})


def test_page_locked_memory_needs_an_accelerator() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match="needs an accelerator"):
        ShareLoader(Odd(), InOrder(2, 3), Planned({}), pin_memory=True)


def test_a_rank_reads_the_part_at_its_place() -> None:
    manager = Planned({})
    manager.place = Place(1, 2)
    with ShareLoader(Odd(), InOrder(4, 3), manager, workers=0) as loader:
        assert loader.batch(1, 0).tolist() == [14, 15]
    sampler = DealtSampler(100, 4, 3, seed=9)
    with ShareLoader(Noisy(), sampler, manager, workers=0) as loader:
        assert loader.batch(1, 0)[0].tolist() == sampler(1, 0).reshape(2, -1)[1].tolist(), "as docs/data.md says"
    with ShareLoader(Noisy(), DealtSampler(100, 4, 3, rank=1, world_size=2), manager, workers=0) as loader:
        assert len(loader.batch(1, 0)[0]) == 2, "the sampler splits already"


def test_an_uneven_split_is_told() -> None:
    with (
        ShareLoader(Odd(), InOrder(3, 3), Planned({}), workers=0, part=(0, 2)) as loader,
        pytest.raises(UsageError, match="2 ranks cannot split a microbatch of 3"),
    ):
        loader.batch(0, 0)


@pytest.mark.parametrize("deals", [6, lambda step: 3 + step // 2])
def test_a_sampler_of_other_microbatches_than_the_loop_is_told(deals: Any) -> None:
    """Else a third of each pass would be read by nobody."""
    at = 0 if deals == 6 else 2
    with ShareLoader(Noisy(), DealtSampler(100, 4, deals), Planned({at - 1: (0,)}), workers=0) as loader:
        for step in range(at):
            loader.begins(step)
        told = f"step {at} has 3 microbatches, and the loader's sampler deals {6 if at == 0 else 4}: .*samples are left"
        with pytest.raises(UsageError, match=told):
            loader.begins(at)
    step = type("Step", (), {"index": at, "total": 3, "microbatches": lambda self: iter(())})()
    with (
        ShareLoader(Noisy(), DealtSampler(100, 4, deals), workers=0) as alone,
        pytest.raises(UsageError, match=told),
    ):
        list(alone.over(step))


# ---------------------------------------------------------------- what a worker is tied to


def sockets_of(pid: int | str) -> list[str]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            links.append(os.readlink(path))
    return [link for link in links if "socket" in link]


class Telltale:
    """Tells about the worker: its sockets' inodes, its number, and whether number `held` is a socket."""

    def __init__(self, held: int) -> None:
        self.held = held

    def __getitem__(self, index: int) -> tuple[int, list[str], bool, int]:
        info = torch.utils.data.get_worker_info()
        held = os.readlink(f"/proc/self/fd/{self.held}")
        return os.getpid(), sockets_of("self"), held == "/dev/null", info.id


def test_workers_keep_no_socket_ignore_signals_and_end_with_their_trainer() -> None:
    """In a process of its own, which is killed."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            pair = socket.socketpair()
            loader = ShareLoader(Telltale(pair[0].fileno()), InOrder(1, 100), Planned({}), collate=list, workers=2)
            told = [loader.batch(0, k)[0] for k in range(4)]
            os.write(there, (repr((told, loader.workers.pids if loader.workers else [])) + "\n").encode())
            signal.pause()
        os._exit(1)
    os.close(there)
    try:
        with os.fdopen(here) as answers:
            told, pids = eval(answers.readline())
        assert {pid for pid, _, _, _ in told} <= set(pids) and {number for _, _, _, number in told} <= {0, 1}
        assert all(held and not sockets for _, sockets, held, _ in told), told
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
            masks = Path(f"/proc/{pid}/status").read_text()
            ignored = int(masks.split("SigIgn:")[1].split()[0], 16)
            assert ignored >> (signal.SIGTERM - 1) & 1 and ignored >> (signal.SIGINT - 1) & 1
        assert not gone(pids[:1]) and not gone(pids[1:])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    until(lambda: gone(pids), "the workers end with their trainer")
