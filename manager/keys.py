"""Rendezvous keys of epochs, held by the manager of slot 0 and reached by the others through gRPC.

A key belongs to an epoch: once a higher epoch is promised, its keys are void, so nothing that a dead epoch left can
be read by a living one.
"""

from __future__ import annotations

import asyncio

KEYS_MAX = 100_000
VALUE_BYTES_MAX = 64 << 10


class KeyRefused(RuntimeError):
    """The key's epoch is over, or a limit was reached."""


class Keys:
    """The keys held here."""

    def __init__(self) -> None:
        self.below = 0
        self._values: dict[tuple[int, str], bytes] = {}
        self._waiting: dict[tuple[int, str], list[asyncio.Future[bytes]]] = {}

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Sets a key.

        Raises:
            KeyRefused: if the epoch is over or a limit was reached.
        """
        self._check(epoch)
        if len(value) > VALUE_BYTES_MAX or len(self._values) >= KEYS_MAX:
            raise KeyRefused(f"key {key!r}: more than {VALUE_BYTES_MAX} bytes or {KEYS_MAX} keys")
        self._values[epoch, key] = value
        for future in self._waiting.pop((epoch, key), []):
            if not future.done():
                future.set_result(value)

    async def get(self, epoch: int, key: str, timeout_s: float) -> bytes:
        """Waits for a key.

        Raises:
            KeyRefused: if the epoch is or becomes over.
            TimeoutError: if it is not set in time.
        """
        self._check(epoch)
        if (value := self._values.get((epoch, key))) is not None:
            return value
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((epoch, key), []).append(future)
        async with asyncio.timeout(timeout_s):
            return await future

    def drop(self, below: int) -> None:
        """Epochs below this number are over."""
        self.below = max(self.below, below)
        self._values = {name: value for name, value in self._values.items() if name[0] >= self.below}
        for name in [name for name in self._waiting if name[0] < self.below]:
            for future in self._waiting.pop(name):
                if not future.done():
                    future.set_exception(KeyRefused(f"epoch {name[0]} is over"))

    def _check(self, epoch: int) -> None:
        if epoch < self.below:
            raise KeyRefused(f"epoch {epoch} is over")
