"""Tells people in the background: a queue and a thread for each notifier, a few tries with pauses that grow.

A notifier that fails, hangs or is wrong costs a line and an event, and nothing else.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightkeeper.supervisor.notify.message import Message
from lightkeeper.supervisor.notify.sending import SendError, send
from lightkeeper.supervisor.notify.settings import Setting
from lightkeeper.words import say

QUEUE_MAX = 100
BEYOND_S = 1.0  # after a try's own bound: for what has none, such as looking up a name
PAUSE_S, PAUSE_S_MAX = 0.5, 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of one message at one notifier; `reason` is empty if somebody was told."""

    message: Message
    via: str
    reason: str
    seconds: float
    tries: int


def pause_s(failures: int) -> float:
    """Seconds before the next try, after so many failures in a row: 0.5, 1, 2, ..., at most 30."""
    return min(PAUSE_S * 2.0 ** (failures - 1), PAUSE_S_MAX)


class Notifier:
    """Tells of messages, in the background.

    Args:
        settings: who is told, and how.
        told: gets every outcome, in a thread of the notifier's; it must not raise. None: nobody does.
        one_try: for tests; sends once, raises `SendError`.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        told: Callable[[Outcome], None] | None = None,
        one_try: Callable[[Setting, Message], None] = send,
    ) -> None:
        self._told, self._one_try = told, one_try
        self._changed = threading.Condition()
        self._open: dict[int, tuple[Setting, Message]] = {}  # what has no outcome yet
        self._numbers = 0
        self._ending = 0  # outcomes that are being told
        self._closed = threading.Event()
        self._queues: list[tuple[Setting, queue.Queue[int]]] = []
        for setting in settings:
            waiting: queue.Queue[int] = queue.Queue(QUEUE_MAX)
            self._queues.append((setting, waiting))
            threading.Thread(target=self._work, args=(setting, waiting), name="lightkeeper-notify", daemon=True).start()

    def tell(self, message: Message) -> None:
        """Hands the message to every notifier that wants it. Returns at once and never raises."""
        for setting, waiting in self._queues:
            if not setting.wants(message.what):
                continue
            with self._changed:
                self._numbers += 1
                number = self._numbers
                self._open[number] = (setting, message)
            try:
                if self._closed.is_set():
                    self._end(number, "it is closed already", 0.0, 0)
                else:
                    waiting.put_nowait(number)
            except queue.Full:
                self._end(number, f"{QUEUE_MAX} messages wait for it already", 0.0, 0)

    def close(self, within_s: float) -> bool:
        """Waits for what was told; what has not been sent by then is said not to have been.

        Returns:
            Whether everything came to an end by itself.
        """
        until_s = time.monotonic() + within_s
        with self._changed:
            while (self._open or self._ending) and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            left = tuple(self._open)
        self._closed.set()
        for number in left:
            self._end(number, f"it took longer than the {within_s:g} s that there were", within_s, 0)
        return not left

    def _work(self, setting: Setting, waiting: queue.Queue[int]) -> None:
        while True:
            number = waiting.get()
            with self._changed:
                found = self._open.get(number)
            if found is not None:
                self._deliver(number, setting, found[1])

    def _deliver(self, number: int, setting: Setting, message: Message) -> None:
        begun_s, failures = time.monotonic(), 0
        while not self._closed.is_set():
            error = self._try(setting, message)
            if error is None:
                self._end(number, "", time.monotonic() - begun_s, failures + 1)
                return
            failures += 1
            if error.permanent or failures >= setting.tries:
                self._end(number, str(error), time.monotonic() - begun_s, failures)
                return
            self._closed.wait(pause_s(failures))

    def _try(self, setting: Setting, message: Message) -> SendError | None:
        """One try in a thread of its own, since a look-up of a name has no bound; one that hangs is left behind."""
        result: list[SendError | None] = []

        def once() -> None:
            try:
                self._one_try(setting, message)
                result.append(None)
            except SendError as error:
                result.append(error)
            except BaseException as error:  # a bug of ours: its traceback is shown, and nobody was told
                sys.excepthook(type(error), error, error.__traceback__)
                result.append(SendError(f"a bug in lightkeeper: {type(error).__name__}: {error}", permanent=True))

        thread = threading.Thread(target=once, name="lightkeeper-notify-once", daemon=True)
        thread.start()
        thread.join(setting.timeout_s + BEYOND_S)
        return result[0] if result else SendError(f"no answer within {setting.timeout_s:g} s")

    def _end(self, number: int, reason: str, seconds: float, tries: int) -> None:
        with self._changed:
            found = self._open.pop(number, None)
            if found is None:  # it was said already not to have come in time
                return
            self._ending += 1
        setting, message = found
        outcome = Outcome(message, setting.via, reason, seconds, tries)
        if reason:
            say(f"lightkeeper: nobody was told by {setting.via} that {message.subject}: {reason}")
        if self._told is not None:
            self._told(outcome)
        with self._changed:
            self._ending -= 1
            self._changed.notify_all()
