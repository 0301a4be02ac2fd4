"""The folder in which a command's log is kept: on the disk, with its name, before the command starts.

`FOLDER/20261130T102345Z-train-4711/`: `command.json` (what was started), the logs, `end.json` (how it ended), and what
was packed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence

from lightkeeper.errors import UsageError


class Kept:
    """The folder of one run of a command.

    Args:
        folder: where such folders lie; made if there is none.
        name: of what is run.
        argv: the command.
        logs: the names of the log files.

    Raises:
        UsageError: it cannot be made or written; nothing has been started.
    """

    def __init__(self, folder: str, name: str, argv: Sequence[str], logs: Sequence[str]) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        short = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:40] or "command"
        self.path = os.path.join(os.path.abspath(folder), f"{stamp}-{short}-{os.getpid()}")
        self.logs = [os.path.join(self.path, log) for log in logs]
        above = os.path.dirname(self.path)
        try:
            new = not os.path.isdir(above)
            os.makedirs(self.path)
            for log in self.logs:
                os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            self.cwd = os.getcwd()
            told = {"argv": list(argv), "name": name, "cwd": self.cwd, "host": os.uname().nodename}
            self.write("command.json", {**told, "pid": os.getpid(), "wall": time.time()})
            for place in (self.path, above, *((os.path.dirname(above),) if new else ())):
                _to_disk(place)
        except OSError as error:
            raise UsageError(f"cannot keep a log in {folder}: {error.strerror or error}") from None

    def write(self, name: str, values: Mapping[str, object]) -> None:
        """A JSON file, on the disk when this returns.

        Raises:
            OSError: it could not be written.
        """
        with open(os.path.join(self.path, name), "w", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self, end: Mapping[str, object]) -> None:
        """How it ended, and all that was logged, on the disk.

        Raises:
            OSError: it could not be written.
        """
        for log in self.logs:
            _to_disk(log)
        self.write("end.json", end)
        _to_disk(self.path)


def _to_disk(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
