"""Process groups: one forms when all members are there; a reduce completes only if all put in their parts.

Then it completes for some perhaps, and for others not. Once broken a group stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightkeeper.lighthouse.names import Entry, Epoch
from lightkeeper.simulator.checkers import Violation
from lightkeeper.simulator.state import BEFORE, Part, Reduced

if TYPE_CHECKING:
    from lightkeeper.simulator.world import World

Key = tuple[int, int, int]  # step, attempt, bucket (or BEFORE)
Done = Callable[["Reduced | None", str], None]
Formed = Callable[[bool, str], None]
LATE_S = (0.001, 0.03)
SOON_S = (0.0, 0.01)


class Reduce:
    """One all-reduce."""

    __slots__ = ("complete", "key", "parts", "waiting")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.parts: dict[str, Part] = {}
        self.waiting: dict[str, Done] = {}
        self.complete = False


class Net:
    """The process group of one epoch and one rank index.

    Args:
        world: the history.
        epoch: whose group it is.
        members: groups in slot order.
    """

    def __init__(self, world: World, epoch: Epoch, members: tuple[str, ...]) -> None:
        self._world, self.epoch, self.members = world, epoch, members
        self.broken_by = ""
        self.formed = False
        self._arrived: set[str] = set()
        self._waiting: dict[str, Formed] = {}
        self._reduces: dict[Key, Reduce] = {}
        self._closing: dict[str, Callable[[], None]] = {}

    # ------------------------------------------------------------ forming

    def arrive(self, member: str) -> None:
        """A member begins to build; with the last one the group forms, or it does not."""
        self._arrived.add(member)
        if len(self._arrived) < len(self.members) or self.formed or self.broken_by:
            return
        link = self._world.network.apart(self.members)
        if link is not None:
            self._world.network.when_healed(link, lambda: self.arrive(member))
            return
        fate = self._world.forming()
        if fate == "hangs":
            return
        event = self._form if fate == "forms" else self._breaks
        self._world.clock.after(self._world.clock.uniform(*LATE_S), event)

    def when_formed(self, member: str, then: Formed, timeout_s: float) -> None:
        """Tells a member whether the group is there; that it is not, at the latest after so long."""
        if self.broken_by:
            self._world.clock.after(self._world.clock.uniform(*SOON_S), then, False, self.broken_by)
        elif self.formed:
            then(True, "")
        else:
            self._waiting[member] = then
            self._world.clock.after(timeout_s, self._timed_out, member, then)

    def _form(self) -> None:
        if self.broken_by:
            return
        self.formed = True
        waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            self._world.clock.after(self._world.clock.uniform(*SOON_S), then, True, "")

    def _breaks(self) -> None:
        self.break_by(self.members[self._world.clock.random.randrange(len(self.members))], hears=True)

    def _timed_out(self, member: str, then: Formed) -> None:
        if self._waiting.get(member) is then:
            del self._waiting[member]
            missing = [name for name in self.members if name not in self._arrived]
            then(False, missing[0] if missing else "")

    # ------------------------------------------------------------ reducing

    def put(self, member: str, key: Key, part: Part, done: Done) -> None:
        """Puts in a part of a reduce; `done` gets the sum, or None and who broke the group."""
        reduce = self._reduces.get(key)
        if reduce is None:
            reduce = self._reduces[key] = Reduce(key)
        if not self.formed and not self.broken_by:
            raise Violation("P1", f"{member} reduces in {self.epoch}, whose group is not formed")
        reduce.parts[member], reduce.waiting[member] = part, done
        if self.broken_by:
            self._fail(reduce, member)
        elif len(reduce.parts) == len(self.members):
            self._complete(reduce)

    def break_by(self, member: str, hears: bool = False) -> None:
        """A member died or aborted: whoever has not completed may, or may not, depending on what was under way.

        Args:
            member: who it was.
            hears: whether its own reduce ends by this: a connection broke, and it did nothing itself.
        """
        self.broken_by = self.broken_by or member
        clock = self._world.clock
        for reduce in list(self._reduces.values()):
            if not hears:
                reduce.waiting.pop(member, None)
            for other in list(reduce.waiting):
                if not reduce.complete or clock.chance(0.5):
                    self._fail(reduce, other)
        waiting, self._waiting = self._waiting, {}
        if not hears:
            waiting.pop(member, None)
        for then in waiting.values():
            clock.after(clock.uniform(*SOON_S), then, False, member)
        closing, self._closing = self._closing, {}
        for over in closing.values():
            over()

    def _complete(self, reduce: Reduce) -> None:
        if reduce.complete or self.broken_by:
            return
        link = self._world.network.apart(self.members)
        if link is not None:
            self._world.network.when_healed(link, lambda: self._complete(reduce))
            return
        reduce.complete = True
        total = self._sum(reduce)
        clock = self._world.clock
        for member in self.members:
            clock.after(clock.uniform(*LATE_S), self._finish, reduce, member, total, "")

    def _sum(self, reduce: Reduce) -> Reduced:
        step, attempt, bucket = reduce.key
        parts = reduce.parts
        flags = {part.ready for part in parts.values()}
        having = [parts[member].before for member in self.members if parts[member].before]
        total = Reduced(
            Entry(self.epoch, step),
            self._world.serial_of(self.epoch, step, attempt),
            tuple((member, k) for member in self.members for k in parts[member].microbatches),
            flags.pop() if len(flags) == 1 else 0,
            any(part.again for part in parts.values()),
            parts[self.members[0]].state.bits,
            having[0] if having else self._world.serial_of(self.epoch, step, BEFORE),
        )
        if bucket == 0:
            self._world.checkers.reduced(self.epoch, step, parts, total)
        return total

    def _fail(self, reduce: Reduce, member: str) -> None:
        clock = self._world.clock
        clock.after(clock.uniform(*SOON_S), self._finish, reduce, member, None, self.broken_by)

    def _finish(self, reduce: Reduce, member: str, total: Reduced | None, suspect: str) -> None:
        done = reduce.waiting.pop(member, None)
        if not reduce.waiting and len(reduce.parts) == len(self.members):
            self._reduces.pop(reduce.key, None)
        if done is not None:
            done(total, suspect)

    # ------------------------------------------------------------ closing

    def close(self, member: str, over: Callable[[], None]) -> None:
        """The empty reduce that closes the epoch's group: over when all members have put in theirs, or it broke."""
        self._closing[member] = over
        if self.broken_by or len(self._closing) == len(self.members):
            closing, self._closing = self._closing, {}
            for each in closing.values():
                each()
