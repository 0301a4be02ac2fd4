"""A rank's phase, readable from outside: while it computes, while it is frozen, and after it was killed.

The training thread stores a few integers in a small mapped file; the manager reads them. No call, no lock, no
thread: a rank that holds the interpreter lock still shows in which phase it does so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.errors import ToldError

PHASES = (
    "start",
    "join",
    "compute",
    "reduce",
    "vote",
    "recover",
    "apply",
    "closing",
    "ended",
    "heal",
    "replay",
    "follow",
    "before",
    "checkpoint",
    "compile",
    "evaluation",
    "profile",
)
EXPECTED = ("checkpoint", "compile", "evaluation", "profile")  # what a loop declares with `Manager.expect`
STANDING = ("before", "reduce", "closing")  # in these it waits for the other groups
LATER = ("start", "join", "ended")  # in these nobody waits for it; in all others it must get on by itself
# whom it waits for: it is its own turn; ranks of its own group; the other groups; its manager's answer; donors, peers
NOBODY, OWN, OTHERS, ANSWER, PEERS = range(5)
# phase, step, since_ns, beat_ns, microbatches, microbatch_us, waits_for, moved_ns, expected_us, wait_us
_LAYOUT = struct.Struct("<qqqqqqqqqq")
SIZE = _LAYOUT.size
_NUMBER = struct.Struct("<q")
_BEAT_AT = 24
READS_MAX = 4
_WAITS = struct.Struct("<qq")
_WAITS_AT = 48


@dataclass(frozen=True, slots=True)
class Progress:
    """What the page shows.

    Attributes:
        phase: one of `PHASES`.
        step: next step to be committed.
        since_s: seconds in this phase.
        silent_s: seconds since the rank's own thread last beat.
        microbatches: microbatches begun in this step.
        microbatch_us: microseconds that one takes, 0 while that is not known.
        waits_for: `NOBODY`, `OWN` (ranks of its group), `OTHERS` (groups), `ANSWER` (its manager's) or `PEERS` (that
            it connects to, or fetches from).
        moved_s: seconds since it did anything new, or began to wait for somebody else.
        expected_s: seconds that it said this phase would take, 0 if it said nothing.
        wait_us: microseconds that it waits for the other groups in a step, 0 while that is not known.
    """

    phase: str
    step: int
    since_s: float
    silent_s: float
    microbatches: int
    microbatch_us: int = 0
    waits_for: int = NOBODY
    moved_s: float = 0.0
    expected_s: float = 0.0
    wait_us: int = 0

    @property
    def idle_s(self) -> float:
        """Seconds for which it has done nothing new though it waits for nobody; 0 where it need not get on."""
        return self.moved_s if self.phase not in LATER and self.waits_for == NOBODY else 0.0

    @property
    def asks_s(self) -> float:
        """Seconds for which it has been waiting for its manager's answer, 0 if it does not."""
        return self.moved_s if self.waits_for == ANSWER else 0.0

    @property
    def waiting_s(self) -> float:
        """Seconds for which it has been standing for the other groups, 0 if it does not."""
        return self.moved_s if self.waits_for == OTHERS else 0.0


class PageNotMade(ToldError):
    """A rank cannot show what it does."""


class ProgressPage:
    """The rank's end.

    Args:
        path: file to create; its folder exists.

    Raises:
        PageNotMade: there is no room for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._page = _mapped(path)
        except OSError as error:
            raise PageNotMade(
                f"cannot write in {path.parent}: {error.strerror or error}; make room there, or set TMPDIR to another "
                "folder"
            ) from error
        self.phase, self.step, self.microbatches = "start", 0, 0
        self.microbatch_us = self.wait_us = 0  # shown from the next phase on
        self.enter("start", 0)

    def enter(self, phase: str, step: int, microbatches: int = 0, expected_s: float = 0.0) -> None:
        """The training thread is in this phase from now on; `expected_s` as in `Progress`."""
        now = time.monotonic_ns()
        self.phase, self.step, self.microbatches, self.expected_s = phase, step, microbatches, expected_s
        self._page[:SIZE] = _LAYOUT.pack(
            PHASES.index(phase), step, now, now, microbatches, self.microbatch_us, NOBODY, now, round(1e6 * expected_s),
            self.wait_us,
        )  # fmt: skip

    def waits(self, whom: int) -> None:
        """Whom the training thread waits for from now on."""
        self._page[_WAITS_AT : _WAITS_AT + _WAITS.size] = _WAITS.pack(whom, time.monotonic_ns())

    @contextlib.contextmanager
    def waiting(self, whom: int) -> Iterator[None]:
        """What is done inside waits for these."""
        self.waits(whom)
        try:
            yield
        finally:
            self.waits(NOBODY)

    def beat(self) -> None:
        """The rank's listening thread lives."""
        self._page[_BEAT_AT : _BEAT_AT + _NUMBER.size] = _NUMBER.pack(time.monotonic_ns())


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a hole on a full disk would end the rank by SIGBUS, in any phase
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)


def read_progress(path: Path) -> Progress | None:
    """What a rank's page shows, or None if there is none yet."""
    raw = _whole(path)
    if raw is None:
        return None
    phase, step, since_ns, beat_ns, microbatches, microbatch_us, waits_for, moved_ns, expected_us, wait_us = (
        _LAYOUT.unpack(raw)
    )
    now = time.monotonic_ns()
    return Progress(
        PHASES[phase], step, (now - since_ns) / 1e9, (now - beat_ns) / 1e9, microbatches, microbatch_us, waits_for,
        (now - moved_ns) / 1e9, expected_us / 1e6, wait_us,
    )  # fmt: skip


def _whole(path: Path) -> bytes | None:
    """The page as one write left it: it is read while it is written, so until two readings are alike.

    (`struct.pack_into` clears what it writes to first, so that a reader would see times long past: it is not used.)
    """
    try:
        before = path.read_bytes()
        for _ in range(READS_MAX):
            raw = path.read_bytes()
            if raw == before:
                break
            before = raw
    except OSError:
        return None
    return before if len(before) == SIZE else None
