"""The end of a log, for a line that says what went wrong."""

from __future__ import annotations

import os
from pathlib import Path

from lightkeeper.words import shown

END_BYTES = 16384
LINES_MAX = 30


def last_lines(log: Path, since: int = 0) -> tuple[str, ...]:
    """What was printed last, from byte `since` on; nothing if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.strip())[-LINES_MAX:]


def last_line(log: Path, since: int = 0, saying: str = "") -> str:
    """The last line from byte `since` on, of those that say this if any does; or that there is none."""
    lines = last_lines(log, since)
    lines = tuple(line for line in lines if saying in line) or lines
    return shown(lines[-1].removeprefix("lightkeeper: ")) if lines else f"it printed nothing; see {log}"
