"""What is asked of the job, looked for beside the training thread: a storage that hangs must not hold up a step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.names import SAVE, STOP
from lightkeeper.checkpoint.requests import Asked, Requests


class Polled:
    """`Requests` of which each step sees what the look begun in the step before has found.

    Args:
        folder: of the checkpoints.
        time_limit_s: see `Checkpoints`.
    """

    def __init__(self, folder: Path, time_limit_s: float) -> None:
        began_s = time.monotonic()
        self._requests = Requests(folder, time_limit_s or None, age_s=lambda: time.monotonic() - began_s)
        self._folder, self._margin_s = folder, 0.0
        self._asked = Asked()
        self._wanted = threading.Event()
        self._over = False
        threading.Thread(target=self._run, name="requests", daemon=True).start()

    def poll(self, margin_s: float) -> Asked:
        """What was found; and has it looked for again.

        Args:
            margin_s: how long before a time limit the run must be asked to end.
        """
        self._margin_s = margin_s
        self._wanted.set()
        return self._asked

    def saved(self, asked: Asked) -> None:
        """A checkpoint is committed that was asked for so; who has asked since then asks on."""
        self._requests.honoured(asked, (SAVE,))
        self._asked = dataclasses.replace(self._asked, save="")

    def end(self, stopped: bool) -> None:
        """The run is over; `stopped`: as it was asked to."""
        self._over = True
        self._wanted.set()
        if stopped:
            self._requests.honoured(self._asked, (STOP,))

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # whoever saves says what is wrong with it
            Folder(self._folder).make()  # else there would be no place for a file before the first save
        while not self._over:
            self._wanted.wait()
            self._wanted.clear()
            self._asked = self._requests.poll(self._margin_s)
