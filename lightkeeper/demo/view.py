"""What a person watches while a run goes on: a small table in a terminal, plain lines elsewhere.

`RunState` is fed events and knows nothing of terminals; `View` draws it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightkeeper.events import schema
from lightkeeper.events.reader import seconds_between
from lightkeeper.events.schema import Committed, Event

RATE_STEPS = 10
NOTES_KEPT = 6
PLAIN_EVERY_S = 2.0
WAITING_EVERY_S = 10.0


@dataclass
class GroupState:
    """One group, as the events tell it.

    Attributes:
        state: "starting", "joined", "healing", "replaying", "training", "lost (signal 9)", "finished", ...
        step: last step it committed, -1: none.
        microbatches: how many it computed in that step.
        gone: it is no longer part of the run.
        incarnation: which start of it this is, once known; what is told of an earlier one no longer counts.
    """

    state: str = "starting"
    step: int = -1
    microbatches: int = 0
    gone: bool = False
    incarnation: str = ""


@dataclass
class RunState:
    """The run, as the events tell it so far."""

    steps: int = 0
    step: int = -1
    loss: float | None = None
    tokens_per_s: float | None = None
    epoch: int | None = None
    members: tuple[str, ...] = ()
    waiting: str = ""
    groups: dict[str, GroupState] = field(default_factory=dict)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))
    _told_waiting: tuple[str, float] = ("", 0.0)
    _recent: deque[Committed] = field(default_factory=lambda: deque(maxlen=RATE_STEPS + 1))

    def update(self, event: Event) -> str | None:
        """Take one event in.

        Returns:
            A line worth telling a person, or None.
        """
        note = self._take(event)
        if note is not None:
            self.notes.append(note)
        return note

    def starting(self, names: Iterable[str]) -> list[str]:
        """Those that have yet to join, before the first epoch."""
        if self.epoch is not None:
            return []
        return [name for name in names if name not in self.groups or self.groups[name].state == "starting"]

    def _group(self, name: str) -> GroupState:
        return self.groups.setdefault(name, GroupState())

    def _take(self, event: Event) -> str | None:
        match event:
            case Committed():
                self._committed(event)
                return None
            case schema.Waiting():
                return self._waits(event)
            case schema.Activated():
                if self.epoch is not None and event.epoch <= self.epoch:
                    return None
                self.epoch, self.members, self.waiting = event.epoch, event.members, ""
                why = f" ({event.cause})" if event.cause else ""
                return f"epoch {event.epoch} from step {event.first_step} on: {', '.join(event.members)}{why}"
            case schema.FaultInjected():
                target = event.target or event.group
                return f"fault: {event.fault} of {target}, phase {event.phase}, step {event.step}"
            case schema.Adopted():
                return f"{event.group} adopted the entry of step {event.step} from {event.donor}"
            case schema.Recovered():
                return f"{event.group} went on with step {event.step}, {len(event.further)} more microbatches"
            case schema.Diverged():
                return f"{event.group} does not hold the same bits as the others, after {event.step} steps"
            case schema.JobStopped():
                return f"the job has ended: {event.reason}"
            case _:
                return self._about_a_group(event)

    def _waits(self, event: schema.Waiting) -> str | None:
        """Told when it is somebody else, and then now and then."""
        self.waiting = f"{event.whom} since {event.since_s:.1f} s" + (f" ({event.why})" if event.why else "")
        whom, since_s = self._told_waiting
        if whom == event.whom and 0 <= event.since_s - since_s < WAITING_EVERY_S:
            return None
        self._told_waiting = (event.whom, event.since_s)
        return f"waiting for {self.waiting}"

    def _about_a_group(self, event: Event) -> str | None:
        match event:
            case schema.ProcessStarted():
                if not event.group or not self._group(event.group).gone:
                    return None
                self.groups[event.group] = GroupState()
                return f"{event.group} is started again"
            case schema.Joined():
                self.groups[event.group] = GroupState("joined", incarnation=event.incarnation)
                return f"{event.group} joined"
            case schema.Healing() | schema.Healed() | schema.HealFailed() | schema.Rejoined():
                return self._comes_back(event)
            case schema.Copied():
                return f"{event.group} copied its state for a joiner, in {event.pause_s * 1000:.1f} ms"
            case schema.Refused():
                self._set(event, "refused")
                return f"{event.group or 'somebody'} was refused: {event.reason}"
            case schema.GroupLost():
                self._set(event, f"lost ({event.cause})")
                return f"{event.group} is lost: {event.cause}, seen by {event.detected_by}"
            case schema.Fenced():
                if not self._group(event.group).gone:  # why it was lost says more
                    self._set(event, "fenced")
                return f"{event.group} is fenced: {event.reason}"
            case schema.Finished():
                self._set(event, "finished")
            case schema.Left():
                self._set(event, "left")
            case schema.UserError():
                self._set(event, f"failed ({event.type})")
                return f"{event.group} rank {event.rank} raised {event.type}: {event.message}"
            case _:
                pass
        return None

    def _comes_back(self, event: Event) -> str | None:
        group = self._group(event.group)
        match event:
            case schema.Healing():
                group.state = "healing"
                return f"{event.group} heals: the members' state before step {event.step}"
            case schema.Healed():
                group.state = "replaying"
                mib = event.bytes / (1 << 20)
                return f"{event.group} has the state before step {event.step}: {mib:.1f} MiB in {event.seconds:.2f} s"
            case schema.HealFailed():
                return f"{event.group} has to heal anew: {event.reason}"
            case schema.Rejoined():
                group.state = "rejoined"
                return f"{event.group} is a member again, from step {event.step} on"
            case _:
                return None

    def _set(self, event: Event, state: str) -> None:
        if event.group:
            group = self._group(event.group)
            if not group.incarnation or event.incarnation in ("", group.incarnation):
                group.state, group.gone = state, True

    def _committed(self, event: Committed) -> None:
        group = self._group(event.group)
        if not group.gone and group.incarnation in ("", event.incarnation):
            group.state = "training" if event.live else "replaying"
        group.step, group.microbatches = event.step, len(event.microbatches)
        if event.step <= self.step:
            return
        self.step, self.waiting = event.step, ""
        self.loss = event.loss if event.loss is not None else self.loss
        self._recent.append(event)
        seconds = seconds_between(self._recent[0], event)
        tokens = sum(commit.tokens or 0.0 for commit in list(self._recent)[1:])
        self.tokens_per_s = tokens / seconds if seconds > 0 and tokens else self.tokens_per_s

    def figures(self) -> list[str]:
        """Step, loss, rate, epoch, and what is waited for; what is not known yet is left out."""
        parts = [f"step {self.step + 1}/{self.steps}" if self.steps else f"step {self.step + 1}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}")
        if self.waiting:
            parts.append(f"waiting for {self.waiting}")
        return parts

    def line(self) -> str:
        """The state in one line."""
        groups = (f"{name}:{group.state}" for name, group in sorted(self.groups.items()))
        return "  ".join([*self.figures(), *groups])


def render(state: RunState, title: str) -> RenderableType:
    """The state as a table, with the latest notes below."""
    table = Table(expand=False)
    for column, justify in (
        ("group", "left"),
        ("state", "left"),
        ("step", "right"),
        ("microbatches", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, group in sorted(state.groups.items()):
        style = "red" if group.gone and group.state not in ("finished", "left") else "green"
        step = "-" if group.step < 0 else str(group.step + 1)
        table.add_row(name, Text(group.state, style=style), step, str(group.microbatches))
    head = Text("  ".join(state.figures()), style="bold")
    return Group(Text(title), head, table, *(Text("  " + note, style="dim") for note in state.notes))


class View:
    """Draws a run. In a terminal a table that is redrawn, elsewhere lines: notes at once, progress now and
    then.

    Args:
        title: stands above it.
        steps: steps of the run.
        stream: where to draw; standard output by default.
        live: draw a table; None: if the stream is a terminal.
    """

    def __init__(self, title: str, steps: int, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.state = RunState(steps=steps)
        self._title = title
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        if self._console.is_terminal if live is None else live:
            self._live = Live(console=self._console, auto_refresh=False)
        self._last_plain: Event | None = None

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        else:
            self._say(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self.draw()
            self._live.stop()
        else:
            self._say(self.state.line())

    def update(self, event: Event) -> None:
        """Take one event in."""
        note = self.state.update(event)
        if self._live is not None:
            return
        if note is not None:
            self._say(note)
        elif isinstance(event, Committed) and event.step == self.state.step and self._is_due(event):
            self._last_plain = event
            self._say(self.state.line())

    def _is_due(self, event: Event) -> bool:
        last = self._last_plain
        return last is None or seconds_between(last, event) >= PLAIN_EVERY_S

    def draw(self) -> None:
        """Redraw the table, if there is one."""
        if self._live is not None:
            self._live.update(render(self.state, self._title), refresh=True)

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
