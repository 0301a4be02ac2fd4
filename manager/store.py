"""A torch store whose keys travel through the managers instead of a TCPStore that some trainer would host."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from lightkeeper.manager.groups import KeyValue

_Seen = Callable[[str, bytes], None]


class RendezvousStore(dist.Store):
    """What a process group needs of a store, over `KeyValue`.

    Every key is set once and never changes, so values are kept once seen. Counters (`add`), which a process
    group does not need to form, are refused.

    Args:
        keys: Where the keys live.
        timeout_s: Default bound on `get` and `wait`, in seconds.
        seen: Called with every key set here or read from a peer.
    """

    def __init__(self, keys: KeyValue, timeout_s: float, seen: _Seen | None = None) -> None:
        super().__init__()
        self._keys = keys
        self._timeout_s = timeout_s
        self._seen = seen
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._remember(key, data)
        self._keys.set(key, data)

    def get(self, key: str) -> bytes:
        """The value of `key`, waiting for it up to the default bound.

        Raises:
            TimeoutError: nobody set it in time.
            GroupFailed: the keys were aborted.
        """
        return self._fetch(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` are set; errors as for `get`."""
        until = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            self._fetch(key, max(0.0, until - time.monotonic()))

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are set now."""
        try:
            self.wait(keys, timedelta(0))
        except TimeoutError:
            return False
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys`, in order."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Publish several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Refused: the managers keep values, not counters."""
        raise NotImplementedError(f"rendezvous keys have no counters (add {key!r} {amount})")

    def has_extended_api(self) -> bool:
        """No append, no compare-and-set queues."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default bound."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The default bound."""
        return timedelta(seconds=self._timeout_s)

    def _fetch(self, key: str, timeout_s: float) -> bytes:
        if key not in self._values:
            self._remember(key, self._keys.get(key, timeout_s))
        return self._values[key]

    def _remember(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if self._seen is not None:
            self._seen(key, value)
