"""What a failed epoch opened is closed at once, and not when the garbage collector happens to run."""

from __future__ import annotations

import gc
import os
import time

import pytest

from lightkeeper.manager.groups import GroupFailed, LocalKeys, start_build


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def give_up_a_build() -> None:
    """Begins to form a group whose other member never comes, until its rendezvous keys are void."""
    keys = LocalKeys().handle()
    build = start_build("gloo", keys, 0, 2, 20.0, "a group that never forms")
    time.sleep(0.1)  # it listens by now, and waits
    keys.abort("its epoch is over")
    with pytest.raises(GroupFailed):
        build.wait()


def settled(most: int) -> int:
    until = time.monotonic() + 2
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
