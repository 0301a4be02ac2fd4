"""One line for whoever reads the log. A full disk or a closed terminal under it never stops anything."""

from __future__ import annotations

import sys


def say(line: str, stdout: bool = False) -> None:
    """Prints a line on standard error (or standard output); what cannot be printed is lost."""
    try:
        print(line, file=sys.stdout if stdout else sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: the stream is closed
        pass
