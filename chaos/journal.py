"""What was done to a job, when, and with which result: JSON lines in the run's folder, with what repeats it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lightkeeper.errors import RunFolderError

FILE = "journal.jsonl"


class Journal:
    """Writes what happens, one line each, and tells it to whoever waits.

    Args:
        folder: the run's.
        command: what repeats it, as typed.
        asked: the same by name.
        tell: a line for a person.

    Raises:
        RunFolderError: it cannot be written.
    """

    def __init__(self, folder: Path, command: str, asked: dict[str, Any], tell: Callable[[str], None]) -> None:
        self.path, self.command = folder / FILE, command
        self._tell, self._began_s = tell, time.monotonic()
        self.write("begun", command=command, asked=asked)

    def write(self, what: str, line: str = "", **more: Any) -> None:
        """Writes what happened; `line` says the same to a person.

        Raises:
            RunFolderError: it cannot be written.
        """
        at_s = round(time.monotonic() - self._began_s, 3)
        entry = {"at_s": at_s, "wall": round(time.time(), 3), "what": what, **more}
        if line:
            entry["line"] = line
            self._tell(f"{at_s:7.2f} s  {line}")
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            raise RunFolderError(f"cannot write the journal {self.path}: {error.strerror or error}") from None


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """All its entries; a last line cut short is left out.

    Raises:
        RunFolderError: there is none.
    """
    try:
        lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise RunFolderError(f"no journal in {folder}: {error.strerror or error}") from None
    return [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]


def begun(folder: Path) -> dict[str, Any]:
    """How a run was begun: its entry has "command", and what was asked under "asked".

    Raises:
        RunFolderError: there is no journal, or it does not say.
    """
    for entry in read_journal(folder):
        if entry.get("what") == "begun":
            return entry
    raise RunFolderError(f"the journal in {folder} does not say how the run was begun")
