"""Rendezvous keys: nothing of an epoch that is over can be set, read or waited for."""

from __future__ import annotations

import asyncio

import pytest

from lightkeeper.manager.keys import VALUE_BYTES_MAX, KeyRefused, Keys

BOUND_S = 5.0


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, BOUND_S))


def test_a_key_is_there_at_once_and_for_who_waited() -> None:
    async def scene() -> None:
        keys = Keys()
        waiting = [asyncio.create_task(keys.get(3, "a", BOUND_S)) for _ in range(2)]
        await asyncio.sleep(0)
        keys.set(3, "a", b"value")
        assert await asyncio.gather(*waiting) == [b"value", b"value"]
        assert await keys.get(3, "a", 0.0) == b"value"

    run(scene())


def test_keys_of_two_epochs_do_not_meet() -> None:
    async def scene() -> None:
        keys = Keys()
        keys.set(3, "a", b"3")
        with pytest.raises(TimeoutError):
            await keys.get(4, "a", 0.01)
        keys.set(4, "a", b"4")
        assert await keys.get(3, "a", 0.01) == b"3"

    run(scene())


def test_when_an_epoch_is_over_its_keys_are_void_and_who_waits_is_refused() -> None:
    async def scene() -> None:
        keys = Keys()
        keys.set(3, "a", b"x")
        waiting = asyncio.create_task(keys.get(3, "b", BOUND_S))
        later = asyncio.create_task(keys.get(4, "b", BOUND_S))
        await asyncio.sleep(0)
        keys.drop(4)
        with pytest.raises(KeyRefused, match="epoch 3 is over"):
            await waiting
        for attempt in (keys.get(3, "a", BOUND_S), keys.get(2, "a", BOUND_S)):
            with pytest.raises(KeyRefused, match="is over"):
                await attempt
        with pytest.raises(KeyRefused, match="epoch 3 is over"):
            keys.set(3, "b", b"late")
        keys.set(4, "b", b"y")
        assert await later == b"y"

    run(scene())


def test_what_is_over_stays_over() -> None:
    keys = Keys()
    keys.drop(5)
    keys.drop(2)
    with pytest.raises(KeyRefused):
        keys.set(4, "a", b"")


def test_who_gave_up_waiting_does_not_hinder_who_did_not() -> None:
    async def scene() -> None:
        keys = Keys()
        with pytest.raises(TimeoutError):
            await keys.get(3, "a", 0.01)
        waiting = asyncio.create_task(keys.get(3, "a", BOUND_S))
        await asyncio.sleep(0)
        keys.set(3, "a", b"x")
        assert await waiting == b"x"
        keys.drop(9)

    run(scene())


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys()
    keys.set(1, "a", b"x" * VALUE_BYTES_MAX)
    with pytest.raises(KeyRefused, match="key 'b': more than"):
        keys.set(1, "b", b"x" * (VALUE_BYTES_MAX + 1))
    monkeypatch.setattr("lightkeeper.manager.keys.KEYS_MAX", 1)
    with pytest.raises(KeyRefused, match="or 1 keys"):
        keys.set(1, "c", b"x")
