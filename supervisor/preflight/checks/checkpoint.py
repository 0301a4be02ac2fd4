"""Whether a checkpoint can be written where it is to go: all that a save does, with a file of a mebibyte."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped

BYTES = 1 << 20


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Writes, syncs, renames, reads back and deletes; the folder is made if need be, as a save would."""
    if not request.checkpoint:
        return skipped("no --checkpoint FOLDER is given")
    folder = Path(request.checkpoint)
    content = os.urandom(BYTES)
    made = folder / f".preflight-{socket.gethostname()}-{os.getpid()}"
    named = made.with_name(made.name + "-named")
    at = "make the folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        at = "write"
        with open(made, "xb") as file:
            file.write(content)
            file.flush()
            at = "sync"
            os.fsync(file.fileno())
        at = "rename"
        made.rename(named)
        at = "sync the folder"
        _sync(folder)
        at = "read back"
        read = named.read_bytes()
        at = "delete"
        named.unlink()
    except OSError as error:
        for path in (made, named):
            _remove(path)
        return failed(f"{folder}: cannot {at}: {error.strerror or error}", {"at": at, "errno": error.errno})
    if read != content:
        return failed(f"{folder}: what was read back is not what was written", {"bytes": BYTES})
    return ok(f"{folder}: written, synced, renamed, read back, deleted")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # what is wrong with the folder is told already
