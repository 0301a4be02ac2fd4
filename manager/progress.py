"""A rank's phase, readable from outside: while it computes, while it is frozen, and after it was killed.

The training thread stores a few integers in a small mapped file; the manager reads them. No call, no lock, no
thread: a rank that holds the interpreter lock still shows in which phase it does so.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
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
_LAYOUT = struct.Struct("<qqqqqq")  # phase, step, since_ns, beat_ns, microbatches, microbatch_us
SIZE = _LAYOUT.size
_BEAT = struct.Struct("<q")
_BEAT_AT = 24


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
    """

    phase: str
    step: int
    since_s: float
    silent_s: float
    microbatches: int
    microbatch_us: int = 0


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
        self.microbatch_us = 0  # shown from the next phase on
        self.enter("start", 0)

    def enter(self, phase: str, step: int, microbatches: int = 0) -> None:
        """The training thread is in this phase from now on."""
        now = time.monotonic_ns()
        self.phase, self.step, self.microbatches = phase, step, microbatches
        self._page[:SIZE] = _LAYOUT.pack(PHASES.index(phase), step, now, now, microbatches, self.microbatch_us)

    def beat(self) -> None:
        """The rank's listening thread lives."""
        _BEAT.pack_into(self._page, _BEAT_AT, time.monotonic_ns())


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a hole on a full disk would end the rank by SIGBUS, in any phase
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)


def read_progress(path: Path) -> Progress | None:
    """What a rank's page shows, or None if there is none yet."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) != SIZE:
        return None
    phase, step, since_ns, beat_ns, microbatches, microbatch_us = _LAYOUT.unpack(raw)
    now = time.monotonic_ns()
    return Progress(PHASES[phase], step, (now - since_ns) / 1e9, (now - beat_ns) / 1e9, microbatches, microbatch_us)
