"""An epoch's process group, as the rest of the trainer sees it.

A group is built once, for one epoch, from rendezvous keys; it is aborted from any thread; and it is never
used again after a failure. This module names that contract and the build's thread; `gloo.py` and `nccl.py`
fulfil it. Nothing here imports torch, so the manager process may import it too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class GroupFailed(RuntimeError):
    """An epoch's group cannot be formed, or cannot finish this reduce.

    Attributes:
        local: True if the cause was raised in this process and is not a broken connection: a bug here, not a
            peer's death.
        suspects: Slots whose connection to this one broke and that are gone, else the one whose broke first.
        aborted: The reason given to `abort()`, or None if nobody aborted.
        waited: True if nothing broke here: the others did not come in time, or what failed did so in another rank.
    """

    def __init__(
        self,
        message: str,
        *,
        local: bool = False,
        suspects: tuple[int, ...] = (),
        aborted: str | None = None,
        waited: bool = False,
    ) -> None:
        super().__init__(message)
        self.waited = waited
        self.local = local
        self.suspects = suspects
        self.aborted = aborted


class Reduction(Protocol):
    """A pending all-reduce."""

    def done(self) -> bool:
        """Whether it has ended, well or not; never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended well.

        Raises:
            GroupFailed: it failed, was aborted, or did not end within `timeout_s` seconds.
        """


class EpochGroup(Protocol):
    """The members of one epoch, rank by rank: this rank and the same rank index of the other groups."""

    @property
    def slot(self) -> int:
        """This member's index in the epoch's member list."""

    @property
    def size(self) -> int:
        """Number of members."""

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """Start summing `tensor` (contiguous, any shape) over all members, in place.

        Every member gives the same shapes and dtypes in the same order, and every member gets the same bits.

        Raises:
            GroupFailed: the group was aborted or has failed before.
        """

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """Every member's `tensor` (same shape and dtype everywhere), in slot order; blocks.

        Raises:
            GroupFailed: as for `Reduction.wait`.
        """

    def abort(self, reason: str) -> None:
        """End the group now, from any thread: pending operations raise within milliseconds, later ones at
        once.
        """

    def close(self) -> None:
        """Release sockets and threads after an orderly end; nothing may be pending. Never blocks for a peer."""


class KeyValue(Protocol):
    """Rendezvous keys of one epoch and one rank index; they travel through the managers and die with no
    trainer.
    """

    def set(self, key: str, value: bytes) -> None:
        """Publish `value` (at most a few KiB) under `key`, once."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of `key`, waiting up to `timeout_s` seconds for it.

        Raises:
            TimeoutError: nobody set it in time.
            GroupFailed: aborted.
        """

    def abort(self, reason: str) -> None:
        """Make pending and later `get` calls of this handle raise `GroupFailed`."""


class Forming(Protocol):
    """One backend's way to form a group; `form` runs in the build's thread."""

    def form(self) -> EpochGroup:
        """Form the group, blocking until all members have connected.

        Raises:
            GroupFailed: it cannot be formed.
        """

    def interrupt(self, reason: str) -> None:
        """Make a running `form` raise soon; from any thread, also before it starts."""


class Build:
    """A group under construction, in a thread of its own, because a missing peer blocks the constructor."""

    def __init__(self, forming: Forming, name: str) -> None:
        self._forming = forming
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._group: EpochGroup | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=f"build {name}", daemon=True).start()

    def _run(self) -> None:
        group: EpochGroup | None = None
        error: BaseException | None = None
        try:
            group = self._forming.form()
        except BaseException as e:  # handed to whoever waits, unchanged
            error = e
        with self._lock:
            if not self._ended.is_set():
                self._group, self._error = group, error
                self._ended.set()
                return
        if group is not None:  # aborted while it was forming
            group.abort("aborted while it was being formed")
            group.close()

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._ended.is_set()

    def wait(self) -> EpochGroup:
        """The group; blocks until it is formed, has failed, or was aborted.

        Raises:
            GroupFailed: it could not be formed, or was aborted.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._group is not None
        return self._group

    def abort(self, reason: str) -> None:
        """Give the build up: `wait` raises at once, and a group already formed is aborted."""
        with self._lock:
            if not self._ended.is_set():
                self._error = GroupFailed(f"building group {self._name} aborted: {reason}", aborted=reason)
                self._ended.set()
            group = self._group
        if group is not None:
            group.abort(reason)
        else:
            self._forming.interrupt(reason)


class Ended:
    """A reduction that was over before it began, such as that of a group of one."""

    def done(self) -> bool:
        """See `Reduction`."""
        return True

    def wait(self, timeout_s: float) -> None:
        """See `Reduction`."""
        del timeout_s


class Alone:
    """The group of a single member: every sum is its own part."""

    slot = 0
    size = 1

    def __init__(self) -> None:
        self._aborted: str | None = None

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """See `EpochGroup`; leaves `tensor` as it is."""
        del tensor
        if self._aborted is not None:
            raise GroupFailed(f"group of one was aborted: {self._aborted}", aborted=self._aborted)
        return Ended()

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """See `EpochGroup`."""
        self.all_reduce(tensor).wait(timeout_s)
        return [tensor.clone()]

    def abort(self, reason: str) -> None:
        """See `EpochGroup`."""
        self._aborted = self._aborted or reason

    def close(self) -> None:
        """See `EpochGroup`."""


class Over:
    """Stands for the group of an epoch that was over before this rank could use it: every operation fails."""

    slot = 0
    size = 1

    def __init__(self, cause: GroupFailed) -> None:
        self._cause = cause

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """See `EpochGroup`; raises."""
        del tensor
        raise GroupFailed(str(self._cause), aborted=self._cause.aborted)

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """See `EpochGroup`; raises."""
        del tensor, timeout_s
        raise GroupFailed(str(self._cause), aborted=self._cause.aborted)

    def abort(self, reason: str) -> None:
        """See `EpochGroup`."""

    def close(self) -> None:
        """See `EpochGroup`."""


class _FormAlone:
    def form(self) -> EpochGroup:
        return Alone()

    def interrupt(self, reason: str) -> None:
        del reason


def start_build(
    backend: str, keys: KeyValue, slot: int, size: int, timeout_s: float, name: str, host: str = "127.0.0.1"
) -> Build:
    """Start building an epoch's group in the background.

    Args:
        backend: "gloo" or "nccl".
        keys: The epoch's rendezvous keys; the build aborts this handle if it is aborted itself.
        slot: This member's index, 0 <= slot < size.
        size: Number of members.
        timeout_s: Bound on the whole build, in seconds.
        name: For messages and thread names, such as "epoch 7.2 rank 0".
        host: Address or host name of this machine that the other members can connect to (gloo only).

    Raises:
        ValueError: an unknown backend, or a slot outside the group.
    """
    if not 0 <= slot < size:
        raise ValueError(f"slot {slot} is outside a group of {size}")
    forming: Forming
    if size == 1:
        forming = _FormAlone()
    elif backend == "gloo":
        from lightkeeper.manager.gloo import FormGloo

        forming = FormGloo(keys, slot, size, timeout_s, name, host)
    elif backend == "nccl":
        from lightkeeper.manager.nccl import FormNccl

        forming = FormNccl(keys, slot, size, timeout_s, name)
    else:
        raise ValueError(f"unknown backend {backend!r}: it must be 'gloo' or 'nccl'")
    return Build(forming, name)


class LocalKeys:
    """Rendezvous keys within one process, for tests and single-process use.

    The first handle makes the space; `handle()` gives every further member its own, so that aborting one
    leaves the others alone.
    """

    def __init__(self, _space: tuple[threading.Condition, dict[str, bytes]] | None = None) -> None:
        self._ready, self._values = _space or (threading.Condition(), {})
        self._aborted: str | None = None

    def handle(self) -> LocalKeys:
        """Another member's handle on the same keys."""
        return LocalKeys((self._ready, self._values))

    def set(self, key: str, value: bytes) -> None:
        """See `KeyValue`."""
        with self._ready:
            self._values[key] = bytes(value)
            self._ready.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `KeyValue`."""
        until = time.monotonic() + timeout_s
        with self._ready:
            while key not in self._values:
                if self._aborted is not None:
                    raise GroupFailed(f"waiting for {key!r} aborted: {self._aborted}", aborted=self._aborted)
                left = until - time.monotonic()
                if left <= 0 or not self._ready.wait(left):
                    if key in self._values:
                        break
                    raise TimeoutError(f"nobody set {key!r} within {timeout_s:.1f} s")
            return self._values[key]

    def abort(self, reason: str) -> None:
        """See `KeyValue`."""
        with self._ready:
            self._aborted = self._aborted or reason
            self._ready.notify_all()


Note = Callable[[str], None]
"""Takes one line for the log."""
