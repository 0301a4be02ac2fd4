"""One supervisor for a run: a lock in its folder, which the kernel lets go when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from lightkeeper.errors import UsageError


class Held:
    """Holds a run's folder; a context manager.

    Args:
        folder: of the run; made if it is not there.

    Raises:
        UsageError: another supervisor has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "supervisor.lock"
        self._handle = -1

    def __enter__(self) -> Held:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(self._handle, 20, 0).decode(errors="replace").strip()
            os.close(self._handle)
            raise UsageError(
                f"{self._path.parent} has a supervisor already (pid {pid or 'unknown'}): `lightkeeper status` of that "
                "folder says what it does, SIGTERM ends its run in good order"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot use {self._path.parent}: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
