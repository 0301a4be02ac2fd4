"""Writing the event log: one file per process, one `write` per event, and never a reason for training to
stop.

A line is handed to the kernel in a single `write` on a descriptor opened with O_APPEND, so a SIGKILL between
two events loses nothing and one inside a write leaves at most a torn last line. After the start nothing here
raises: on a full disk the events are counted, a line on standard error says so once, and another when writing
works again.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from lightkeeper.errors import RunFolderError
from lightkeeper.events.schema import SCHEMA_VERSION, Event, EventsDropped

LINE_BYTES_MAX = 1 << 20
TEXT_CHARS_MAX = 16_384  # tracebacks and evidence beyond this keep their end, where the cause stands


def tail_text(text: str, limit: int = TEXT_CHARS_MAX) -> str:
    """The last `limit` characters of `text`, marked if something was left out."""
    return text if len(text) <= limit else "[...] " + text[-limit:]


def file_name(process: str, pid: int) -> str:
    """`rank g2/0` with pid 71 writes to `rank-g2-0-71.jsonl`."""
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', process)}-{pid}.jsonl"


class EventLog:
    """One process's part of a run's event log.

    Safe to use from several threads, and after a fork (the child opens a file of its own).

    Args:
        folder: the run's folder; the files lie in `<folder>/events/`.
        process: who writes: "lighthouse", "manager g2", "rank g2/0".
        job: the job's id.
        group: the writer's group, for events that name none.
        incarnation: which start of that group.
        run: name of the run; the folder's name if empty.

    Raises:
        RunFolderError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        process: str,
        *,
        job: str = "",
        group: str = "",
        incarnation: str = "",
        run: str = "",
    ) -> None:
        self.folder = Path(folder).absolute()
        self.process, self.job, self.group, self.incarnation = process, job, group, incarnation
        self.run = run or self.folder.name
        self.dropped = 0
        self._host = socket.gethostname()
        self._encoder = msgspec.json.Encoder()
        self._path: Path = self.folder
        self._descriptor = -1
        self._reset(os.getpid())
        try:
            (self.folder / "events").mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise RunFolderError(f"cannot write the run folder {self.folder}: {error.strerror or error}") from None

    @property
    def path(self) -> Path:
        """The file that this process writes."""
        return self._path

    def write(self, event: Event) -> None:
        """Append one event; fills in the header. Never raises for a disk that is full or gone."""
        pid = os.getpid()
        if pid != self._pid:  # we are a forked child: the parent's file, lock and counter are not ours
            self._reset(pid)
        with self._lock:
            if self._closed:
                return
            line = self._encode(event)
            if line is None:
                self._drop("an event is larger than a line may be")
                return
            try:
                if self._descriptor < 0:
                    self._open()
                if self.dropped:
                    self._write_all(self._encode_line(EventsDropped(count=self.dropped)))
                    self._seq += 1
                    line = self._encode_line(event)
                    self._recovered()
                self._write_all(line)
                self._seq += 1
            except OSError as error:
                self._drop(error.strerror or str(error))

    def close(self) -> None:
        """Close the file; later writes do nothing. Idempotent."""
        with self._lock:
            if self._descriptor >= 0 and self._pid == os.getpid():
                os.close(self._descriptor)
            self._descriptor = -1
            self._closed = True

    def _reset(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._descriptor = -1
        self._seq = 0
        self._torn = False
        self._told = False
        self._closed = False
        self.dropped = 0

    def _open(self) -> None:
        self._path = self.folder / "events" / file_name(self.process, self._pid)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)

    def _encode(self, event: Event) -> bytes | None:
        try:
            line = self._encode_line(event)
        except (TypeError, ValueError, OverflowError) as error:
            # A value JSON cannot hold is a bug at the call site; tests see it, a run in its tenth hour does
            # not stop.
            sys.stderr.write(f"lightkeeper: event {type(event).__name__} cannot be written: {error}\n")
            return None
        return line if len(line) <= LINE_BYTES_MAX else None

    def _encode_line(self, event: Event) -> bytes:
        filled = msgspec.structs.replace(
            event,
            v=SCHEMA_VERSION,
            run=self.run,
            job=event.job or self.job,
            process=self.process,
            group=event.group or self.group,
            incarnation=event.incarnation or (self.incarnation if event.group in ("", self.group) else ""),
            host=self._host,
            pid=self._pid,
            wall=time.time(),
            mono_ns=time.monotonic_ns(),
            seq=self._seq,
        )
        return self._encoder.encode(filled) + b"\n"

    def _write_all(self, line: bytes) -> None:
        """One `write`; a short one leaves a torn line, which the next write closes with a line break."""
        if self._torn:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        if written != len(line):
            self._torn = self._torn or written > 0
            raise OSError(28, "no space left on device")
        self._torn = False

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._told:
            self._told = True
            self._say(f"event log {self._path}: {why}; training goes on, events are being dropped")

    def _recovered(self) -> None:
        self._say(f"event log {self._path}: writing works again, {self.dropped} events were dropped")
        self.dropped, self._told = 0, False

    @staticmethod
    def _say(text: str) -> None:
        try:
            sys.stderr.write(f"lightkeeper: {text}\n")
        except (OSError, ValueError):  # standard error is on the same full disk, or closed
            pass
