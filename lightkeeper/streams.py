"""Standard streams that are closed (`>&-`), as cron and some schedulers start a process.

The next file, pipe or socket that is opened gets such a number, and whoever writes to standard output writes into it.
"""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens the null device on those of descriptors 0 to 2 that are closed; to be called before anything is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)  # what this process starts must not find it closed either
        if getattr(sys, name) is None:  # Python found it closed
            stream = open(number, "w" if number else "r", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
