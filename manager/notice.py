"""A notice of the machine: a file that appears when it is about to go, for instance before a spot instance is taken.

Whoever learns of it (a metadata service, a scheduler's prologue, an operator) only has to write a file; so every source
of such notices is a line of shell, and none is built in here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.errors import UsageError

LOOK_S = 0.2
CHARS_MAX = 64
DEADLINE_S_MAX = 86_400.0


@dataclass(frozen=True)
class Notice:
    """What the file says.

    Attributes:
        deadline_s: seconds within which the group must have left; None: it does not say.
        problem: why its content is of no use, empty if it is fine.
    """

    deadline_s: float | None = None
    problem: str = ""


def check_folder(path: str) -> None:
    """A file can appear only where there is a folder; asked once, when a group is started.

    Args:
        path: of the file; empty if none is looked for.

    Raises:
        UsageError: there is none, so the notice would never be seen.
    """
    if path and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--notice-file {path}: there is no folder {Path(path).absolute().parent}")


def read_notice(path: Path) -> Notice | None:
    """The notice in a file, None while there is no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(CHARS_MAX).strip()
    except OSError:
        return None
    if not text:
        return Notice()
    try:
        deadline_s = float(text)
    except ValueError:
        deadline_s = -1.0
    if not 0 <= deadline_s <= DEADLINE_S_MAX:
        return Notice(problem=f"{text!r} is no number of seconds up to {DEADLINE_S_MAX:.0f}: taken as no deadline")
    return Notice(deadline_s)


def watch_notice(path: Path, noticed: Callable[[Notice], None]) -> None:
    """Calls `noticed` once, in a thread of its own, when the file is there.

    It looks from a thread, since a mount that hangs must not stop the manager.
    """

    def look() -> None:
        while (notice := read_notice(path)) is None:
            time.sleep(LOOK_S)
        if notice == Notice():
            time.sleep(LOOK_S)  # who writes it may have made it and not written yet
            notice = read_notice(path) or notice
        noticed(notice)

    threading.Thread(target=look, name="notice", daemon=True).start()
