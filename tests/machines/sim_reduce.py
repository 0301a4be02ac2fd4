"""Collectives: a reduce completes only if every member put in its part; then for some perhaps, and for others not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sim_clock import Clock

Done = Callable[["Sum | None", str], None]


@dataclass(frozen=True)
class Sum:
    """What a reduce gives to every member alike.

    Attributes:
        microbatches: (group, microbatch) of all parts.
        ready: the prepared epoch whose flag every member carried, else 0.
        again: whether a member's part was incomplete.
    """

    microbatches: tuple[tuple[str, int], ...]
    ready: int
    again: bool


@dataclass
class Reduce:
    parts: dict[str, tuple[tuple[int, ...], int, bool]] = field(default_factory=dict)
    waiting: dict[str, Done] = field(default_factory=dict)


class Net:
    """The process group of one epoch and one rank index. Once broken it stays so."""

    def __init__(self, clock: Clock, members: tuple[str, ...]) -> None:
        self._clock, self.members = clock, members
        self._reduces: dict[tuple[int, int], Reduce] = {}
        self.broken_by = ""

    def put(self, member: str, key: tuple[int, int], part: tuple[tuple[int, ...], int, bool], done: Done) -> None:
        """Puts in a part: own microbatches, ready flag, whether it is incomplete."""
        reduce = self._reduces.setdefault(key, Reduce())
        reduce.parts[member], reduce.waiting[member] = part, done
        if self.broken_by:
            self._fail_later(reduce, member)
        elif len(reduce.parts) == len(self.members):
            self._complete(reduce)

    def break_by(self, member: str) -> None:
        """A member died or aborted: whoever has not completed may, or may not, depending on what was under way."""
        self.broken_by = self.broken_by or member
        for reduce in self._reduces.values():
            reduce.waiting.pop(member, None)
            complete = len(reduce.parts) == len(self.members)
            for other in list(reduce.waiting):
                if not complete or self._clock.random.random() < 0.5:
                    self._fail_later(reduce, other)

    def _complete(self, reduce: Reduce) -> None:
        flags = {ready for _, ready, _ in reduce.parts.values()}
        total = Sum(
            tuple(sorted((m, k) for m, (held, _, _) in reduce.parts.items() for k in held)),
            flags.pop() if len(flags) == 1 else 0,
            any(again for _, _, again in reduce.parts.values()),
        )
        for member in self.members:
            self._clock.after(self._clock.uniform(0.001, 0.03), lambda m=member: self._finish(reduce, m, total, ""))

    def _fail_later(self, reduce: Reduce, member: str) -> None:
        suspect = self.broken_by
        self._clock.after(self._clock.uniform(0.0, 0.01), lambda: self._finish(reduce, member, None, suspect))

    @staticmethod
    def _finish(reduce: Reduce, member: str, total: Sum | None, suspect: str) -> None:
        done = reduce.waiting.pop(member, None)
        if done is not None:
            done(total, suspect)
