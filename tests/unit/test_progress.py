"""A rank's phase, read from outside: while it lives, while it is stopped and after it was killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightkeeper.manager.progress import (
    ANSWER,
    NOBODY,
    OTHERS,
    OWN,
    PEERS,
    PHASES,
    SIZE,
    PageNotMade,
    ProgressPage,
    read_progress,
)

SCRIPT = """
import sys
from pathlib import Path
from lightkeeper.manager.progress import ProgressPage
page = ProgressPage(Path(sys.argv[1]))
page.enter("reduce", 41, 7)
print("in reduce", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_entered_is_read(tmp_path: Path, phase: str) -> None:
    page = ProgressPage(tmp_path / "page")
    page.enter(phase, 12, 3)
    read = read_progress(tmp_path / "page")
    assert read is not None and (read.phase, read.step, read.microbatches) == (phase, 12, 3)
    assert (page.phase, page.step) == (phase, 12)
    assert 0 <= read.since_s < 60 and 0 <= read.silent_s < 60


def test_a_beat_ends_the_silence_but_not_the_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    page = ProgressPage(tmp_path / "page")
    page.enter("compute", 1)
    now[0] += 5_000_000_000
    read = read_progress(tmp_path / "page")
    assert read is not None and (read.since_s, read.silent_s) == (5.0, 5.0)
    page.beat()
    now[0] += 1_000_000_000
    read = read_progress(tmp_path / "page")
    assert read is not None and (read.since_s, read.silent_s, read.phase) == (6.0, 1.0, "compute")


def test_who_waits_for_others_stands_and_whose_turn_it_is_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    page = ProgressPage(tmp_path / "page")

    def times() -> tuple[float, float]:
        now[0] += 3_000_000_000
        read = read_progress(tmp_path / "page")
        assert read is not None and read.phase == page.phase
        return read.idle_s, read.waiting_s

    page.enter("reduce", 1)
    assert times() == (3.0, 0.0), "it has yet to put its part in"
    page.waits(OTHERS)
    assert times() == (0.0, 3.0)
    page.waits(OWN)
    assert times() == (0.0, 0.0), "a rank of its own group is waited for: neither stands nor is stuck"
    page.waits(NOBODY)
    assert times() == (3.0, 0.0)
    page.enter("vote", 1)
    page.waits(ANSWER)
    assert times() == (0.0, 0.0), "the manager answers in its own time"
    read = read_progress(tmp_path / "page")
    assert read is not None and read.asks_s == 3.0
    page.enter("recover", 1)
    with page.waiting(PEERS):
        assert times() == (0.0, 0.0)
    assert times() == (3.0, 0.0)


def test_what_a_phase_was_said_to_take_and_how_long_a_step_waits_are_read(tmp_path: Path) -> None:
    page = ProgressPage(tmp_path / "page")
    page.wait_us = 700
    page.enter("evaluation", 4, expected_s=600.0)
    read = read_progress(tmp_path / "page")
    assert read is not None and (read.expected_s, read.wait_us) == (600.0, 700)
    page.enter("compute", 5)
    read = read_progress(tmp_path / "page")
    assert read is not None and read.expected_s == 0.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_is_readable_while_the_rank_is_stopped_and_after_it_was_killed(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "page")]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "in reduce\n"
        rank.send_signal(number)
        os.waitpid(rank.pid, os.WUNTRACED)
        read = read_progress(tmp_path / "page")
        assert read is not None and (read.phase, read.step, read.microbatches) == ("reduce", 41, 7)
    finally:
        rank.kill()
        rank.wait()


def test_no_page_or_half_a_page_is_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "missing") is None
    (tmp_path / "half").write_bytes(b"\0" * (SIZE - 1))
    assert read_progress(tmp_path / "half") is None


def test_others_may_not_read_it(tmp_path: Path) -> None:
    ProgressPage(tmp_path / "page")
    assert (tmp_path / "page").stat().st_mode & 0o077 == 0


def test_a_full_disk_is_told_when_the_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped without its blocks it would be made, and end the rank by SIGBUS when it is first written."""

    def full(descriptor: int, offset: int, length: int) -> None:
        assert (offset, length) == (0, SIZE)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ProgressPage(tmp_path / "page")
    assert (tmp_path / "page").stat().st_blocks > 0
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PageNotMade, match=f"cannot write in {tmp_path}: No space left on device"):
        ProgressPage(tmp_path / "page")


def test_a_page_that_is_written_all_the_time_is_never_read_in_halves(tmp_path: Path) -> None:
    """A time of long ago would call its rank stuck."""
    page, over = ProgressPage(tmp_path / "page"), threading.Event()

    def write() -> None:
        while not over.is_set():
            page.waits(OTHERS)
            page.beat()
            page.enter("reduce", 3)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            read = read_progress(tmp_path / "page")
            assert read is not None and read.moved_s < 60 and read.silent_s < 60 and read.since_s < 60
    finally:
        over.set()
        writer.join()
