"""A lighthouse machine and managers that answer by script, for transcripts a person can read.

While it carries out actions it checks what must hold in every transcript: an epoch number is logged before it is
spoken of, a membership before it is activated, and numbers only rise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Activated, Close, Ended, Note, Promised, Rise, Send, Superseded
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, Term, origin
from lightkeeper.lighthouse.notes import event

BEAT_S = 0.25  # exact in binary, so that a lease of 2 s is eight beats
FIRST = Term(1, "lh")
SAME = {"w": "float32[2]"}


class World:
    """Drives one `JobMachine`.

    A *speaker* is one manager, named by its group (``g0``), or ``g0/i2`` for a further incarnation of it.

    Args:
        groups: configured number of groups.
        minimum: fewest groups with which the job goes on.
        history: what the log knows; filled as the machine logs.
        lease_s: how long a silence is borne.
        term: the lighthouse's reign.
        spares: how many of the groups are spares.
    """

    def __init__(
        self,
        groups: int = 3,
        minimum: int = 1,
        history: JobHistory | None = None,
        lease_s: float = 2.0,
        term: Term = FIRST,
        spares: int = 0,
    ) -> None:
        self.now, self.spares = 100.0, spares
        self.size, self.minimum, self.lease_s, self.term = groups, minimum, lease_s, term
        self.history = history or JobHistory()
        self.machine = JobMachine("job", term, self.history, Bounds(lease_s, BEAT_S), self.now)
        self.connections: dict[str, int] = {}
        self.speakers: dict[int, str] = {}
        self.sent: dict[str, list[m.ToManager]] = {}
        self.notes: list[Note] = []
        self.logged: list[Promised | Activated | Ended | Superseded] = []
        self.risen: list[Term] = []
        self.closed: list[str] = []
        self.obeyed: dict[int, Term] = {}  # by connection
        self._next = 0

    # ------------------------------------------------------------ the lighthouse

    def restart(self, log: bool = True, lighthouse: str | None = None) -> None:
        """The lighthouse dies and another starts: with the log (the same one), or with an empty disk (a new one)."""
        number = self.term.number + 1 if log else 1
        self.term = Term(number, lighthouse or (self.term.lighthouse if log else "other"))
        kept = self.history if log else JobHistory()
        self.history = kept.copy()
        self.machine = JobMachine("job", self.term, self.history, Bounds(self.lease_s, BEAT_S), self.now)
        self.connections.clear()
        self.sent.clear()
        self.logged.clear()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._check_logged(action.message)
                self.sent.setdefault(self.speakers[action.connection], []).append(action.message)
            elif isinstance(action, Note):
                event(action)  # it must be one that can be written
                self.notes.append(action)
            elif isinstance(action, Close):
                self.closed.append(self.speakers[action.connection])
            elif isinstance(action, Rise):
                self.risen.append(action.term)
            else:
                self._check_rises(action)
                self.history.apply(action)
                self.logged.append(action)

    def _check_logged(self, message: m.ToManager) -> None:
        if isinstance(message, m.Prepare):
            assert message.epoch.number <= self.history.highest, f"{message.epoch} is spoken of but not logged"
        if isinstance(message, m.Activate):
            assert self.history.membership == message.membership, (
                f"{message.membership.epoch} is not logged as in force"
            )

    def _check_rises(self, record: Promised | Activated | Ended | Superseded) -> None:
        if isinstance(record, Promised):
            assert record.number > self.history.highest, (
                f"epoch {record.number} does not rise above {self.history.highest}"
            )
        if isinstance(record, Activated) and self.history.membership is not None:
            assert record.membership.epoch >= self.history.membership.epoch, "an older epoch comes into force"

    # ------------------------------------------------------------ what managers say

    def hello(self, speaker: str, reads: bool = True, **more: Any) -> None:
        """A stream begins; `more` replaces fields of the `Hello`. Who `reads` acknowledges the `Welcome`."""
        group, _, incarnation = speaker.partition("/")
        self._next += 1
        self.connections[speaker] = self._next
        self.speakers[self._next] = speaker
        fields = {"groups": self.size, "minimum": self.minimum, "spares": self.spares, **more}
        self.say(speaker, m.Hello("job", group, incarnation or f"{group}i1", f"{group}:1", **fields))
        if reads:
            self.acknowledge(*self.speakers.values())

    def acknowledge(self, *speakers: str) -> None:
        """These have read the newest `Welcome`, if there is one that they have not answered."""
        for speaker in speakers:
            welcomes = self.told(speaker, m.Welcome)
            if welcomes and self.obeyed.get(self.connections[speaker]) != welcomes[-1].term:
                self.obeyed[self.connections[speaker]] = welcomes[-1].term
                self.say(speaker, m.Acknowledged(welcomes[-1].term))

    def join(self, speaker: str, signature: Mapping[str, str] = SAME, fingerprint: str = "", step: int = 0) -> None:
        self.say(speaker, m.Join((f"{speaker}:2",), signature, fingerprint, step))

    def arrive(self, *speakers: str, **more: Any) -> None:
        """Hello and join."""
        for speaker in speakers:
            self.hello(speaker, **more)
            self.join(speaker)

    def arrive_if_taken(self, speaker: str, **more: Any) -> None:
        """Hello, and join if it was not sent on."""
        before = len(self.told(speaker, m.Refused))
        self.hello(speaker, **more)
        if len(self.told(speaker, m.Refused)) == before:
            self.join(speaker)

    def fence(self, group: str, by: str, incarnation: str = "") -> str:
        """The operator's word; returns why it is refused."""
        actions, refused = self.machine.fence(group, by, self.now, incarnation)
        self._carry_out(actions)
        return refused

    def start(self, *names: str, total: int = 24) -> Epoch:
        """All groups arrive and promise; returns the first epoch."""
        names = names or tuple(f"g{i}" for i in range(self.size))
        self.arrive(*names)
        self.promise_all(total=total)
        self.sent.clear()
        return self.newest.epoch

    @property
    def newest(self) -> Membership:
        assert self.machine.newest is not None
        return self.machine.newest

    def promise(
        self,
        speaker: str,
        step: int = -1,
        held: tuple[int, ...] = (),
        total: int = 24,
        known: Membership | None = None,
        entry: Epoch | None = None,
        prepared: tuple[Membership, ...] = (),
        begins: int = 0,
    ) -> None:
        """Answers the newest recovery's `Prepare`; `step` is the last that the group committed, -1 for none: then its
        state is the one before the step `begins`.
        """
        epoch = self.asked(speaker)
        known = known or self.machine.newest
        last = origin(begins) if begins else None
        if step >= 0:
            named = entry or (known.epoch if known else None)
            assert named is not None
            last = Entry(named, step)
        self.say(speaker, m.Promise(epoch, known, prepared, last, held, total))

    def promise_all(self, step: int = -1, held: Mapping[str, tuple[int, ...]] | None = None, total: int = 24) -> None:
        assert self.machine.recovery is not None
        for group in sorted(self.machine.recovery.asked):
            self.promise(group, step, (held or {}).get(group, ()), total)

    def beat(
        self,
        speaker: str,
        step: int,
        phase: str = "compute",
        waiting_ms: int = 0,
        epoch: int | None = None,
        stopped_ms: int = 0,
        microbatch_ms: float = 0.0,
        total: int = 24,
        **more: Any,
    ) -> None:
        if epoch is None:
            epoch = 0 if self.machine.newest is None else self.newest.epoch.number
        pace_us = round(1000 * microbatch_ms)
        self.say(speaker, m.Beat(epoch, step, phase, waiting_ms, stopped_ms, pace_us, total, **more))

    def fail(
        self, speaker: str, step: int = 0, error: str = "connection closed by peer", suspects: tuple[str, ...] = ()
    ) -> None:
        self.say(speaker, m.Failed(self.newest.epoch, step, error, suspects))

    def die(
        self, speaker: str, cause: str = "rank 0 was killed by SIGKILL", step: int = 0, error: m.UserError | None = None
    ) -> None:
        self.say(speaker, m.Died(cause, 0, "reduce", step, error))

    def say(self, speaker: str, message: m.ToLighthouse) -> None:
        group = speaker.partition("/")[0]
        self._carry_out(self.machine.received(self.connections[speaker], group, message, self.now))

    def cut(self, *speakers: str) -> None:
        """Their streams break."""
        for speaker in speakers:
            self._carry_out(self.machine.disconnected(self.connections[speaker], self.now))

    # ------------------------------------------------------------ time

    def pass_s(self, seconds: float, beating: Mapping[str, int] | None = None, waiting_ms: int = 0) -> None:
        """Time passes in ticks of a beat, while some groups beat at a step (standing in a reduce, if `waiting_ms`)."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for group, step in (beating or {}).items():
                self.beat(group, step, "reduce" if waiting_ms else "compute", waiting_ms)
            self.tick()

    def tick(self) -> None:
        self._carry_out(self.machine.tick(self.now))

    # ------------------------------------------------------------ what they were told

    def told(self, speaker: str, kind: type) -> list[Any]:
        return [message for message in self.sent.get(speaker, []) if isinstance(message, kind)]

    def asked(self, speaker: str) -> Epoch:
        """Epoch of the newest recovery's `Prepare` that this group was sent."""
        asked = [p.epoch for p in self.told(speaker, m.Prepare) if p.planned is None]
        assert asked, f"{speaker} was not asked for a promise; it was told {self.sent.get(speaker)}"
        return asked[-1]

    def is_asked(self, speaker: str) -> bool:
        return any(p.planned is None for p in self.told(speaker, m.Prepare))

    def planned(self, speaker: str) -> Membership:
        """The newest planned change that this group was told of."""
        planned = [p.planned for p in self.told(speaker, m.Prepare) if p.planned is not None]
        assert planned, f"{speaker} was told of no planned change"
        return planned[-1]

    def activate(self, speaker: str) -> m.Activate:
        """The newest `Activate` that this group was sent."""
        sent = self.told(speaker, m.Activate)
        assert sent, f"{speaker} was not sent an Activate; it was told {self.sent.get(speaker)}"
        return sent[-1]

    def shares(self, speaker: str) -> dict[str, tuple[int, ...]]:
        return {share.group: share.microbatches for share in self.activate(speaker).shares}

    def reason(self, speaker: str) -> str:
        """Why it was refused, stopped or fenced, or for whom it waits: the newest such line."""
        kinds = (m.Refused, m.Stop, m.Fence, m.Waiting)
        said = [message for message in self.sent.get(speaker, []) if isinstance(message, kinds)]
        assert said, f"{speaker} was given no reason; it was told {self.sent.get(speaker)}"
        last = said[-1]
        return f"{', '.join(last.whom)}: {last.why}" if isinstance(last, m.Waiting) else last.reason

    def forget_sent(self) -> None:
        self.sent.clear()

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [dict(note.fields) for note in self.notes if note.kind == kind]
