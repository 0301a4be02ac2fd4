"""Helpers for tests of the trainer's side: groups within one process, and members in processes of their own.

Importing torch takes seconds, so processes come from a fork server that has imported it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightkeeper.manager.groups import EpochGroup, GroupFailed, LocalKeys, start_build

T = TypeVar("T")


class FolderKeys:
    """Rendezvous keys as files of a folder, for members in several processes; see `groups.KeyValue`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._aborted: str | None = None

    def set(self, key: str, value: bytes) -> None:
        path = self._folder / key.replace("/", "_")
        path.with_suffix(".new").write_bytes(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        path = self._folder / key.replace("/", "_")
        until = time.monotonic() + timeout_s
        while not path.exists():
            if self._aborted is not None:
                raise GroupFailed("aborted", aborted=self._aborted)
            if time.monotonic() > until:
                raise TimeoutError(key)
            time.sleep(0.001)
        return path.read_bytes()

    def abort(self, reason: str) -> None:
        self._aborted = reason


@contextlib.contextmanager
def local_groups(size: int) -> Iterator[list[EpochGroup]]:
    """A gloo group whose members are all in this process, for threads."""
    keys = LocalKeys()
    builds = [start_build("gloo", keys.handle(), i, size, 60.0, f"test slot {i}") for i in range(size)]
    groups = [build.wait() for build in builds]
    try:
        yield groups
    finally:
        for group in groups:
            group.abort("test is over")
            group.close()


def in_threads(*calls: Callable[[], T]) -> list[T]:
    """Run all calls at the same time; their results, or the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a member hangs"
    return results


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether `holds()` becomes true in time."""
    until = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def start_member(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Run `target(pipe, *args)` in a process; the process and this end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightkeeper.manager.gloo", "lightkeeper.manager.reducer"])
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    return process, here


def reduce_on_command(pipe: Connection, folder: Path, slot: int, size: int, numel: int) -> None:
    """A member: builds, says so, and for every command "go" reduces once and reports how that ended."""
    torch.set_num_threads(1)
    group = start_build("gloo", FolderKeys(folder), slot, size, 60.0, "test").wait()
    pipe.send(("built", os.getpid()))
    watch, aborted = threading.Event(), threading.Event()

    def abort_on_command() -> None:
        watch.wait()
        group.abort("test says so")
        aborted.set()

    threading.Thread(target=abort_on_command, daemon=True).start()
    tensor = torch.full((numel,), float(slot + 1))
    while (command := pipe.recv()) != "end":
        if command == "abort first":
            watch.set()
            assert aborted.wait(60.0)
            pipe.send(("aborted", 0))
            continue
        started = time.monotonic()
        try:
            reduction = group.all_reduce(tensor)
            if command == "go and abort":
                pipe.send(("waiting", 0))
                assert pipe.poll(60.0) and pipe.recv() == "abort"
                watch.set()
                started = time.monotonic()
            else:
                pipe.send(("waiting", 0))
            if command == "go and look later":
                assert pipe.poll(60.0) and pipe.recv() == "look"
            reduction.wait(60.0)
            pipe.send(("reduced", float(tensor[0])))
        except GroupFailed as e:
            seconds = time.monotonic() - started
            pipe.send(("failed", (str(e), e.local, e.suspects, e.aborted, seconds)))
    group.close()


def save_sharded(pipe: Connection, folder: Path, rank: int, size: int) -> None:
    """Saves, with the other ranks of one group, a tensor that is spread over them unevenly, and one that all hold."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        spread: DTensor = distribute_tensor(torch.arange(21.0).reshape(7, 3), mesh, [Shard(0)])
        dcp.save({"spread": spread, "alike": torch.ones(2)}, checkpoint_id=folder / "step-00000001")
        pipe.send("saved")
    finally:
        dist.destroy_process_group()
