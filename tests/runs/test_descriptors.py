"""What a failed epoch opened is closed at once, and not when the garbage collector happens to run."""

from __future__ import annotations

import gc
import os
import time

import psutil
import pytest

from lightkeeper.manager.groups import GroupFailed, LocalKeys, start_build

SETTLE_S_MAX = 30.0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def listening() -> int:
    """Sockets of this process that wait for others."""
    return sum(one.status == psutil.CONN_LISTEN for one in psutil.Process().net_connections("tcp"))


def give_up_a_build() -> None:
    """Begins to form a group whose other member never comes, until its rendezvous keys are void."""
    keys = LocalKeys().handle()
    before = listening()
    build = start_build("gloo", keys, 0, 2, 60.0, "a group that never forms")
    until = time.monotonic() + SETTLE_S_MAX
    while listening() <= before:
        assert time.monotonic() < until, "it does not listen"
        time.sleep(0.01)
    time.sleep(0.1)  # it waits by now, or will
    keys.abort("its epoch is over")
    with pytest.raises(GroupFailed):
        build.wait()


def settled(most: int) -> int:
    until = time.monotonic() + SETTLE_S_MAX
    while descriptors() > most and time.monotonic() < until:
        time.sleep(0.01)
    return descriptors()


def test_a_build_that_was_given_up_leaves_no_descriptor() -> None:
    give_up_a_build()  # whatever gloo opens once per process
    gc.collect()
    time.sleep(0.2)
    gc.disable()
    try:
        before = descriptors()
        for _ in range(3):
            give_up_a_build()
        assert settled(before) <= before
    finally:
        gc.enable()
