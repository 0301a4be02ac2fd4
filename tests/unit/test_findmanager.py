"""How an agent finds the manager of its group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lighthouse_served import TOKEN, Speaker, hello, scene, serving

from lightkeeper.lighthouse import messages as m
from lightkeeper.manager.findmanager import Denied, ManagerFinder
from lightkeeper.manager.settings import Settings

NOBODY = "127.0.0.1:1"


def finder(lighthouse: str, **more: str) -> ManagerFinder:
    return ManagerFinder(Settings(**{"lighthouse": lighthouse, "token": TOKEN, **more}))  # type: ignore[arg-type]


def test_the_lighthouse_knows_the_manager_while_its_stream_stands() -> None:
    async def go() -> None:
        async with serving() as served:
            asks = finder(served.address)
            assert await asks.find() is None
            assert asks.why == f"the lighthouse at {served.address} knows no manager of g0 that lives"
            assert not asks.nobody
            async with Speaker(served.address) as speaker:
                await speaker.say(hello())
                await speaker.hears(m.Welcome)
                assert await asks.find() == "127.0.0.1:1"
                assert await finder(served.address, group="g1").find() is None
                assert await finder(served.address, job="other").find() is None
                assert await finder(f"{NOBODY},{served.address}").find() == "127.0.0.1:1"
            while (job := served.service.jobs.get("job")) and job.groups[
                "g0"
            ].in_touch:  # it may forget the job at once
                await asyncio.sleep(0.01)
            assert await asks.find() is None

    scene(go)


def test_nobody_to_ask_is_another_thing_than_nobody_there() -> None:
    async def go() -> None:
        asks = finder(NOBODY)
        assert await asks.find() is None
        assert asks.nobody and asks.why == f"the lighthouse at {NOBODY} is not reachable (connection refused)"

    scene(go)


def test_addresses_in_a_file_are_read_for_every_try(tmp_path: Path) -> None:
    async def go() -> None:
        path = tmp_path / "where"
        path.write_text(NOBODY)
        asks = finder(f"file:{path}")
        assert await asks.find() is None
        async with serving() as served, Speaker(served.address) as speaker:
            await speaker.say(hello())
            await speaker.hears(m.Welcome)
            path.write_text(served.address)
            assert await asks.find() == "127.0.0.1:1"
            path.unlink()
            assert await asks.find() is None
            assert asks.nobody and "cannot read" in asks.why

    scene(go)


def test_a_wrong_token_is_told_and_an_address_that_was_given_is_taken_as_it_is() -> None:
    async def go() -> None:
        async with serving() as served:
            with pytest.raises(Denied, match=f"the lighthouse at {served.address} refused our token"):
                await finder(served.address, token="wrong").find()
        assert await finder(NOBODY, manager="n0.example:29500").find() == "n0.example:29500"

    scene(go)
