"""A lighthouse process: the real membership machine with its disk, at one address of the list."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated, Close, Ended, Note, Promised, Rise, Send, Superseded
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.names import Term
from lightkeeper.lighthouse.silence import Patience
from lightkeeper.simulator.clock import Process
from lightkeeper.simulator.network import KEEPALIVE_S, Stream

if TYPE_CHECKING:
    from lightkeeper.simulator.world import World


class Patient(Bounds):
    """The times of a job a hundred times as large: silence is asked about."""

    TIMES = 100

    def patience(self, groups: int) -> Patience:
        """As in `Bounds`."""
        return Patience.of(self.TIMES * groups, self.lease_s, self.beat_s)


@dataclass
class Disk:
    """The log's folder: whose it is, its last term, and what it says of the job."""

    lighthouse: str
    number: int = 0
    history: JobHistory = field(default_factory=JobHistory)


class Lighthouse(Process):
    """What listens at an address: up, or down; a restart keeps the disk or starts with an empty one.

    Attributes:
        heard: when something of an incarnation last came in, by this process's own clock.
        awake_s: since when it runs without a gap, by its own clock.
    """

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world.clock, f"lh{index}")
        self.world, self.address = world, f"lh{index}"
        self.starts = 0
        self.up = False
        self.streams: dict[int, Stream] = {}
        self.heard: dict[str, float] = {}
        self.awake_s = self._ran_s = 0.0
        self.disk = Disk("")
        self.start(keep=False)
        self.clock.after(self.clock.uniform(0.05, 0.15), self._tick)

    def start(self, keep: bool) -> None:
        """Starts with the log, or as another lighthouse with an empty disk."""
        self.starts += 1
        if not keep:
            self.disk = Disk(f"{self.address}.{self.starts}")
        self.up, self.frozen_until, self.offset_s = True, 0.0, 0.0
        self.heard, self.awake_s, self._ran_s = {}, self.now, self.now
        disk, shape = self.disk, self.world.shape
        disk.number += 1
        term = Term(disk.number, disk.lighthouse)
        self.world.checkers.reigns(term)
        history = disk.history
        copy = history.copy()
        bounds = Patient(shape.lease_s, shape.beat_s) if shape.times > 1 else Bounds(shape.lease_s, shape.beat_s)
        self.machine = JobMachine("job", term, copy, bounds, self.now)
        self.world.say(f"{self.address} starts as {term}, {'with its log' if keep else 'with an empty disk'}")

    def stop(self) -> None:
        """The process dies."""
        self.up = False
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.lighthouse_gone(orderly=False)
        self.world.say(f"{self.address} dies")

    def stand_still(self, seconds: float, unseen: bool) -> None:
        """Stands still for so long; keepalives are not answered meanwhile."""
        self.freeze(seconds, unseen)
        for stream in self.streams.values():
            self.clock.after(self.clock.uniform(*KEEPALIVE_S), self._unless_thawed, stream)

    def jump(self, seconds: float) -> None:
        """Its clock jumps ahead."""
        self.offset_s += seconds

    def _unless_thawed(self, stream: Stream) -> None:
        if self.frozen:
            stream.lost_at_manager()

    # ------------------------------------------------------------ streams

    def take(self, stream: Stream, message: m.ToLighthouse) -> None:
        """A manager's message; the first on a stream opens it here."""
        if not self.up:
            stream.break_it()
            return
        if self.sleeps(self.take, stream, message):
            return
        if not stream.at_lighthouse:
            if not isinstance(message, m.Hello):
                return  # of a stream that is over here
            stream.at_lighthouse = True
            self.streams[stream.number] = stream
        self._runs()
        self.world.checkers.hears(self, stream, message)
        actions = self.machine.received(stream.number, stream.process.group, message, self.now)
        group = self.machine.groups.get(stream.process.group)
        if group is not None and group.connection == stream.number:
            self.heard[stream.process.incarnation] = self.now  # what comes late on another stream is no sign of life
        self.act(actions)

    def lost(self, stream: Stream) -> None:
        """A stream is over."""
        if not self.up or self.sleeps(self.lost, stream):
            return
        if self.streams.pop(stream.number, None) is not None:
            stream.at_lighthouse, stream.up.broken = False, True
            self.world.checkers.looks(self)
            self.act(self.machine.disconnected(stream.number, self.now))

    def fence(self, group: str) -> bool:
        """The operator's word that a group is gone; returns whether it was taken."""
        actions, refused = self.machine.fence(group, "operator", self.now)
        self.world.say(f"operator to {self.address}: {group} is gone{refused and ': refused, ' + refused}")
        self.act(actions)
        return not refused

    # ------------------------------------------------------------ actions

    def act(self, actions: list[Any]) -> None:
        """Carries out what the machine decided, in order."""
        checkers = self.world.checkers
        for action in actions:
            if isinstance(action, Send):
                checkers.spoken(self, action.message)
                if (stream := self.streams.get(action.connection)) is not None:
                    stream.down.send(action.message)
            elif isinstance(action, Note):
                checkers.noted(self, action)
                if self.world.traces:
                    self.world.say(f"{self.address}: {action.kind} " + _words(action.fields))
            elif isinstance(action, Close):
                if (stream := self.streams.pop(action.connection, None)) is not None:
                    stream.lighthouse_gone(orderly=True)
                    self.clock.after(0.0, self._ended, action.connection)
            elif isinstance(action, Promised | Activated | Ended | Superseded):
                self.disk.history.apply(action)
                checkers.logged(self, action)
            elif isinstance(action, Rise):
                self.disk.number = action.term.number
                self.machine.term = action.term
                checkers.reigns(action.term)

    def _ended(self, connection: int) -> None:
        """The stream that it closed is over for it, as for the real service when its generator ends."""
        if self.up and not self.sleeps(self._ended, connection):
            self.world.checkers.looks(self)
            self.act(self.machine.disconnected(connection, self.now))

    def _runs(self) -> None:
        """Notes a gap in its own clock; one shorter than the lease may pass for the others' silence."""
        if self.now - self._ran_s > self.world.shape.lease_s:
            self.awake_s = self.now
        self._ran_s = self.now

    def _tick(self) -> None:
        self.clock.after(self.world.shape.beat_s / 2, self._tick)
        if self.up and not self.frozen:
            self._runs()
            self.world.checkers.looks(self)
            self.act(self.machine.tick(self.now))


def _words(fields: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())
