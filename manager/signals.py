"""SIGTERM to a trainer rank: a request that its group leaves, not the end of the process. Other signals likewise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from lightkeeper.manager.spawn import SOCKET_VARIABLE


class LeaveSignal:
    """Takes SIGTERM, or another signal, while the group may leave in good order.

    A handler of the script's own is left alone (it may call `Manager.leave`), and only the main thread may set one.
    `lightkeeper launch` starts ranks with the signal ignored, for the time before they come here.

    Args:
        asked: called in the handler, so it must neither wait nor take a lock.
        number: of the signal.
    """

    def __init__(self, asked: Callable[[], None], number: int = signal.SIGTERM) -> None:
        self._asked, self._number = asked, number
        self._taken = False
        self._before = before = signal.getsignal(number)
        ours = before == signal.SIG_DFL or (before == signal.SIG_IGN and SOCKET_VARIABLE in os.environ)
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(number, self._handle)
            self._taken = True

    def _handle(self, number: int, frame: object) -> None:
        self._asked()

    def end(self) -> None:
        """The run is over: from now on the signal does what it did before."""
        taken = self._taken and signal.getsignal(self._number) == self._handle
        if taken and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._before)
