"""A lighthouse machine and managers that answer by script, for transcripts a person can read."""

from __future__ import annotations

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Activated, Close, Ended, Note, Promised, Send
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, Term

TERM = Term(1, "lh")


class World:
    """Drives one `JobMachine`; `sent` holds what each group was sent since it was last read."""

    def __init__(self, groups: int = 3, minimum: int = 1, history: JobHistory | None = None, lease_s: float = 2.0):
        self.now = 100.0
        self.history = history or JobHistory()
        self.machine = JobMachine("job", TERM, self.history, Bounds(lease_s), self.now)
        self.size, self.minimum = groups, minimum
        self.connections: dict[str, int] = {}
        self.sent: dict[str, list[m.ToManager]] = {}
        self.notes: list[Note] = []
        self.logged: list[Promised | Activated | Ended] = []
        self.closed: set[int] = set()
        self._next = 0

    def _carry_out(self, actions: list[Action]) -> None:
        by_connection = {connection: group for group, connection in self.connections.items()}
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(by_connection[action.connection], []).append(action.message)
            elif isinstance(action, Note):
                self.notes.append(action)
            elif isinstance(action, Close):
                self.closed.add(action.connection)
            elif isinstance(action, Promised | Activated | Ended):
                self.history.apply(action)
                self.logged.append(action)

    def hello(self, group: str, incarnation: str = "i1", **more) -> None:
        self._next += 1
        self.connections[group] = self._next
        fields = {"groups": self.size, "minimum": self.minimum, **more}
        self._receive(group, m.Hello("job", group, incarnation, f"{group}:1", **fields))

    def join(self, group: str, **signature: str) -> None:
        self._receive(group, m.Join((f"{group}:2",), signature or {"w": "float32[2]"}))

    def start(self, *names: str) -> Epoch:
        """All groups say hello, join and promise; returns the first epoch."""
        names = names or tuple(f"g{i}" for i in range(self.size))
        for name in names:
            self.hello(name)
            self.join(name)
        self.promise_all(held=None)
        assert self.machine.newest is not None
        return self.machine.newest.epoch

    def promise(self, group: str, step: int = -1, held: tuple[int, ...] = (), total: int = 24, known: Membership | None = None, entry_epoch: Epoch | None = None, prepared: tuple[Membership, ...] = ()) -> None:
        (prepare,) = [x for x in self.read(group) if isinstance(x, m.Prepare)][-1:]
        newest = known or self.machine.newest
        last = None if step < 0 else Entry(entry_epoch or newest.epoch, step)
        self._receive(group, m.Promise(prepare.epoch, newest, prepared, last, held, total))

    def promise_all(self, step: int = -1, held: dict[str, tuple[int, ...]] | None = None) -> None:
        assert self.machine.recovery is not None
        for group in sorted(self.machine.recovery.asked):
            self.promise(group, step, (held or {}).get(group, ()))

    def beat(self, group: str, step: int, phase: str = "compute", waiting_ms: int = 0, epoch: int | None = None, stopped_ms: int = 0) -> None:
        number = epoch if epoch is not None else self.machine.newest.epoch.number
        self._receive(group, m.Beat(number, step, phase, waiting_ms, stopped_ms))

    def fail(self, group: str, step: int, error: str = "connection closed by peer", suspects: tuple[str, ...] = ()) -> None:
        self._receive(group, m.Failed(self.machine.newest.epoch, step, error, suspects))

    def die(self, group: str, cause: str = "rank 0 was killed by SIGKILL", step: int = 0, error: m.UserError | None = None) -> None:
        self._receive(group, m.Died(cause, 0, "reduce", step, error))

    def say(self, group: str, message: m.ToLighthouse) -> None:
        self._receive(group, message)

    def _receive(self, group: str, message: m.ToLighthouse) -> None:
        self._carry_out(self.machine.received(self.connections[group], group, message, self.now))

    def cut(self, group: str) -> None:
        connection = self.connections[group]
        self._carry_out(self.machine.disconnected(connection, self.now))

    def pass_s(self, seconds: float, beating: tuple[str, ...] = (), step: int = 0, phase: str = "compute", waiting_ms: int = 0) -> None:
        """Time passes in ticks of a beat, while some groups beat."""
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            for group in beating:
                self.beat(group, step, phase, waiting_ms)
            self._carry_out(self.machine.tick(self.now))

    def read(self, group: str) -> list[m.ToManager]:
        return self.sent.pop(group, [])

    def told(self, group: str, kind: type) -> list:
        return [message for message in self.sent.get(group, []) if isinstance(message, kind)]

    def noted(self, kind: str) -> list[dict]:
        return [dict(note.fields) for note in self.notes if note.kind == kind]
