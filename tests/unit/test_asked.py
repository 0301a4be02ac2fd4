"""What asks a group to leave: SIGTERM to a rank, a notice file; and who of a rank's children heeds the signal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightkeeper.manager import notice, processes
from lightkeeper.manager.notice import Notice, read_notice, watch_notice
from lightkeeper.manager.signals import LeaveSignal
from lightkeeper.manager.spawn import SOCKET_VARIABLE


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------- a signal


def test_sigterm_asks_while_the_run_goes_on_and_ends_the_process_after_it() -> None:
    asked: list[int] = []
    taken = LeaveSignal(lambda: asked.append(1))
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [1, 1]
    taken.end()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_scripts_own_is_left_alone() -> None:
    def own(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGTERM, own)
    LeaveSignal(lambda: None).end()
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize("launched", [True, False])
def test_ignored_it_is_taken_only_from_a_launcher_and_ignored_again_after_the_run(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "x") if launched else monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    taken = LeaveSignal(lambda: None)
    assert (signal.getsignal(signal.SIGTERM) != signal.SIG_IGN) == launched
    taken.end()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def _worker(ready: object) -> None:
    processes.heed_parent_alone()
    ready.set()  # type: ignore[attr-defined]
    threading.Event().wait(60)


def test_a_child_heeds_its_parent_alone() -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    child = fork.Process(target=_worker, args=(ready,))
    child.start()
    assert ready.wait(10) and child.pid is not None
    stranger = fork.Process(target=os.kill, args=(child.pid, signal.SIGTERM))
    stranger.start()
    stranger.join(10)
    child.join(0.3)
    assert stranger.exitcode == 0 and child.is_alive()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM


# ---------------------------------------------------------------- a notice


@pytest.mark.parametrize(
    ("text", "deadline_s"), [("", None), ("  \n", None), ("5", 5.0), ("0.5\n", 0.5), ("0", 0.0), ("86400", 86_400.0)]
)
def test_what_a_notice_says(text: str, deadline_s: float | None, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    assert read_notice(path) is None
    path.write_text(text)
    assert read_notice(path) == Notice(deadline_s)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "86401", "5 s"])
def test_a_notice_that_cannot_be_read_is_one_without_a_deadline(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text(text)
    found = read_notice(path)
    assert found is not None and found.deadline_s is None and "is no number of seconds" in found.problem


def test_a_notice_that_is_still_being_written_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, noticed, there = tmp_path / "notice", list[Notice](), threading.Event()

    def pause(seconds: float) -> None:
        assert seconds == notice.LOOK_S
        path.write_text("7" if path.exists() else "")

    monkeypatch.setattr(notice.time, "sleep", pause)
    watch_notice(path, lambda found: (noticed.append(found), there.set()))
    assert there.wait(10) and noticed == [Notice(7.0)]
