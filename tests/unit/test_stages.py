"""Where the time of a restart goes."""

from __future__ import annotations

from typing import Any, TypeVar

from lightkeeper.bench._stages import group_restart, job_restart
from lightkeeper.events import schema
from lightkeeper.events.of_checkpoints import CheckpointLoaded
from lightkeeper.events.of_supervisor import GroupEnded, GroupStarted, NodeChecked
from lightkeeper.events.schema import Event

T = TypeVar("T", bound=Event)


def at(wall: float, kind: type[T], process: str = "supervisor", group: str = "g1", **fields: Any) -> T:
    return kind(process=process, group=group, wall=wall, **fields)


def until_launched(group: str, later: float = 0.0) -> list[Event]:
    return [
        at(101.0 + later, schema.GroupLost, "lighthouse", group, cause="x", detected_by="stream"),
        at(
            102.0 + later, GroupEnded, group=group, nodes=("n0",), code=-9, whose="maybe", failure="killed", step=5,
            reason="x", after_s=0.5,
        ),
        at(104.0 + later, NodeChecked, group=group, node="n3", problem="", seconds=1.5),
        at(104.1 + later, GroupStarted, group=group, nodes=("n3",), start=2),
        at(104.5 + later, schema.ProcessStarted, f"manager {group}", group),
    ]  # fmt: skip


def commit(wall: float, group: str, step: int, live: bool = True) -> schema.Committed:
    return at(
        wall, schema.Committed, f"rank {group}/0", group, step=step, epoch=1, term=1, rank=0, microbatches=(0,),
        total=1, counted=1, seconds=0.1, wait_s=0.0, live=live,
    )  # fmt: skip


def test_the_stages_of_a_group_are_those_between_what_was_written_down() -> None:
    events = [
        *until_launched("g1"), at(108.0, schema.Joined, "lighthouse"), commit(108.7, "g1", 20, live=False),
        at(109.0, schema.Rejoined, "rank g1/0", step=21, rank=0), commit(109.2, "g1", 21), commit(109.0, "g0", 20),
    ]  # fmt: skip
    assert group_restart(events, "g1", killed=100.0, imported=107.0) == {
        "detect": 1.0, "tear down": 1.0, "allocate": 0.5, "preflight": 1.6, "launch": 0.4, "import": 2.5,
        "rendezvous": 1.0, "heal": 1.0, "first step": 0.2, "all": 9.2,
    }  # fmt: skip


def test_of_a_whole_job_the_last_group_counts() -> None:
    events = [
        *until_launched("g0"), *until_launched("g1", 1.0),
        at(108.0, CheckpointLoaded, step=20, tier="shared", path="p", bytes=1, seconds=0.1, compared=True, restarts=1),
        at(109.0, schema.Joined, "lighthouse"), commit(99.0, "g0", 25), commit(109.5, "g0", 20),
        commit(109.7, "g1", 20),
    ]  # fmt: skip
    assert job_restart(events, ["g0", "g1"], killed=100.0, imported={"g0": 106.0, "g1": 107.5}) == {
        "detect": 1.0, "tear down": 2.0, "allocate": 0.5, "preflight": 1.6, "launch": 0.4, "import": 2.0, "load": 0.5,
        "rendezvous": 1.0, "first step": 0.7, "all": 9.7,
    }  # fmt: skip
