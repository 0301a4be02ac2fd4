"""What asks a group to leave: SIGTERM to a rank, a notice file; and who of a rank's children heeds the signal."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lightkeeper.manager import notice, processes
from lightkeeper.manager.notice import Notice, parse_notice, watch_notice
from lightkeeper.manager.signals import ASKS, NOTICE, LeaveSignal
from lightkeeper.manager.spawn import SOCKET_VARIABLE


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ASKS}
    for number in ASKS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", ASKS)
def test_a_signal_asks_while_the_run_goes_on_and_ends_the_process_after_it(number: signal.Signals) -> None:
    asked: list[signal.Signals] = []
    taken = LeaveSignal(asked.append)
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert asked == [number, number]
    taken.end()
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("number", ASKS)
def test_a_handler_of_the_scripts_own_is_left_alone(number: signal.Signals) -> None:
    def own(number: int, frame: object) -> None:
        pass

    signal.signal(number, own)
    LeaveSignal(_ignored).end()
    assert signal.getsignal(number) is own


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_handler_that_python_does_not_know_of_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: signal.Handlers
) -> None:
    """`faulthandler` is what people put on SIGUSR1, to see where a rank hangs. Launched ranks begin with SIG_IGN."""
    monkeypatch.setenv(SOCKET_VARIABLE, "x")
    signal.signal(NOTICE, before)
    asked: list[signal.Signals] = []
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(NOTICE, file=file)
        try:
            taken = LeaveSignal(asked.append)
            os.kill(os.getpid(), NOTICE)
            taken.end()
        finally:
            faulthandler.unregister(NOTICE)
    assert not asked and "test_a_handler_that_python" in (tmp_path / "stacks").read_text()


def test_only_the_main_thread_takes_signals() -> None:
    thread = threading.Thread(target=lambda: LeaveSignal(_ignored).end())
    thread.start()
    thread.join(60)
    assert {signal.getsignal(number) for number in ASKS} == {signal.SIG_DFL}


def _ignored(number: signal.Signals) -> None:
    pass


def _notice_in_child(heard: object) -> None:
    os.kill(os.getpid(), NOTICE)
    heard.set()  # type: ignore[attr-defined]


def test_notice_to_a_forked_child_is_not_the_ranks_and_does_not_end_it() -> None:
    asked: list[signal.Signals] = []
    taken = LeaveSignal(asked.append)
    fork = multiprocessing.get_context("fork")
    heard = fork.Event()
    child = fork.Process(target=_notice_in_child, args=(heard,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and heard.is_set() and not asked
    taken.end()


@pytest.mark.parametrize("launched", [True, False])
def test_ignored_it_is_taken_only_from_a_launcher_and_ignored_again_after_the_run(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "x") if launched else monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    taken = LeaveSignal(_ignored)
    assert (signal.getsignal(signal.SIGTERM) != signal.SIG_IGN) == launched
    taken.end()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def _worker(ready: object) -> None:
    processes.heed_parent_alone()
    ready.set()  # type: ignore[attr-defined]
    threading.Event().wait(300)


def test_a_child_heeds_its_parent_alone() -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    child = fork.Process(target=_worker, args=(ready,))
    child.start()
    assert ready.wait(60) and child.pid is not None
    stranger = fork.Process(target=os.kill, args=(child.pid, signal.SIGTERM))
    stranger.start()
    stranger.join(60)
    child.join(0.3)
    assert stranger.exitcode == 0 and child.is_alive()
    child.terminate()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM


# ---------------------------------------------------------------- a notice


@pytest.mark.parametrize(
    ("text", "deadline_s"), [("", None), ("5", 5.0), ("0.5", 0.5), ("0", 0.0), ("86400", 86_400.0)]
)
def test_what_a_notice_says(text: str, deadline_s: float | None) -> None:
    assert parse_notice(text) == Notice(deadline_s)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "86401", "5 s"])
def test_a_notice_that_cannot_be_read_is_one_without_a_deadline(text: str) -> None:
    found = parse_notice(text)
    assert found.deadline_s is None and "is no number of seconds" in found.problem


def watched(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[int, Callable[[], object]]
) -> tuple[list[Notice], list[str], int]:
    """What `watch_notice` finds and says while, at each of its pauses, something changes; how many pauses it made."""
    noticed, said, pauses = list[Notice](), list[str](), [0]

    def pause(seconds: float) -> None:
        assert seconds == notice.LOOK_S
        pauses[0] += 1
        changes.get(pauses[0], lambda: None)()

    async def run() -> None:
        there = asyncio.Event()
        watch_notice(path, lambda found: (noticed.append(found), there.set()), said.append)
        async with asyncio.timeout(60):
            await there.wait()

    monkeypatch.setattr(notice.time, "sleep", pause)
    asyncio.run(run())
    return noticed, said, pauses[0]


def test_a_notice_that_is_still_being_written_is_read_until_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notice"
    texts = ["", " 3", " 30\n"]
    changes = {n: partial(path.write_text, text) for n, text in enumerate(texts, 1)}
    assert watched(path, monkeypatch, changes) == ([Notice(30.0)], [], len(texts) + 1)


def test_a_notice_that_is_taken_away_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    path.write_text("4")
    assert watched(path, monkeypatch, {1: path.unlink}) == ([Notice(4.0)], [], 1)


def test_a_notice_that_never_stays_is_taken_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    path.write_text("0")
    changes = {n: partial(path.write_text, str(n)) for n in range(1, 100)}
    assert watched(path, monkeypatch, changes) == ([Notice(notice.LOOKS_MAX)], [], notice.LOOKS_MAX)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_told_once_and_is_no_notice(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO would hold whoever opens it for reading until somebody writes."""
    path = tmp_path / "notice"
    make(path)

    def replace() -> None:
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_text("5")

    noticed, said, _ = watched(path, monkeypatch, {3: replace})
    assert noticed == [Notice(5.0)] and said == [f"no notice can be read in {path}: it is no regular file"]


def test_a_notice_that_is_handed_on_later_leaves_less_time() -> None:
    assert Notice(5.0).after(2.0) == Notice(3.0) and Notice(1.0).after(2.0) == Notice(0.0)
    assert Notice().after(2.0) == Notice()
