"""Kept entries form a chain with a bound; who asks for a successor gets exactly it, or learns that it never will."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from state_objects import name_of

from lightkeeper.manager.history import EntryHistory, EntryUnavailable

SIZE = 4 * 100 + 8 * 3


def entry(step: int) -> list[torch.Tensor]:
    return [torch.full((100,), float(step)), torch.full((3,), float(step), dtype=torch.float64)]


def filled(steps: range, entries: int = 100) -> EntryHistory:
    history = EntryHistory(entries * SIZE)
    for step in steps:
        assert history.keep(name_of(step), name_of(step - 1), entry(step))
    return history


def follow(history: EntryHistory, step: int, timeout_s: float = 0.0) -> int:
    with history.after(name_of(step), timeout_s) as kept:
        assert kept.predecessor == name_of(step)
        assert all(torch.equal(a, b) for a, b in zip(kept.tensors, entry(kept.name.step), strict=True))
        return kept.name.step


def test_entries_come_in_order_as_copies():
    history = EntryHistory(10 * SIZE)
    live = entry(4)
    history.keep(name_of(4), name_of(3), live)
    live[0].zero_()
    history.keep(name_of(5), name_of(4), entry(5))
    assert [follow(history, 3), follow(history, 4)] == [4, 5]
    with history.get(name_of(4)) as kept:
        assert kept.name == name_of(4)
    with pytest.raises(EntryUnavailable, match="is not kept here"), history.get(name_of(9)):
        pass


def test_the_bound_drops_the_oldest_and_that_is_visible():
    history = filled(range(6), entries=3)
    assert [name.step for name in history.names] == [3, 4, 5]
    assert history.nbytes == 3 * SIZE and history.dropped == 3
    with pytest.raises(EntryUnavailable, match=r"after step 1 .* is no longer kept: the oldest is step 3"):
        follow(history, 1)
    assert follow(history, 2) == 3


def test_buffers_are_used_anew():
    history = filled(range(2), entries=2)
    with history.get(name_of(0)) as kept:
        address = kept.tensors[0].data_ptr()
    history.keep(name_of(2), name_of(1), entry(2))
    with history.get(name_of(2)) as kept:
        assert kept.tensors[0].data_ptr() == address


def test_an_entry_that_is_read_is_not_overwritten():
    history = filled(range(2), entries=3)
    with history.get(name_of(0)) as kept:
        for step in range(2, 7):
            history.keep(name_of(step), name_of(step - 1), entry(step))
            assert torch.equal(kept.tensors[0], entry(0)[0])
            assert history.nbytes <= 3 * SIZE
    assert [name.step for name in history.names] == [5, 6]


def test_an_entry_beyond_the_bound_is_not_kept_and_its_successors_cannot_be_used():
    history = EntryHistory(SIZE - 1)
    assert not history.keep(name_of(4), name_of(3), entry(4))
    with pytest.raises(EntryUnavailable, match="no longer kept: the oldest is none"):
        follow(history, 3)


def test_a_successor_is_waited_for():
    history = filled(range(2))
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(follow(history, 1, 10.0)))
    thread.start()
    history.keep(name_of(2), name_of(1), entry(2))
    thread.join(10)
    assert got == [2]


def test_a_wait_is_bounded():
    with pytest.raises(TimeoutError, match="not there yet"):
        follow(filled(range(2)), 1, 0.01)
    with pytest.raises(TimeoutError):
        follow(EntryHistory(SIZE), 1, 0.01)  # it may still commit that step


def test_stop_tells_who_waits():
    history = filled(range(2))
    said: list[str] = []

    def wait() -> None:
        try:
            follow(history, 1, 10.0)
        except EntryUnavailable as e:
            said.append(str(e))

    thread = threading.Thread(target=wait)
    thread.start()
    history.stop()
    thread.join(10)
    assert "this donor stops" in said[0]
    assert not history.keep(name_of(2), name_of(1), entry(2))
    assert follow(history, 0) == 1  # what is kept is still served


def test_another_epochs_entry_of_the_same_step_is_another():
    history = filled(range(3))
    with pytest.raises(EntryUnavailable, match="another way"), history.after(name_of(1, epoch=9), 0.0):
        pass
    with pytest.raises(EntryUnavailable, match="another way"), history.after(name_of(2, epoch=9), 0.0):
        pass


def test_a_new_chain_drops_the_old_one():
    history = filled(range(3))
    history.keep(name_of(3, epoch=5), name_of(2, epoch=4), entry(3))  # this rank healed in between
    assert history.names == [name_of(3, epoch=5)]
    with pytest.raises(EntryUnavailable):
        follow(history, 2)
    with history.after(name_of(2, epoch=4), 0.0) as kept:
        assert kept.name == name_of(3, epoch=5)


def test_clear_starts_anew():
    history = filled(range(3))
    history.clear()
    assert history.nbytes == 0 and history.names == []
    history.keep(name_of(8), name_of(7), entry(8))
    assert follow(history, 7) == 8


def test_who_waits_for_an_entry_that_was_not_kept_is_told():
    history = filled(range(3))
    history.clear()
    with pytest.raises(TimeoutError):
        follow(history, 2, 0.0)  # the newest: its successor may still be kept
    history.passed(name_of(3))
    with pytest.raises(EntryUnavailable):
        follow(history, 2, 0.0)
    history.keep(name_of(4), name_of(3), entry(4))
    assert follow(history, 3) == 4


def test_an_entry_is_kept_once():
    history = filled(range(2))
    assert history.keep(name_of(1), name_of(0), entry(7))
    assert follow(history, 0) == 1


def test_two_readers_and_a_keeper():
    history = EntryHistory(4 * SIZE)
    errors: list[BaseException] = []

    def read() -> None:
        step = -1
        try:
            while step < 199:
                try:
                    step = follow(history, step, 10.0)
                except EntryUnavailable:
                    step += 1
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(200):
        history.keep(name_of(step), name_of(step - 1), entry(step))
    for thread in threads:
        thread.join(20)
    assert not errors and not any(thread.is_alive() for thread in threads)
