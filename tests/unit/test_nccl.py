"""The NCCL group against a stand-in for torchft's: what it promises does not depend on the device."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torchft.process_group

from lightkeeper.manager import ncclenv
from lightkeeper.manager.groups import GroupFailed, LocalKeys, start_build
from lightkeeper.manager.nccl import NcclGroup


class FakeWork:
    def __init__(self) -> None:
        self.completed = threading.Event()
        self.error: Exception | None = None
        self.waited: list[timedelta] = []

    def is_completed(self) -> bool:
        return self.completed.is_set()

    def wait(self, timeout: timedelta) -> bool:
        self.waited.append(timeout)
        if self.error is not None:
            raise self.error
        return True


class FakeNccl:
    def __init__(self) -> None:
        self.work = FakeWork()
        self.aborts = threading.Event()
        self.shut = threading.Event()

    def allreduce(self, tensors, options) -> FakeWork:
        return self.work

    def abort(self) -> None:
        self.aborts.set()

    def shutdown(self) -> None:
        self.shut.set()


@pytest.fixture
def group():
    return NcclGroup(FakeNccl(), 0, 2, "epoch 1")


def test_wait_returns_when_the_work_is_done(group):
    reduction = group.all_reduce(torch.zeros(1))
    assert not reduction.done()
    threading.Timer(0.01, group._nccl.work.completed.set).start()
    reduction.wait(10.0)
    assert reduction.done() and group._nccl.work.waited


class FakeBackend:
    """torch's, as far as `FormNccl` needs it: what it read from the environment, and its time-out."""

    def __init__(self) -> None:
        self.read = {name: os.environ.get(name) for name in ncclenv.ACROSS_GROUPS}
        self.timeout = timedelta(minutes=10)

    def _get_backend(self, device: torch.device) -> FakeBackend:
        assert device.type == "cuda"
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


def test_an_epochs_group_never_ends_the_process(monkeypatch):
    """Neither by a peer's error, nor by a watchdog that stands, nor after torch's own ten minutes."""
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torchft.process_group.ProcessGroupNCCL, "__init__", lambda self, timeout: None)
    monkeypatch.setattr(
        torchft.process_group.ProcessGroupNCCL, "_create_pg", lambda *_: made.append(FakeBackend()) or made[0]
    )
    monkeypatch.setenv(ncclenv.HANDLING, "3")
    monkeypatch.delenv(ncclenv.MONITORING, raising=False)
    group = start_build("nccl", LocalKeys(), 0, 2, 5.0, "epoch 1").wait()
    assert group.size == 2 and set(made[0].read.values()) == {"0"}
    assert made[0].timeout > timedelta(days=1)
    assert os.environ[ncclenv.HANDLING] == "3" and ncclenv.MONITORING not in os.environ, "as before"


def test_work_that_torchft_has_wrapped_is_seen_to_be_done(group):
    """As it wraps all of it on a recent NCCL: its wrapper inherits an `is_completed` that knows nothing of the work."""
    nccl, inner = group._nccl, group._nccl.work
    wrapped = torchft.process_group._WorkAcceleratorTimeout(nccl, inner, timedelta(seconds=1))
    nccl.work = wrapped
    inner.completed.set()
    reduction = group.all_reduce(torch.zeros(1))
    assert reduction.done() and not wrapped.is_completed()
    reduction.wait(0.5)
    assert inner.waited


def test_wait_is_bounded(group):
    with pytest.raises(GroupFailed, match="unfinished after 0.0 s"):
        group.all_reduce(torch.zeros(1)).wait(0.01)


def test_abort_ends_a_wait_from_another_thread(group):
    nccl = group._nccl
    threading.Timer(0.01, group.abort, args=("peer froze",)).start()
    with pytest.raises(GroupFailed, match="peer froze") as failed:
        group.all_reduce(torch.zeros(1)).wait(10.0)
    assert failed.value.aborted == "peer froze" and not failed.value.local
    assert nccl.aborts.wait(10.0)
    with pytest.raises(GroupFailed, match="peer froze"):
        group.all_reduce(torch.zeros(1))
    group.close()
    assert not nccl.shut.is_set()


def test_a_backend_error_is_not_local_and_any_other_is(group):
    work = group._nccl.work
    work.completed.set()
    work.error = dist.DistBackendError("remote process exited")
    with pytest.raises(GroupFailed, match="remote process exited") as failed:
        group.all_reduce(torch.zeros(1)).wait(1.0)
    assert not failed.value.local
    work.error = RuntimeError("tensor on the wrong device")
    with pytest.raises(GroupFailed) as failed:
        group.all_reduce(torch.zeros(1)).wait(1.0)
    assert failed.value.local


def test_close_shuts_down_and_later_use_is_a_bug(group):
    nccl = group._nccl
    group.close()
    assert nccl.shut.wait(10.0)
    with pytest.raises(GroupFailed, match="closed") as failed:
        group.all_reduce(torch.zeros(1))
    assert failed.value.local


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_building_without_a_device_is_one_clear_line():
    with pytest.raises(GroupFailed, match="nccl needs a CUDA device") as failed:
        start_build("nccl", LocalKeys(), 0, 2, 1.0, "epoch 1").wait()
    assert failed.value.local
