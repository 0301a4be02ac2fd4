"""What `bench titan` makes of an event log, of what torchft's programs print, and how two runs take turns."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import msgspec
import pytest

from lightkeeper.bench import titan
from lightkeeper.bench._titan import Turns, tell
from lightkeeper.bench._titan_peer import figures as peer_figures
from lightkeeper.errors import ToldError
from lightkeeper.events.schema import Committed, Copied, Event, GroupLost, Healed, Joined, Recovered, Rejoined

KILLED_S = 10.05


def commit(group: str, step: int, at: float, seconds: float, share: tuple[int, ...], live: bool = True) -> Committed:
    return Committed(
        group=group, incarnation=f"{group}-1", step=step, epoch=1, total=2, microbatches=share, seconds=seconds,
        live=live, fingerprint=f"f{step}", mono_ns=round(at * 1e9),
    )  # fmt: skip


def run() -> list[Event]:
    """Steps of 0.5 s; g1 is killed at 10.05 s, asks again at 14 s, and is a member from step 28 on."""
    events: list[Event] = []
    for step in range(20):
        at = 0.5 * (step + 1)
        events += [commit("g0", step, at, 0.5, (0,)), commit("g1", step, at, 0.5, (1,))]
    events.append(
        GroupLost(group="g1", incarnation="g1-1", cause="killed", detected_by="manager", mono_ns=10_060_000_000)
    )
    events += [commit("g0", 20, 10.8, 0.8, (0, 1)), Recovered(group="g0", step=20, epoch=2, stall_s=0.03)]
    at = 10.8
    for step in range(21, 32):
        at += 0.9 if step == 27 else 0.6
        if step == 26:
            events.append(Joined(group="g1", incarnation="g1-2", mono_ns=round((at - 0.3) * 1e9)))
            events.append(Copied(group="g0", step=26, pause_s=0.01, mono_ns=round(at * 1e9)))
            events.append(
                Healed(group="g1", incarnation="g1-2", step=26, bytes=1, seconds=0.1, mono_ns=round(at * 1e9) + 1)
            )
        if step == 28:
            events.append(Rejoined(group="g1", incarnation="g1-2", step=28, mono_ns=round(at * 1e9)))
        events.append(commit("g0", step, at, 0.9 if step == 27 else 0.6, (0, 1)))
        if step > 28:
            events.append(commit("g1", step, at, 0.6, (1,)))
    return events


def test_the_figures_of_a_kill_and_a_return() -> None:
    found = titan.figures(run(), round(KILLED_S * 1e9))
    assert (found["step_s"], found["kill_to_commit_s"], found["microbatches_inherited"]) == (0.5, 0.75, 1)
    assert (found["stood_in_recovery_s"], found["detected_s"], found["blamed"]) == (0.03, 0.01, "g1")
    assert (found["rejoin_longest_step_s"], found["rejoin_over_usual"]) == (0.9, 1.5)
    assert found["steps_lost"] == 0 and found["bits_equal"]


@pytest.mark.parametrize("wrong", ["f30", ""])
def test_other_bits_after_the_return_or_none_told_are_not_equal(wrong: str) -> None:
    events = [
        msgspec.structs.replace(e, fingerprint=wrong and "other")
        if isinstance(e, Committed) and e.group == "g1" and e.step >= 28
        else e
        for e in run()
    ]
    assert not titan.figures(events, round(KILLED_S * 1e9))["bits_equal"]


def test_a_survivor_that_goes_on_no_more_gives_no_figures() -> None:
    with pytest.raises(StopIteration):
        titan.figures([e for e in run() if e.mono_ns <= KILLED_S * 1e9], round(KILLED_S * 1e9))


# ---------------------------------------------------------------- torchft


def row(at: float, seconds: float, before: int, after: int) -> str:
    return f"ZZ rid=0 rank=0 t={at:.3f} dt={seconds:.3f} tstep={after} mstep={before}->{after} nparts=1 prank=0 lr=0.1"


TOLD = "KILL t=10.100 pids=[7, 8] survivor_step=20\nRESTART t=12.300 (+2.20)\nexit codes {0: 0, 1: 0} total 70.1s\n"
SURVIVOR = "\n".join(
    [
        *(row(0.5 * (i + 1), 0.5, i, i + 1) for i in range(20)),
        row(15.5, 5.5, 20, 20),  # stood for the dead one, and threw the step away
        *(row(16.0 + 0.5 * i, 0.5, 20 + i, 21 + i) for i in range(10)),
        row(22.0, 1.5, 30, 31),
        row(22.6, 0.6, 31, 32),
    ]
)
VICTIM = "\n".join([row(10.0, 0.5, 19, 20), row(22.0, 1.8, 0, 31), row(22.6, 0.6, 31, 32)])


def test_torchfts_figures_are_read_from_what_its_programs_print() -> None:
    assert peer_figures(TOLD, SURVIVOR, VICTIM) == {
        "kill_to_commit_s": 5.9,
        "step_s": 0.5,
        "steps_thrown_away": 1,
        "rejoin_longest_step_s": 1.5,
        "rejoin_over_usual": 3.0,
        "restart_to_commit_s": 9.7,
    }


@pytest.mark.parametrize(
    ("told", "survivor", "victim", "says"),
    [
        ("survivor died/limit\n", SURVIVOR, VICTIM, "did not say when"),
        (TOLD, SURVIVOR, VICTIM.splitlines()[0], "did not come back"),
        (TOLD, "\n".join(SURVIVOR.splitlines()[:21]), VICTIM, "did not go on"),
    ],
)
def test_what_torchft_did_not_do_is_told(told: str, survivor: str, victim: str, says: str) -> None:
    with pytest.raises(ToldError, match=says):
        peer_figures(told, survivor, victim)


# ---------------------------------------------------------------- turns


def test_a_loop_stands_between_its_blocks_until_it_is_told_to_go_on(tmp_path: Path) -> None:
    done: list[int] = []

    def loop() -> None:
        turns = Turns(tmp_path, "ours-0", warm=2, block=3)
        for step in range(1, 9):
            done.append(step)
            turns.ended(step)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    for number, last in ((0, 2), (1, 5)):
        seconds = _await(tmp_path / f"ours-0-{number}")
        assert len(json.loads(seconds)) == (2, 3)[number] and done == list(range(1, last + 1)) and thread.is_alive()
        tell(tmp_path, f"go-ours-0-{number + 1}", True)
    _await(tmp_path / "ours-0-2")
    assert done == list(range(1, 9))
    tell(tmp_path, "go-ours-0-3", True)
    thread.join(10)
    assert not thread.is_alive()


def _await(path: Path) -> str:
    until = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < until, path.name
        time.sleep(0.002)
    return path.read_text()
