"""Faults on request, for the demo, the benches and the tests: ``LIGHTKEEPER_FAULT=KIND:GROUP:PHASE:STEP[,...]``.

GROUP is a group's name, and of one with several ranks ``NAME/RANK`` (without RANK it is rank 0). KIND is ``kill``
(SIGKILL of this rank), ``kill-tree`` (of this rank and its manager), ``freeze`` (SIGSTOP of this rank),
``freeze-tree``, ``exit`` (code 1) or ``raise``. The event that says so is written before it happens. A group that its
launcher starts again is spared.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lightkeeper.errors import UsageError
from lightkeeper.events.schema import Event, FaultInjected
from lightkeeper.manager.progress import PHASES

VARIABLE = "LIGHTKEEPER_FAULT"
KINDS = ("kill", "kill-tree", "freeze", "freeze-tree", "exit", "raise")


class InjectedError(RuntimeError):
    """The exception that the fault ``raise`` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault: what, where and when."""

    kind: str
    group: str
    phase: str
    step: int
    rank: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Reads the variable.

    Raises:
        UsageError: for anything but ``KIND:GROUP[/RANK]:PHASE:STEP`` with known kind and phase.
    """
    faults = []
    for item in filter(None, text.split(",")):
        parts = item.split(":")
        known = len(parts) == 4 and parts[0] in KINDS and parts[2] in PHASES
        group, _, rank = parts[1].partition("/") if known else ("", "", "")
        numbers = (parts[-1], rank or "0")
        if not group or not all(number.isascii() and number.isdigit() for number in numbers):
            raise UsageError(
                f"{VARIABLE}={item!r}: expected KIND:GROUP[/RANK]:PHASE:STEP with a kind of {', '.join(KINDS)} "
                f"and a phase of {', '.join(PHASES)}"
            )
        faults.append(Fault(parts[0], group, parts[2], int(parts[3]), int(rank or 0)))
    return tuple(faults)


class Injector:
    """Breaks this rank where a fault says so; each fault once.

    Args:
        faults: those of this group.
        target: name of this process for the event.
        manager_pid: the group's manager.
        write: writes an event.
    """

    def __init__(
        self, faults: tuple[Fault, ...], target: str, manager_pid: int, write: Callable[[Event], None]
    ) -> None:
        self._faults = list(faults)
        self._target, self._manager_pid, self._write = target, manager_pid, write

    def reached(self, phase: str, step: int) -> None:
        """The rank has entered a phase of a step."""
        for fault in [f for f in self._faults if f.phase == phase and f.step == step]:
            self._faults.remove(fault)
            self._write(FaultInjected(fault=fault.kind, phase=phase, step=step, target=self._target))
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        me = os.getpid()
        if fault.kind == "raise":
            raise InjectedError(f"injected in {fault.phase} of step {fault.step}")
        if fault.kind == "exit":
            os._exit(1)
        if fault.kind == "kill-tree":
            self._kill_both(me)
        if fault.kind == "freeze-tree":
            os.kill(self._manager_pid, signal.SIGSTOP)
        os.kill(me, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _kill_both(self, me: int) -> NoReturn:
        """By a third process, and frozen first: else one sees the other die, and may end in a way of its own."""
        both = f"{me} {self._manager_pid}"
        os.posix_spawn("/bin/sh", ["sh", "-c", f"kill -STOP {both}; kill -KILL {both}"], {})
        while True:
            signal.pause()
