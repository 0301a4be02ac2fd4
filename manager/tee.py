"""Copies what the ranks of a node print: to the launcher's own streams, and into a log file for each rank.

A process of its own, `python -m lightkeeper.manager.tee JSON`, so that a launcher which is stopped or busy holds up no
rank. It reads all that comes, always: what it writes is written by other threads, which may hang on a terminal that
nobody reads or a storage that does not answer. Then they fall behind by a bounded amount, and after that bytes are left
out, and how many is said. It ends when all pipes have: with the ranks, and with what they started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lightkeeper.streams import open_closed_streams

READ_BYTES = 1 << 16
LINE_S = 0.05  # for the rest of a line to come: Python writes words of an unbuffered print one by one
LINE_BYTES_MAX = 1 << 16
BEHIND_BYTES_MAX = 16 << 20  # of one writer
LOG_BYTES_MAX = 16 << 20  # of one log file; the one before it is kept as well
AGAIN_S = 1.0  # between two tries at a log that cannot be written
DRAIN_S_MAX = 2.0


class Source(NamedTuple):  # dataclasses take 10 ms to import, and somebody waits for this process
    """One pipe: its descriptor, the stream (1 or 2) that its bytes go to, and the log file."""

    descriptor: int
    stream: int
    log: str


class Writer:
    """A thread that writes, so that its reader never waits.

    Args:
        write: writes all it is given, and may take for ever.
        bytes_max: how far it may fall behind.
    """

    def __init__(self, write: Callable[[bytes], None], bytes_max: int = BEHIND_BYTES_MAX) -> None:
        self._write, self._bytes_max = write, bytes_max
        self._queue: deque[bytes] = deque()
        self._queued = self._left_out = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, data: bytes) -> None:
        """Has it written later, or leaves it out."""
        with self._changed:
            if self._queued + len(data) > self._bytes_max:
                self._left_out += len(data)
                return
            self._say_left_out()
            self._queue.append(data)
            self._queued += len(data)
            self._changed.notify_all()

    def _say_left_out(self) -> None:
        if self._left_out:
            note = left_out(self._left_out, "nobody read them")
            self._queue.append(note)
            self._queued, self._left_out = self._queued + len(note), 0

    def drained(self, until_s: float) -> bool:
        """Waits until all is written; whether it is."""
        with self._changed:
            self._say_left_out()
            self._changed.notify_all()
            while self._queued and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._queued

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                data = self._queue.popleft()
            self._write(data)
            with self._changed:
                self._queued -= len(data)
                self._changed.notify_all()


class Log:
    """A rank's log file, which begins anew when it is full; a disk that is full costs lines, and how many is said."""

    def __init__(self, path: str, bytes_max: int = LOG_BYTES_MAX) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._file, self._size = -1, 0
        self._lost, self._why, self._tried_s = 0, "", 0.0

    def write(self, data: bytes) -> None:
        """Appends; never raises."""
        if self._lost and time.monotonic() - self._tried_s < AGAIN_S:
            self._lost += len(data)
            return
        note = left_out(self._lost, self._why) if self._lost else b""
        try:
            self._append(note)
            self._lost = 0
            self._append(data)
        except OSError as error:
            self._lost += len(data)
            self._why, self._tried_s = error.strerror or str(error), time.monotonic()

    def _append(self, data: bytes) -> None:
        if self._file < 0 or self._size + len(data) > self._bytes_max:
            self._open()
        while data:
            written = os.write(self._file, data)
            self._size += written
            data = data[written:]

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            os.replace(self._path, f"{self._path}.1")
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size


def left_out(count: int, why: str) -> bytes:
    """The line that stands for bytes."""
    return f"\n[lightkeeper: {count} bytes are left out here: {why}]\n".encode()


def write_stream(descriptor: int) -> Callable[[bytes], None]:
    """Writes to a stream of the launcher's until it is closed; after that nothing."""
    closed = False

    def write(data: bytes) -> None:
        nonlocal closed
        while data and not closed:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # somebody has made it so
                select.select([], [descriptor], [], AGAIN_S)
            except OSError:
                closed = True  # whoever read it is gone; the logs go on

    return write


def copy(sources: list[Source]) -> None:
    """Copies until all pipes have ended; to the streams, which others write to as well, by lines."""
    by_descriptor = {source.descriptor: source for source in sources}
    streams = {number: Writer(write_stream(number)) for number in sorted({source.stream for source in sources})}
    logs = {path: Writer(Log(path).write) for path in sorted({source.log for source in sources})}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    begun: dict[int, tuple[float, bytes]] = {}  # since when: lines whose end has not come
    while by_descriptor:
        ready = poll.poll(LINE_S * 1000 if begun else None)
        now = time.monotonic()
        for descriptor, _ in ready:
            data = os.read(descriptor, READ_BYTES)
            since, line = begun.pop(descriptor, (now, b""))
            source, line = by_descriptor[descriptor], line + data
            if not data:
                poll.unregister(descriptor)
                del by_descriptor[descriptor]
            else:
                logs[source.log].put(data)
                whole = max(line.rfind(b"\n"), line.rfind(b"\r")) + 1 or (len(line) > LINE_BYTES_MAX) * len(line)
                if line[whole:]:
                    begun[descriptor] = (now if whole else since, line[whole:])
                line = line[:whole]
            if line:
                streams[source.stream].put(line)
        for descriptor, (since, line) in tuple(begun.items()):
            if now - since >= LINE_S:  # it waits for an answer, or is a bar of progress
                streams[by_descriptor[descriptor].stream].put(line)
                del begun[descriptor]
    until_s = time.monotonic() + DRAIN_S_MAX
    for writer in (*streams.values(), *logs.values()):
        writer.drained(until_s)


def main() -> None:
    """Copies what the command line says."""
    import json

    open_closed_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it ends with the ranks, and what they say last is still wanted
    with contextlib.suppress(KeyboardInterrupt):
        copy([Source(*one) for one in json.loads(sys.argv[1])])
    os._exit(0)  # a writer may hang


if __name__ == "__main__":
    main()
