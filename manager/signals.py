"""SIGTERM and SIGUSR1 to a trainer rank: requests that its group leaves, not the end of the process.

SIGUSR1 is what schedulers send some minutes before they send SIGTERM (Slurm's `--signal=USR1@120`). So it is notice,
and a SIGTERM after it is the first, not the second.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightkeeper.manager.spawn import SOCKET_VARIABLE

NOTICE = signal.SIGUSR1
ASKS = (signal.SIGTERM, NOTICE)


class LeaveSignal:
    """Takes both signals while the group may leave in good order.

    A handler of the script's own is left alone (it may call `Manager.leave`), and only the main thread may set one.
    `lightkeeper launch` starts ranks with the signals ignored, for the time before they come here.

    Args:
        asked: called in the handler with the signal, so it must neither wait nor take a lock.
    """

    def __init__(self, asked: Callable[[signal.Signals], None]) -> None:
        self._asked = asked
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ASKS:
            before = signal.getsignal(number)
            ours = before == signal.SIG_DFL or (before == signal.SIG_IGN and SOCKET_VARIABLE in os.environ)
            if ours and not _caught_by_others(number):
                signal.signal(number, self._handle)
                self._before[number] = before
        multiprocessing.util.register_after_fork(self, LeaveSignal._forked)

    def _forked(self) -> None:
        """In a child that `multiprocessing` forked: notice is the parent's (SIGTERM: `heed_parent_alone`)."""
        if signal.getsignal(NOTICE) == self._handle:
            signal.signal(NOTICE, signal.SIG_IGN)

    def _handle(self, number: int, frame: object) -> None:
        self._asked(signal.Signals(number))

    def end(self) -> None:
        """The run is over: from now on the signals do what they did before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)


def _caught_by_others(number: signal.Signals) -> bool:
    """Whether a library holds the signal that Python knows nothing of, as `faulthandler.register` does."""
    status = Path("/proc/self/status").read_text()
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)
