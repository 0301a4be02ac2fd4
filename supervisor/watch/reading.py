"""Reads the log of a run that may be large, far away, and gone: only what is new, and only what tells of progress."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.errors import RunFolderError
from lightkeeper.events.reader import decode, events_folder
from lightkeeper.supervisor.watch.digest import KINDS, Digest

FIRST_BYTES_MAX = 1 << 20  # of each file, at the first look: its end
LOOK_BYTES_MAX = 16 << 20  # of each file, at every other look
LINE_BYTES_MAX = 2 << 20
_WANTED = tuple(f'{{"kind":"{kind}"'.encode() for kind in KINDS)


@dataclass
class _File:
    inode: int
    offset: int
    rest: bytes = b""
    skipping: bool = False  # up to the next line break: the first look begins somewhere


class RunReader:
    """The event log of one run.

    Args:
        run: the run's folder; it need not exist yet, and may vanish and come back.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.digest = Digest()
        self._files: dict[str, _File] = {}

    def look(self) -> str:
        """Takes what is new into `digest`.

        Returns:
            Why the log, or a part of it, cannot be read; "" if all was.
        """
        problem = ""
        try:
            with os.scandir(events_folder(self.run)) as entries:
                listed = [(entry.path, entry.stat()) for entry in entries if entry.name.endswith(".jsonl")]
        except RunFolderError as error:
            return str(error)
        except OSError as error:
            return f"{self.run}: {error.strerror or error}"
        # A lighthouse may serve several jobs: which one this is stands in the others' files.
        for path, status in sorted(listed, key=lambda one: ("lighthouse" in os.path.basename(one[0]), one[0])):
            file = self._files.get(path)
            if file is None or file.inode != status.st_ino or status.st_size < file.offset:
                start = max(0, status.st_size - FIRST_BYTES_MAX)
                file = self._files[path] = _File(status.st_ino, start, skipping=start > 0)
            if status.st_size > file.offset:
                try:
                    self._read(path, file)
                except OSError as error:
                    problem = f"{path}: {error.strerror or error}"
        return problem if listed else f"{self.run}: no event log"

    def _read(self, path: str, file: _File) -> None:
        with open(path, "rb") as opened:
            opened.seek(file.offset)
            data = opened.read(LOOK_BYTES_MAX)
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        if file.skipping and lines:
            lines, file.skipping = lines[1:], False
        if len(file.rest) > LINE_BYTES_MAX:  # no line of ours
            file.rest, file.skipping = b"", True
        for line in lines:
            if line.startswith(_WANTED):
                try:
                    self.digest.take(decode(line))
                except ValueError:  # torn by a kill or a full disk
                    continue
