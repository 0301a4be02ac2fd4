"""The demo's view, from events written by hand."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from demo_runs import BEFORE, LAST, STEPS, commits, faulty_run, healed_run

from lightkeeper.demo.view import RunState, View, render
from lightkeeper.events import schema
from lightkeeper.events.schema import Event, GroupLost


def test_state_follows_the_events() -> None:
    state = RunState(steps=STEPS)
    notes = [note for event in faulty_run() if (note := state.update(event))]
    assert state.step == LAST
    assert state.loss == pytest.approx(2.9)
    assert state.tokens_per_s == pytest.approx(512)
    assert state.epoch == 2
    assert state.groups["g0"].state == "training"
    assert state.groups["g1"].state == "lost (signal 9)"
    assert "fault: kill of rank g1/0, phase reduce, step 4" in notes
    assert "g1 is lost: signal 9, seen by stream" in notes
    assert "epoch 2 from step 4 on: g0, g2 (g1 lost)" in notes
    assert state.line().startswith("step 12/12  loss 2.9000  512 tokens/s  epoch 2  g0:training")
    state.update(schema.Finished(step=12, group="g0"))
    assert state.groups["g0"].state == "finished"


def test_state_shows_the_way_back() -> None:
    state, seen = RunState(steps=STEPS), list[str]()
    notes = []
    for event in healed_run():
        notes.append(state.update(event))
        if state.groups.get("g1") and state.groups["g1"].state not in seen[-1:]:
            seen.append(state.groups["g1"].state)
    at = seen.index("lost (signal 9)")
    assert seen[at + 1 :] == ["starting", "joined", "healing", "replaying", "rejoined", "training"]
    assert "g1 is started again" in notes
    assert "g1 has the state before step 7: 1.0 MiB in 0.25 s" in notes
    assert "g1 is a member again, from step 8 on" in notes
    late = GroupLost(group="g1", incarnation="g1-1", cause="silent", detected_by="lease")
    state.update(late)
    assert state.groups["g1"].state == "training", "what is told of the first start no longer counts"


def test_groups_start_until_they_have_joined_or_an_epoch_is_in_force() -> None:
    state = RunState(steps=STEPS)
    state.update(schema.ProcessStarted(group="g0", process="manager g0"))
    assert state.starting(["g0", "g1"]) == ["g0", "g1"]
    state.update(schema.Joined(group="g0", incarnation="i"))
    assert state.starting(["g0", "g1"]) == ["g1"]
    state.update(schema.Activated(epoch=1, first_step=0, members=("g0",)))
    assert state.starting(["g0", "g1"]) == []


def test_state_says_what_is_waited_for_until_it_goes_on() -> None:
    state = RunState(steps=STEPS)
    assert state.update(schema.Waiting(whom="g2", since_s=3.25, why="to join")) == (
        "waiting for g2 since 3.2 s (to join)"
    )
    assert "waiting for g2" in state.line()
    state.update(commits(0, BEFORE, 1)[0])
    assert "waiting" not in state.line()


@pytest.mark.parametrize("kind", schema.KINDS, ids=lambda kind: kind.__name__)
def test_state_takes_every_kind(kind: type[Event]) -> None:
    values = {"str": "x", "int": 1, "float": 1.0, "bool": True, "tuple": ("g0",), "dict": {"compute": 15.0}}
    needed = {f.name: values[f.type.__name__] for f in msgspec.structs.fields(kind) if f.required}
    state = RunState(steps=STEPS)
    state.update(kind(group="g0", **needed))
    state.line()


def test_table_is_drawn() -> None:
    state = RunState(steps=STEPS)
    for event in faulty_run():
        state.update(event)
    drawn = io.StringIO()
    Console(file=drawn, width=100).print(render(state, "title"))
    text = drawn.getvalue()
    assert "step 12/12" in text
    assert "lost (signal 9)" in text


def test_plain_view_has_no_control_characters() -> None:
    stream = io.StringIO()
    with View("three groups", STEPS, stream) as view:
        for event in faulty_run():
            view.update(event)
            view.draw()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "three groups"
    assert "fault: kill of rank g1/0, phase reduce, step 4" in lines
    assert lines[-1].startswith("step 12/12")
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) < STEPS, "progress is told now and then, not at every step"


def test_live_view_draws_in_a_terminal() -> None:
    stream = io.StringIO()
    with View("three groups", STEPS, stream, live=True) as view:
        view.update(faulty_run()[0])
        view.draw()
    assert "three groups" in stream.getvalue()
