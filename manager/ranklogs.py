"""The logs of a node's ranks: the pipes that they print into, and the process that empties them (`tee.py`).

The launcher keeps the pipes' read ends too: should that process be killed, it is started anew and no rank gets SIGPIPE.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from lightkeeper.words import say

TEE = "lightkeeper.manager.tee"
STARTS_MAX = 20
KEPT = 10  # logs of a rank's earlier incarnations
END_S_MAX = 3.0  # more than the process takes for its last bytes
TAIL_BYTES = 64 << 10


class RankLogs:
    """The logs of one start of the group.

    Args:
        folder: where the log files are.
        group: the group's name.
        ranks: the ranks of this node.
        incarnation: name of this start of the group.

    Raises:
        OSError: a log file cannot be made.
    """

    def __init__(self, folder: Path, group: str, ranks: range, incarnation: str) -> None:
        self.paths = {rank: folder / f"{group}-rank{rank}-{incarnation}.log" for rank in ranks}
        folder.mkdir(parents=True, exist_ok=True)
        for rank, path in self.paths.items():
            _remove_oldest(folder, f"{group}-rank{rank}-*.log")
            path.touch(exist_ok=False)
        self._read: dict[int, tuple[int, int]] = {}
        self._write: dict[int, tuple[int, int]] = {}
        self._tee: subprocess.Popen[bytes] | None = None
        self._watched, self._starts = -1, 0
        for rank in ranks:
            (out_read, out_write), (error_read, error_write) = os.pipe(), os.pipe()
            self._read[rank], self._write[rank] = (out_read, error_read), (out_write, error_write)

    def outputs(self, rank: int) -> tuple[int, int]:
        """Descriptors for a rank's standard output and standard error."""
        return self._write[rank]

    def start(self) -> None:
        """Once all ranks are started: from now on their pipes are emptied, until they end."""
        for descriptors in self._write.values():
            _close(descriptors)
        self._write.clear()
        self._start_tee()

    def _start_tee(self) -> None:
        self._starts += 1
        read = {descriptor for pair in self._read.values() for descriptor in pair}
        sources = [
            (descriptor, stream, str(self.paths[rank]))
            for rank, pair in self._read.items()
            for stream, descriptor in enumerate(pair, 1)
        ]
        self._tee = subprocess.Popen(
            [sys.executable, "-m", TEE, json.dumps(sources)],
            stdin=subprocess.DEVNULL, pass_fds=sorted(read), start_new_session=True,
        )  # fmt: skip
        self._watched = os.pidfd_open(self._tee.pid)
        asyncio.get_running_loop().add_reader(self._watched, self._tee_ended)

    def _tee_ended(self) -> None:
        self._forget()
        assert self._tee is not None
        if self._tee.wait() == 0:
            return  # with the ranks
        if self._starts < STARTS_MAX:
            say(f"what copied the ranks' output ended with {self._tee.returncode}; it is started again")
            self._start_tee()

    def _forget(self) -> None:
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
            os.close(self._watched)
            self._watched = -1

    @property
    def size(self) -> int:
        """Bytes of all logs; grows with every line until one begins anew."""
        total = 0
        for path in self.paths.values():
            with contextlib.suppress(FileNotFoundError):  # it is just beginning anew
                total += path.stat().st_size
        return total

    def tail(self, rank: int, bytes_max: int = TAIL_BYTES) -> bytes:
        """The last bytes that a rank has printed.

        Raises:
            OSError: its log cannot be read.
        """
        with open(self.paths[rank], "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - bytes_max))
            return file.read(bytes_max)

    async def end(self) -> None:
        """The ranks, and what they started, have ended: waits until what they said last is written."""
        self._forget()
        for descriptors in (*self._write.values(), *self._read.values()):
            _close(descriptors)
        self._write.clear()
        self._read.clear()
        if self._tee is None:
            return
        try:
            await asyncio.to_thread(self._tee.wait, END_S_MAX)
        except subprocess.TimeoutExpired:
            self._tee.kill()  # something that left the ranks' sessions still holds a pipe
            self._tee.wait()


def _close(descriptors: tuple[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _remove_oldest(folder: Path, pattern: str) -> None:
    with contextlib.suppress(OSError):
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        for path in found[: max(0, len(found) - KEPT)]:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.1").unlink(missing_ok=True)
