"""Whether the training data can be read: the files that are named, or the first file in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped

READ_BYTES = 1 << 20
ENTRIES_MAX = 10_000  # looked at in search of a file


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Reads the first mebibyte of each `--data PATH`."""
    if not request.data:
        return skipped("no --data PATH is given")
    wrong, told = [], []
    for path in request.data:
        try:
            file = path if not os.path.isdir(path) else _first_file(path)
            if file is None:
                wrong.append(f"{path}: there is no file in it")
                continue
            with open(file, "rb") as opened:
                read = len(opened.read(READ_BYTES))
        except OSError as error:
            wrong.append(f"{error.filename or path}: {error.strerror or error}")
            continue
        if read:
            told.append(f"{file}: read")
        else:
            wrong.append(f"{file} is empty")
    return failed("; ".join(wrong)) if wrong else ok("; ".join(told))


def _first_file(folder: str) -> str | None:
    """The first file in a folder and those below it.

    Raises:
        OSError: a folder cannot be read.
    """
    seen = 0

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        if names:
            return os.path.join(root, min(names))
        seen += len(folders)
        if seen > ENTRIES_MAX:
            break
    return None
