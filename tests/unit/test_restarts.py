"""After which ends a launcher starts its group again, how often, and after which pause."""

from __future__ import annotations

import signal

import pytest

from lightkeeper.manager import exits
from lightkeeper.manager.restarts import GOOD_S, PAUSE_S_MAX, GroupEnd, Restarts, may_restart


@pytest.mark.parametrize(
    "end",
    [
        GroupEnd(exits.FENCED),
        GroupEnd(exits.FENCED, -signal.SIGKILL),
        GroupEnd(exits.ORPHANED, exits.ORPHANED),
        GroupEnd(137, -signal.SIGKILL),
        GroupEnd(139, -signal.SIGSEGV),
    ],
)
def test_a_group_that_was_lost_is_started_again(end: GroupEnd) -> None:
    assert may_restart(end)
    assert not may_restart(GroupEnd(end.code, end.first, asked=True))


@pytest.mark.parametrize("code", [0, 1, 2, 5, exits.REFUSED, exits.GAVE_UP, exits.STOPPED, 130, 137])
def test_a_group_that_ended_by_its_own_word_is_not(code: int) -> None:
    assert not may_restart(GroupEnd(code, code)), "137 is the script's own exit code here, no signal"
    assert not may_restart(GroupEnd(code))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_was_asked_to_end_is_not(number: int) -> None:
    assert not may_restart(GroupEnd(128 + number, -number))


def test_another_rank_that_the_manager_killed_is_no_reason() -> None:
    assert not may_restart(GroupEnd(1, 1))
    assert not may_restart(GroupEnd(1, -signal.SIGKILL)), "the group's code is of another rank"


LOST = GroupEnd(137, -signal.SIGKILL)


def test_restarts_are_used_up_and_come_back_after_ten_good_minutes() -> None:
    restarts = Restarts(3)
    assert restarts.left == 3
    assert [restarts.after(LOST, 1.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert restarts.left == 0 and restarts.after(LOST, GOOD_S - 1) is None
    assert restarts.after(LOST, GOOD_S) == 0.0 and restarts.left == 2


def test_no_restart_is_the_old_way() -> None:
    assert Restarts(0).after(LOST, GOOD_S) is None


def test_an_end_for_good_uses_nothing_up() -> None:
    restarts = Restarts(1)
    assert restarts.after(GroupEnd(1, 1), 1.0) is None and restarts.left == 1


def test_the_pause_grows_and_is_bounded() -> None:
    restarts = Restarts(20)
    pauses = [restarts.after(LOST, 1.0) for _ in range(20)]
    assert pauses[:6] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0] and pauses[-1] == PAUSE_S_MAX
