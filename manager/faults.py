"""Faults on request, for the demo, the benches, chaos and the tests: ``LIGHTKEEPER_FAULT=KIND:GROUP:PHASE:STEP[,...]``.

GROUP is a group's name, and of one with several ranks ``NAME/RANK`` (without RANK it is rank 0). STEP is a number, or
``any``: the first time that the phase is entered. The event that says so is written before it happens. A group that its
launcher starts again is spared. KIND is one of

- ``kill`` (SIGKILL of this rank), ``kill-tree`` (of this rank and its manager), ``manager-kill`` (of the manager alone;
  under `lightkeeper launch` that is the launcher), ``freeze`` (SIGSTOP of this rank), ``freeze-tree``,
  ``manager-freeze``, ``exit`` (code 1), ``raise``;
- ``stall`` or ``stall=SECONDS``: sleeps there, for ever unless told for how long, while the interpreter lives: other
  threads go on;
- ``hold`` or ``hold=SECONDS``: a C call that holds the interpreter lock, so that no other thread of this rank runs;
- ``slow=PERCENT``: from there on every microbatch takes so much longer; phase ``compute``;
- ``clock=SECONDS``: this rank's wall clock (`time.time`) jumps, backwards if negative.

A stall or a hold in ``reduce`` comes before this rank has put its last buckets in: the others stand for it.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lightkeeper.errors import UsageError
from lightkeeper.events.schema import Event, FaultInjected
from lightkeeper.manager.progress import PHASES

VARIABLE = "LIGHTKEEPER_FAULT"
PLAIN = ("kill", "kill-tree", "manager-kill", "freeze", "freeze-tree", "manager-freeze", "exit", "raise")
FOR_A_TIME = ("stall", "hold")  # for ever without a value
VALUED = ("slow", "clock")
KINDS = (*PLAIN, *FOR_A_TIME, *VALUED)
ANY_STEP = -1
ANY = "any"
VALUE_MAX = 1e6
HOLD_SLICE_S = 1000.0  # of one call; below what usleep's 32 bits hold


class InjectedError(RuntimeError):
    """The exception that the fault ``raise`` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault: what, where and when.

    Attributes:
        step: its index, or `ANY_STEP`.
        value: seconds or percent, as the kind has it; None: not given.
    """

    kind: str
    group: str
    phase: str
    step: int
    rank: int = 0
    value: float | None = None


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Reads the variable.

    Raises:
        UsageError: for anything but ``KIND[=VALUE]:GROUP[/RANK]:PHASE:STEP`` with known kind and phase, for a kind
            without the value that it needs or with one that it does not take, and for ``slow`` outside ``compute``.
    """
    return tuple(_parse(item) for item in filter(None, text.split(",")))


def _parse(item: str) -> Fault:
    parts = item.split(":")
    kind, valued, raw = parts[0].partition("=")
    known = len(parts) == 4 and kind in KINDS and parts[2] in PHASES
    group, _, rank = parts[1].partition("/") if known else ("", "", "")
    step = "0" if parts[-1] == ANY else parts[-1]
    if not group or not all(number.isascii() and number.isdigit() for number in (step, rank or "0")):
        raise UsageError(
            f"{VARIABLE}={item!r}: expected KIND:GROUP[/RANK]:PHASE:STEP with a kind of {', '.join(PLAIN)}, "
            f"{', '.join(f'{name}[=SECONDS]' for name in FOR_A_TIME)}, slow=PERCENT, clock=SECONDS "
            f"and a phase of {', '.join(PHASES)}"
        )
    value = _value(item, kind, raw) if valued or kind in VALUED else None
    if kind == "slow" and parts[2] != "compute":
        raise UsageError(f"{VARIABLE}={item!r}: what is slow is a microbatch: the phase is compute")
    return Fault(kind, group, parts[2], ANY_STEP if parts[-1] == ANY else int(step), int(rank or 0), value)


def _value(item: str, kind: str, raw: str) -> float:
    if kind in PLAIN:
        raise UsageError(f"{VARIABLE}={item!r}: {kind} takes no value")
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not abs(value) <= VALUE_MAX or (value <= 0 and kind != "clock"):
        unit = "a percentage" if kind == "slow" else "a number of seconds"
        raise UsageError(f"{VARIABLE}={item!r}: give {kind} {unit}, as in {kind}=30")
    return value


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
        self._slows = any(fault.kind == "slow" for fault in faults)
        self._slower = 0.0  # by what share a microbatch takes longer from now on
        self._took_s, self._since_s = 0.0, 0.0

    def reached(self, phase: str, step: int, microbatches: int = 0) -> None:
        """The rank has entered a phase of a step, with which microbatch of it (counted from 1) if it begins one."""
        for fault in [f for f in self._faults if f.phase == phase and f.step in (step, ANY_STEP)]:
            self._faults.remove(fault)
            self._write(FaultInjected(fault=fault.kind, phase=phase, step=step, target=self._target))
            self._strike(fault)
        if self._slows:
            self._slow_down(phase == "compute" and microbatches > 0)

    def _slow_down(self, begins: bool) -> None:
        """Sleeps at the begin of a microbatch for a share of what the one before it took by itself."""
        if self._since_s:
            self._took_s = time.monotonic() - self._since_s
        self._since_s = 0.0
        if begins:
            time.sleep(self._slower * self._took_s)
            self._since_s = time.monotonic()

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case "raise":
                raise InjectedError(f"injected in {fault.phase} of step {fault.step}")
            case "exit":
                os._exit(1)
            case "kill-tree":
                self._kill_both(os.getpid())
            case "stall":
                _stall(fault.value)
            case "hold":
                _hold(fault.value)
            case "slow":
                self._slower = (fault.value or 0.0) / 100
            case "clock":
                _jump(fault.value or 0.0)
            case _:
                self._signal(fault.kind)

    def _signal(self, kind: str) -> None:
        number = signal.SIGKILL if kind in ("kill", "manager-kill") else signal.SIGSTOP
        if kind in ("freeze-tree", "manager-freeze", "manager-kill"):
            os.kill(self._manager_pid, number)
        if not kind.startswith("manager-"):
            os.kill(os.getpid(), number)

    def _kill_both(self, me: int) -> NoReturn:
        """By a third process, and frozen first: else one sees the other die, and may end in a way of its own."""
        both = f"{me} {self._manager_pid}"
        os.posix_spawn("/bin/sh", ["sh", "-c", f"kill -STOP {both}; kill -KILL {both}"], {})
        while True:
            signal.pause()


def _stall(seconds: float | None) -> None:
    if seconds is not None:
        time.sleep(seconds)
        return
    while True:
        time.sleep(1.0)


def _hold(seconds: float | None) -> None:
    """`PyDLL` calls do not let go of the interpreter lock, as a badly written extension does not."""
    libc = ctypes.PyDLL(None)
    until_s = time.monotonic() + (math.inf if seconds is None else seconds)
    while (left_s := until_s - time.monotonic()) > 0:  # a signal cuts a call short
        libc.usleep(ctypes.c_uint(int(min(left_s, HOLD_SLICE_S) * 1e6)))


def _jump(seconds: float) -> None:
    """For whoever asks `time.time` by that name; C code, and `from time import time` before now, are not reached."""
    real = time.time
    time.time = lambda: real() + seconds
