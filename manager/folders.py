"""The folder that a group's manager and its ranks share, and the removal of those that killed groups left behind.

A group that ends removes its own. One that was killed with all it had cannot, so the next manager of the same user
does: the name says which process made the folder, and the socket in it whether a manager is there.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

from lightkeeper.errors import ToldError

SOCKET = "manager.sock"
AGE_S_MIN = 60.0  # a manager that is just being started has no socket yet, and may be of a container with other pids
ROOM_BYTES = 1 << 16  # the ranks' pages, a block each
_NAME = re.compile(r"lightkeeper-([1-9][0-9]{0,9})-[a-z0-9_]{8}")


class FolderNotMade(ToldError):
    """There is no room, or no right, to make a group's folder."""


def make_folder() -> Path:
    """A new folder, of this user alone, named after this process; there is room in it for what a group needs.

    Raises:
        FolderNotMade: there is not.
    """
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"lightkeeper-{os.getpid()}-"))
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        where = folder.parent if folder is not None else _temporary()
        raise FolderNotMade(
            f"cannot make a folder for the group in {where}: {error.strerror or error}; make room there, or set TMPDIR "
            "to another folder"
        ) from error
    return folder


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "the folder of temporary files")


def remove_left_over(parent: Path | None = None, age_s_min: float = AGE_S_MIN) -> list[Path]:
    """Removes the folders of this user's groups that are gone; links, and what is not ours, are left alone.

    Args:
        parent: where they are; None for the folder of temporary files.
        age_s_min: what changed within so many seconds is left alone.

    Returns:
        What was removed.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        named = sorted(entry.name for entry in os.scandir(parent) if _NAME.fullmatch(entry.name))
    except OSError:
        return []
    gone = [parent / name for name in named if _is_left_over(parent / name, age_s_min)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)  # follows no links, and removes none of its own name
    return gone


def _is_left_over(folder: Path, age_s_min: float) -> bool:
    found = _NAME.fullmatch(folder.name)
    try:
        status = folder.lstat()
    except OSError:
        return False
    if found is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    if time.time() - status.st_mtime < age_s_min or _is_there(int(found[1])):
        return False
    return not _answers(folder / SOCKET)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's by now
        return True
    return True


def _answers(path: Path) -> bool:
    """Whether somebody listens, or may: only a refused connection, or no socket at all, says that nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
