"""An epoch's group over NCCL: torchft's reconfigurable group behind the same interface as gloo's.

Written against the documented behaviour of torchft and torch; see docs/status.md for where it has run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft.process_group
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from lightkeeper.manager.groups import EpochGroup, GroupFailed, KeyValue
from lightkeeper.manager.ncclenv import across_groups
from lightkeeper.manager.store import RendezvousStore

_POLL_FIRST_S, _POLL_MAX_S = 20e-6, 1e-3
_NEVER = timedelta(days=30)  # torch's own time-out per operation: ours are given to `wait`, `abort` ends the rest


class NcclGroup:
    """See `groups.EpochGroup`; tensors lie on this rank's CUDA device."""

    def __init__(self, nccl: Any, slot: int, size: int, name: str) -> None:
        self.slot = slot
        self.size = size
        self.name = name
        self._nccl: Any | None = nccl
        self._lock = threading.Lock()
        self._aborted: str | None = None

    def all_reduce(self, tensor: torch.Tensor) -> _NcclReduction:
        """See `groups.EpochGroup`; ordered after what the current stream does now."""
        return self._start(lambda nccl: nccl.allreduce([tensor], AllreduceOptions()), "all-reduce")

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """See `groups.EpochGroup`."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        options = AllgatherOptions()
        self._start(lambda nccl: nccl.allgather([parts], [tensor], options), "all-gather").wait(timeout_s)
        return parts

    def _start(self, call: Callable[[Any], dist.Work], what: str) -> _NcclReduction:
        nccl = self._nccl
        if self._aborted is not None or nccl is None:
            raise self.failure(what, None)
        try:
            work = call(nccl)
            work = getattr(work, "_work", work)  # torchft's wrapper never says that it is completed
            return _NcclReduction(self, work, what)
        except RuntimeError as e:
            raise self.failure(what, e) from e

    def abort(self, reason: str) -> None:
        """See `groups.EpochGroup`; NCCL ends its kernels on `ncclCommAbort`."""
        with self._lock:
            nccl = self._nccl
            if self._aborted is not None or nccl is None:
                return
            self._aborted = reason
        # Aborting a communicator may wait for its watchdog, so the caller does not.
        threading.Thread(target=nccl.abort, name=f"abort {self.name}", daemon=True).start()

    def close(self) -> None:
        """See `groups.EpochGroup`."""
        with self._lock:
            nccl, self._nccl = self._nccl, None
        if nccl is not None and self._aborted is None:
            threading.Thread(target=nccl.shutdown, name=f"close {self.name}", daemon=True).start()

    @property
    def aborted(self) -> str | None:
        """The reason given to `abort`, or None."""
        return self._aborted

    def failure(self, what: str, cause: Exception | None) -> GroupFailed:
        """What to raise for `cause`; None if the group was aborted or closed before."""
        if self._aborted is not None:
            return GroupFailed(f"{what} of {self.name} aborted: {self._aborted}", aborted=self._aborted)
        if cause is None:
            return GroupFailed(f"{what} on {self.name}, which is closed", local=True)
        text = str(cause).partition("\n")[0]
        local = not isinstance(cause, dist.DistBackendError)
        return GroupFailed(f"{what} of {self.name} failed: {text}", local=local)


class _NcclReduction:
    def __init__(self, group: NcclGroup, work: dist.Work, what: str) -> None:
        self._group = group
        self._work = work
        self._what = what

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        pause_s = _POLL_FIRST_S
        while not self.done():
            if self._group.aborted is not None:
                raise self._group.failure(self._what, None)
            if time.monotonic() >= until:
                raise GroupFailed(f"{self._what} of {self._group.name} unfinished after {timeout_s:.1f} s", waited=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        if self._group.aborted is not None:
            raise self._group.failure(self._what, None)
        try:
            self._work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
        except RuntimeError as e:
            raise self._group.failure(self._what, e) from e


class FormNccl:
    """Forms an NCCL group; see `groups.Forming`."""

    def __init__(self, keys: KeyValue, slot: int, size: int, timeout_s: float, name: str) -> None:
        self._keys, self._slot, self._size = keys, slot, size
        self._timeout_s, self._name = timeout_s, name
        self._interrupted: str | None = None
        self._nccl: Any | None = None

    def form(self) -> EpochGroup:
        """Rendezvous and connect eagerly to every member."""
        if not torch.cuda.is_available():
            raise GroupFailed(f"building {self._name} failed: backend nccl needs a CUDA device", local=True)
        nccl = torchft.process_group.ProcessGroupNCCL(timedelta(seconds=self._timeout_s))
        self._nccl = nccl
        store = RendezvousStore(self._keys, self._timeout_s)
        try:
            with across_groups():
                nccl._pg = nccl._create_pg(store, self._slot, self._size)
            nccl._pg._get_backend(torch.device("cuda"))._set_default_timeout(_NEVER)
        except (RuntimeError, TimeoutError) as e:
            raise self._failure(e) from e
        return NcclGroup(nccl, self._slot, self._size, self._name)

    def interrupt(self, reason: str) -> None:
        """Wake a wait for a key; a communicator that is being made ends by torch's non-blocking time-out."""
        self._interrupted = self._interrupted or reason
        self._keys.abort(reason)
        nccl = self._nccl
        if nccl is not None and nccl._pg is not None:
            nccl.abort()

    def _failure(self, cause: Exception) -> GroupFailed:
        if self._interrupted is not None:
            return GroupFailed(f"building {self._name} aborted: {self._interrupted}", aborted=self._interrupted)
        if isinstance(cause, GroupFailed):
            return cause
        local = not isinstance(cause, TimeoutError | dist.DistBackendError)
        return GroupFailed(
            f"building {self._name} failed: {str(cause).partition(chr(10))[0]}", local=local, waited=not local
        )
