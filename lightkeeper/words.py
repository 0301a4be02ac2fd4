"""One line for whoever reads the log. A full disk or a closed terminal under it never stops anything."""

from __future__ import annotations

import difflib
import sys
import threading
import time
from collections.abc import Iterable


def say(line: str, stdout: bool = False) -> None:
    """Prints a line on standard error (or standard output); what cannot be printed is lost."""
    try:
        print(line, file=sys.stdout if stdout else sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: the stream is closed
        pass


def shown(text: str, chars_max: int = 200) -> str:
    r"""A text of somebody else's for a terminal: control characters as ``\x1b``, cut to a length before that."""
    cut = text if len(text) <= chars_max else text[: chars_max - 3] + "..."
    if cut.isprintable():
        return cut
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)


def article(noun: str) -> str:
    """``an int``, ``a list``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def counted(number: int, noun: str) -> str:
    """``1 item``, ``2 items``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """``no key 'urll' (did you mean url?)``, or all there are if none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"no {what} {name!r} ({f'did you mean {near[0]}?' if near else 'there are: ' + ', '.join(names)})"


class Seldom:
    """Lets a few lines a second through, so that a flood of what they tell of does not fill the disk.

    Args:
        per_s: How many.
    """

    def __init__(self, per_s: int = 5) -> None:
        self._per_s = per_s
        self._lock = threading.Lock()
        self._since, self._said, self._left_out = 0.0, 0, 0

    def lets(self, line: str) -> str | None:
        """The line, with how many were left out before it; None if it is left out itself."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= 1.0:
                self._since, self._said = now, 0
            if self._said >= self._per_s:
                self._left_out += 1
                return None
            self._said += 1
            left_out, self._left_out = self._left_out, 0
        return line if not left_out else f"{line} (and {left_out} more that were left out)"
