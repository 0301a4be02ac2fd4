"""A notice of the machine: a file that appears when it is about to go, for instance before a spot instance is taken.

Whoever learns of it (a metadata service, a scheduler's prologue, an operator) only has to write a file; so every source
of such notices is a line of shell, and none is built in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightkeeper.errors import UsageError
from lightkeeper.manager.regular import NotRegular, open_regular

LOOK_S = 0.2
LOOKS_MAX = 10  # at a file that does not stop changing
BYTES_MAX = 64
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

    def after(self, seconds: float) -> Notice:
        """What it says when it is handed on so much later."""
        return self if self.deadline_s is None else replace(self, deadline_s=max(0.0, self.deadline_s - seconds))


def check_folder(path: str) -> None:
    """A file can appear only where there is a folder; asked once, when a group is started.

    Args:
        path: of the file; empty if none is looked for.

    Raises:
        UsageError: there is none, so the notice would never be seen.
    """
    if path and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--notice-file {path}: there is no folder {Path(path).absolute().parent}")


class NoFile(Exception):
    """What is there cannot be a notice."""


def _text(path: Path) -> str | None:
    """What is in the file, None while there is none.

    Raises:
        NoFile: something else is there, or it may not be read.
    """
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except NotRegular as error:
        raise NoFile(error.strerror) from error
    except OSError as error:
        raise NoFile(f"it cannot be read ({error.strerror})") from error
    try:
        return os.read(descriptor, BYTES_MAX).decode(errors="replace").strip()
    except OSError:  # a mount that is away for a moment
        return None
    finally:
        os.close(descriptor)


def parse_notice(text: str) -> Notice:
    """What a file with this text says."""
    if not text:
        return Notice()
    try:
        deadline_s = float(text)
    except ValueError:
        deadline_s = -1.0
    if not 0 <= deadline_s <= DEADLINE_S_MAX:
        return Notice(problem=f"{text!r} is no number of seconds up to {DEADLINE_S_MAX:.0f}: taken as no deadline")
    return Notice(deadline_s)


def watch_notice(path: Path, noticed: Callable[[Notice], None], say: Callable[[str], None]) -> None:
    """Calls `noticed` once, in the running event loop, when the file is there and no longer changes.

    It looks from a thread, since a mount that hangs must not stop the manager.

    Args:
        path: the file.
        noticed: takes what it says.
        say: takes a line for the operator, in that thread: something else is there, and is no notice.
    """
    loop = asyncio.get_running_loop()

    def look() -> None:
        notice = _settled(path, say)
        with contextlib.suppress(RuntimeError):  # the loop is closed: who wanted to know has ended
            loop.call_soon_threadsafe(noticed, notice)

    threading.Thread(target=look, name="notice", daemon=True).start()


def _settled(path: Path, say: Callable[[str], None]) -> Notice:
    """Waits for the file, and for who writes it: it may be empty, or hold half a number, when it is first seen."""
    told, text = "", None
    while text is None:
        try:
            text = _text(path)
        except NoFile as error:
            if told != str(error):
                told = str(error)
                say(f"no notice can be read in {path}: {error}")
        if text is None:
            time.sleep(LOOK_S)
    for _ in range(LOOKS_MAX):
        time.sleep(LOOK_S)
        before = text
        with contextlib.suppress(NoFile):
            text = _text(path) or text  # once it was there it was notice
        if text == before:
            break
    return parse_notice(text)
