"""The lighthouse's log: terms, epoch numbers and memberships, fsynced before they are spoken of.

One JSON object a line. The file is locked while a lighthouse reigns by it; a copy of it is not the log.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path

from lightkeeper.lighthouse.actions import Activated, Promised, Record, Superseded
from lightkeeper.lighthouse.loglines import JobLine, TermLine, decode, encode, encode_term, record_in
from lightkeeper.lighthouse.names import Epoch, Membership, Term


class LogError(RuntimeError):
    """The log cannot be used; the message says why and what to do."""


@dataclass
class JobHistory:
    """What the log knows of a job.

    Attributes:
        broken_off: newest epoch of a job that ended before its last step: nobody goes on from it, or from one below.
        reigns: whether no other lighthouse is known to have been obeyed since the newest membership was logged.
    """

    highest: int = 0
    membership: Membership | None = None
    prepared: list[Membership] = field(default_factory=list)
    reigns: bool = True
    broken_off: Epoch | None = None

    def copy(self) -> JobHistory:
        """The same, to be changed apart from this one."""
        return replace(self, prepared=list(self.prepared))

    def apply(self, record: Record) -> None:
        """Takes one record in."""
        if isinstance(record, Promised):
            self.highest = max(self.highest, record.number)
            if record.planned is not None:
                self.prepared.append(record.planned)
        elif isinstance(record, Superseded):
            self.reigns = False
        elif isinstance(record, Activated):
            self.membership, self.reigns = record.membership, True
            self.highest = max(self.highest, record.membership.epoch.number)
            self.prepared = [p for p in self.prepared if p.base == record.membership.epoch]
        else:
            if self.membership is not None and not record.ok:
                self.broken_off = self.membership.epoch
            self.membership, self.prepared, self.reigns = None, [], True


class LighthouseLog:
    """Opens (or creates) the log in a folder, starts a new term in it and appends records.

    Args:
        folder: the log's folder; None keeps everything in memory, so that a restart knows nothing.

    Raises:
        LogError: if the folder cannot be written, another lighthouse holds it, or a line in it is not readable.
    """

    def __init__(self, folder: Path | None) -> None:
        self.jobs: dict[str, JobHistory] = {}
        self._file: FileIO | None = None
        number, lighthouse = 0, secrets.token_hex(4)
        if folder is not None:
            path = folder / "lighthouse.log"
            self._file = self._open(path)
            try:
                for line in self._read(path):
                    if isinstance(line, TermLine):
                        number, lighthouse = line.number, line.lighthouse
                    else:
                        self.jobs.setdefault(line.job, JobHistory()).apply(record_in(line))
            except LogError:
                self.close()
                raise
        self.term = Term(number, lighthouse)
        self.rise(number + 1)

    def rise(self, number: int) -> Term:
        """Starts a higher term of this lighthouse, fsynced."""
        self.term = Term(number, self.term.lighthouse)
        self._write(encode_term(self.term))
        return self.term

    def append(self, job: str, record: Record) -> None:
        """Takes a record in and returns when it is on disk."""
        self.jobs.setdefault(job, JobHistory()).apply(record)
        self._write(encode(job, record))

    def close(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def _open(path: Path) -> FileIO:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise LogError(f"cannot write the lighthouse log {path}: {error.strerror}; give another --log") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise LogError(f"another lighthouse holds the log {path}; stop it or give another --log") from error
        return file

    @staticmethod
    def _read(path: Path) -> Iterator[TermLine | JobLine]:
        offset = 0
        for number, line in enumerate(io.BytesIO(path.read_bytes()), 1):
            if not line.endswith(b"\n"):  # torn by a crash while it was written: it was never spoken of
                os.truncate(path, offset)
                return
            try:
                yield decode(line)
            except ValueError as error:
                where = f"line {number} (byte {offset})"
                raise LogError(f"{path} is damaged in {where}: {error}; move it away to start without it") from error
            offset += len(line)

    def _write(self, line: bytes) -> None:
        """Writes past any buffer: what a full disk did not take must not turn up again when the file is closed."""
        if self._file is None:
            return
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LogError(f"cannot write the lighthouse log {self._file.name}: {error.strerror}") from error
