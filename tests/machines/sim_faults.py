"""What goes wrong in a history, drawn from its seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightkeeper.lighthouse.log import JobHistory

if TYPE_CHECKING:
    from sim_job import Job


class Faults:
    """Plans faults at random times of a history.

    Args:
        job: the world.
        kinds: names of the faults that may strike.
        between: from when to when, in seconds after the start; the first epoch is in force after 0.7 s.
    """

    def __init__(self, job: Job, kinds: tuple[str, ...], count: int, between: tuple[float, float] = (0.8, 3.0)) -> None:
        self.job = job
        self.struck: list[str] = []
        for _ in range(count):
            kind = job.clock.random.choice(kinds)
            strike: Callable[[], None] = getattr(self, kind)
            job.clock.after(job.clock.uniform(*between), lambda k=kind, s=strike: self._strike(k, s))

    def _strike(self, kind: str, strike: Callable[[], None]) -> None:
        self.struck.append(kind)
        self.job.say(f"fault: {kind}")
        strike()

    def _victim(self) -> str | None:
        """A group that may be lost: never the last one that stays."""
        staying = [n for n, g in self.job.groups.items() if g.alive and not g.machine.leaving]
        return self.job.clock.random.choice(staying) if len(staying) > 1 else None

    def _any(self) -> str | None:
        alive = [n for n, g in self.job.groups.items() if g.alive]
        return self.job.clock.random.choice(alive) if alive else None

    # ------------------------------------------------------------ the faults

    def kill(self) -> None:
        """One rank is killed; its manager sees it."""
        if (name := self._victim()) is not None:
            self.job.say(f"  of {name}")
            group = self.job.groups[name]
            self.job.clock.random.choice(group.ranks).die(-9)

    def kill_tree(self) -> None:
        if (name := self._victim()) is not None:
            self.job.say(f"  of {name}")
            self.job.groups[name].kill_tree()

    def cut(self) -> None:
        """A stream breaks; the manager connects again."""
        if (name := self._any()) is not None and (stream := self.job.groups[name].stream) is not None:
            self.job.say(f"  of {name}")
            stream.break_it()

    def leave(self) -> None:
        if (name := self._victim()) is not None and self.job.groups[name].machine.known is not None:
            self.job.say(f"  of {name}")
            self.job.groups[name].leave("SIGTERM")

    def reduce(self) -> None:
        """For a moment, reduces may fail on some members."""
        self.job.failing = 0.15
        self.job.clock.after(0.1, lambda: setattr(self.job, "failing", 0.0))

    def freeze_manager(self) -> None:
        if (name := self._victim()) is not None:
            self.job.say(f"  of {name}")
            group = self.job.groups[name]
            group.frozen_until = self.job.clock.now + self.job.clock.uniform(0.5, 5.0)

    def freeze_lighthouse(self) -> None:
        self.job.lighthouse.frozen_until = self.job.clock.now + self.job.clock.uniform(0.5, 5.0)

    def freeze_lighthouse_and_kill(self) -> None:
        """A rank is killed while the lighthouse stands still: the others stand until it thaws."""
        self.freeze_lighthouse()
        self.kill()

    def restart(self) -> None:
        """The lighthouse dies and comes back with its log."""
        self._restart(keep=True)

    def restart_empty(self) -> None:
        """The lighthouse dies, and another comes with an empty disk."""
        self._restart(keep=False)

    def kill_and_restart(self) -> None:
        """A rank is killed, and the lighthouse dies in the recovery that this begins."""
        self.kill()
        self.job.clock.after(self.job.clock.uniform(0.0, 0.1), self.restart)

    def reduce_and_restart(self) -> None:
        """A reduce fails, and the lighthouse dies in the recovery that this begins."""
        self.job.failing = 1.0
        self.job.clock.after(0.05, lambda: setattr(self.job, "failing", 0.0))
        self.job.clock.after(self.job.clock.uniform(0.0, 0.2), self.restart)

    def _restart(self, keep: bool) -> None:
        restart_lighthouse(self.job, keep)


def restart_lighthouse(job: Job, keep: bool) -> None:
    """The lighthouse dies now, and comes back in a while, with its disk or (another one) with an empty one."""
    lighthouse = job.lighthouse
    if not lighthouse.up:
        return
    lighthouse.stop()
    name = lighthouse.name if keep else f"lh{lighthouse.starts}"

    def start() -> None:
        job.say("lighthouse is back")
        if not keep:
            job.checkers.highest = 0
        lighthouse.start(lighthouse.disk if keep else JobHistory(), name)

    job.clock.after(job.clock.uniform(0.05, 1.5), start)
