"""Which range of a state is fetched from which donor: whoever is free takes the next, so a slow donor gets fewer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

TRIES_MAX = 4  # of one range, over all donors
STRIKES_MAX = 3  # of a donor: broken connections and damaged ranges


@dataclass
class DonorShare:
    """What one donor did.

    Attributes:
        address: Its server's.
        nbytes: Bytes of whole ranges that came from it.
        strikes: How often it failed.
        cause: Why it is no longer used; None while it is.
    """

    address: str
    nbytes: int = 0
    strikes: int = 0
    cause: str | None = None


@dataclass
class _Range:
    index: int
    tries: int = 0
    failed_at: set[str] = field(default_factory=set)


class RangeQueue:
    """The ranges that are still to be fetched; for the threads of all donors.

    Args:
        count: Number of ranges.
        donors: Addresses.
    """

    def __init__(self, count: int, donors: Sequence[str]) -> None:
        self.shares = {address: DonorShare(address) for address in donors}
        self.again = 0
        self._changed = threading.Condition()
        self._waiting = deque(_Range(i) for i in range(count))
        self._taken: dict[int, _Range] = {}
        self._left = count
        self._failure: str | None = None
        self._stopped = False

    @property
    def failure(self) -> str | None:
        """Why the state cannot be fetched whole; None while it can."""
        return self._failure

    def claim(self, donor: str, wait: bool) -> int | None:
        """The next range that this donor shall send.

        Args:
            donor: Its address.
            wait: Whether to wait for one that another donor may yet fail to send.

        Returns:
            Its index; None if there is none (now, or, having waited, ever).
        """
        with self._changed:
            while self._going(donor):
                one = self._next_for(donor)
                if one is not None:
                    one.tries += 1
                    self._taken[one.index] = one
                    return one.index
                if not wait:
                    return None
                self._changed.wait()
            return None

    def done(self, donor: str, index: int, nbytes: int) -> None:
        """The range is here, and its checksum is right."""
        with self._changed:
            del self._taken[index]
            self._left -= 1
            self.shares[donor].nbytes += nbytes
            self._changed.notify_all()

    def give_back(self, donor: str, indices: Sequence[int], cause: str, damaged: bool = False) -> None:
        """These ranges did not come whole.

        Args:
            donor: Which was to send them.
            indices: The ranges; the first is the one that failed, the others were not begun.
            cause: One line.
            damaged: Whether the first came with a wrong checksum; it is then had from another donor if there is one.
        """
        with self._changed:
            share = self.shares[donor]
            share.strikes += 1
            for place, index in enumerate(indices):
                one = self._taken.pop(index)
                if place == 0 and damaged:
                    one.failed_at.add(donor)
                    self.again += 1
                    if one.tries >= TRIES_MAX:
                        self._failure = f"range {index} came damaged {one.tries} times, last {cause}"
                elif place > 0 or not damaged:
                    one.tries -= 1
                self._waiting.appendleft(one)
            if share.strikes >= STRIKES_MAX:
                self._drop(share, cause)
            self._changed.notify_all()

    def drop(self, donor: str, cause: str) -> None:
        """This donor is used no more."""
        with self._changed:
            self._drop(self.shares[donor], cause)
            self._changed.notify_all()

    def stop(self, cause: str) -> None:
        """Give up, if it is not done."""
        with self._changed:
            if self._left:
                self._failure = self._failure or cause
            self._stopped = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all ranges are here or it is known that they never will be; whether that is so."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._left and self._failure is None:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def alive(self) -> list[str]:
        """The donors that are still used."""
        with self._changed:
            return [share.address for share in self.shares.values() if share.cause is None]

    def _going(self, donor: str) -> bool:
        return bool(self._left) and self._failure is None and not self._stopped and self.shares[donor].cause is None

    def _next_for(self, donor: str) -> _Range | None:
        alive = {address for address, share in self.shares.items() if share.cause is None}
        for i, one in enumerate(self._waiting):
            if donor not in one.failed_at or alive <= one.failed_at:
                del self._waiting[i]
                return one
        return None

    def _drop(self, share: DonorShare, cause: str) -> None:
        if share.cause is None:
            share.cause = cause
        if all(one.cause is not None for one in self.shares.values()) and self._left:
            self._failure = self._failure or f"no donor is left; the last: {cause}"
