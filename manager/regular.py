"""Opening a small file that somebody else puts in place: it may be a pipe that nobody writes to, or no file at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotRegular(OSError):
    """A folder, a pipe or a device stands where a file is looked for."""

    def __init__(self) -> None:
        super().__init__(errno.EINVAL, "it is no regular file")


def open_regular(path: Path) -> int:
    """A descriptor to read the file with; it never blocks, as opening a pipe without a writer would.

    Raises:
        NotRegular: it is something else.
        OSError: it is not there, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular
    return descriptor
