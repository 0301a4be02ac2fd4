"""Runs a command as if nobody stood between it and its terminal, and keeps what it prints.

Its two streams pass through as they come, byte by byte the same; where this process has a terminal it has one too. If
both of our streams are one file, it gets one for both, so that their order stays. What a log's storage does holds
nothing up. Signals are handed on, but for those that the terminal sends to both of us anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from lightkeeper.manager.tee import Log, Writer

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell says it
LOG_BYTES_MAX = 1 << 30  # of one log file; the one before it is kept as well
TAIL_BYTES_MAX = 4 << 20
READ_BYTES = 1 << 16
QUIET_S = 1.0  # how long a stream is read on for after the command's end, if something else holds it open
LOGGED_S_MAX = 10.0
_SI_KERNEL = 0x80  # siginfo.h: the terminal sent it, to all in the foreground
_PR_SET_PDEATHSIG = 1


class Tail:
    """The last bytes of all streams, in the order in which they came."""

    def __init__(self, bytes_max: int = TAIL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def put(self, stream: int, data: bytes) -> None:
        """Adds what came; drops what is too old."""
        with self._lock:
            self._chunks.append((stream, data))
            self._size += len(data)
            while self._size > self._bytes_max and len(self._chunks) > 1:
                self._size -= len(self._chunks.popleft()[1])

    def lines(self) -> list[str]:
        """Whole lines, in the order in which they ended."""
        begun: dict[int, bytes] = {}
        lines: list[bytes] = []
        with self._lock:
            chunks = tuple(self._chunks)
        for stream, data in chunks:
            *whole, rest = (begun.get(stream, b"") + data).split(b"\n")
            lines += whole
            begun[stream] = rest
        lines += [rest for rest in begun.values() if rest]
        return [line.decode("utf-8", "replace") for line in lines]


class _Stream:
    """One stream of the command's: read in a thread, written on, kept."""

    def __init__(self, source: int, target: int, log: Writer, tail: Tail) -> None:
        self._source, self._target, self._log, self._tail = source, target, log, tail
        self.writing = False
        self.heard_s = time.monotonic()
        self.thread = threading.Thread(target=self._copy, name="lightkeeper-stream", daemon=True)

    def _copy(self) -> None:
        while True:
            try:
                data = os.read(self._source, READ_BYTES)
            except OSError:  # a terminal whose other side is closed says so
                break
            if not data:
                break
            self.heard_s = time.monotonic()
            self._log.put(data)
            self._tail.put(self._target, data)
            self.writing = True
            if not self._write(data):
                break  # whoever read us is gone: closed, the command learns it as if it wrote there itself
            self.writing = False
        os.close(self._source)
        self.writing = False

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # somebody made it so
                select.select([], [self._target], [])
            except OSError:
                return False
        return True


class Child:
    """A command that is being run.

    Args:
        argv: the program and its arguments.
        environment: what it gets; this process's own may have changed since it began.
        log: the log file of each stream: of 1 and 2, or of 1 alone if they are one file (see `one_stream`).

    Raises:
        OSError: this machine has no more processes or descriptors.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], logs: Mapping[int, str]) -> None:
        self.tail = Tail()
        self.asked: list[int] = []  # signals that were handed on
        self.held_open = False  # something that it started still has its streams
        self._own_group = not _has_terminal()
        # Before any thread is made: one that does not block them would take them, and nobody would be told.
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGCHLD, signal.SIGWINCH})
        self._logs = {number: Writer(Log(path, LOG_BYTES_MAX).write) for number, path in logs.items()}
        ends = {number: _pair(number) for number in logs}
        self._terminals = [ours for number, (ours, _) in ends.items() if os.isatty(number)]
        libc = ctypes.CDLL(None, use_errno=True)  # here: a forked child must not load anything
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
                if os.getppid() == parent:
                    self._become(list(argv), environment, {number: theirs for number, (_, theirs) in ends.items()})
            finally:
                os._exit(NOT_FOUND)
        for _, theirs in ends.values():
            os.close(theirs)
        self._streams = [_Stream(ours, number, self._logs[number], self.tail) for number, (ours, _) in ends.items()]
        for stream in self._streams:
            stream.thread.start()

    def _become(self, argv: list[str], environment: Mapping[str, str], ends: Mapping[int, int]) -> None:
        """In the forked child: becomes the command."""
        if self._own_group:
            os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(ends.get(number, ends[1]), number)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores these two
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        try:
            os.execvpe(argv[0], argv, environment)
        except OSError as error:
            os.write(2, f"lightkeeper: {argv[0]}: {error.strerror}\n".encode())
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        except ValueError as error:  # a name with a zero byte, or an empty one
            os.write(2, f"lightkeeper: {argv[0]!r}: {error}\n".encode())
            os._exit(NOT_EXECUTABLE)

    def wait(self) -> int:
        """Hands signals on until the command has ended and all that it printed is passed on.

        Returns:
            Its exit code, negative for a signal, as in `subprocess`.
        """
        code = None
        while code is None:
            got = signal.sigwaitinfo({*HANDED_ON, signal.SIGCHLD, signal.SIGWINCH})
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
            elif got.si_signo == signal.SIGWINCH:
                for terminal in self._terminals:
                    _copy_size(1, terminal)
            elif got.si_signo != signal.SIGCHLD and (self._own_group or got.si_code != _SI_KERNEL):
                self.asked.append(got.si_signo)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, got.si_signo)  # not waited for yet, so the number is its own
        self._drain()
        return code

    def _drain(self) -> None:
        """What is still on its way. A reader of ours may take its time, as it could with the command itself."""
        for stream in self._streams:
            begun_s = time.monotonic()
            while stream.thread.is_alive():
                stream.thread.join(0.02)
                quiet_s = time.monotonic() - max(begun_s, stream.heard_s)
                if not stream.writing and quiet_s > QUIET_S:
                    self.held_open = stream.thread.is_alive()
                    break
                if signalled(0):
                    return
        until_s = time.monotonic() + LOGGED_S_MAX
        for log in self._logs.values():
            log.drained(until_s)


def signalled(within_s: float) -> bool:
    """Waits for a signal that would be handed on, after the command has ended; whether there was one."""
    return signal.sigtimedwait(set(HANDED_ON), within_s) is not None


def while_waiting(work: Callable[[], object]) -> bool:
    """Does something in a thread, until a signal comes that asks to end; whether it was done."""
    thread = threading.Thread(target=work, name="lightkeeper-end", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.005)
        if thread.is_alive() and signalled(0):
            return False
    return True


def one_stream() -> bool:
    """Whether standard output and error are one file."""
    first, second = os.fstat(1), os.fstat(2)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _pair(number: int) -> tuple[int, int]:
    """Our end and the command's end of a stream: a terminal if ours is one, which changes no byte; else a pipe."""
    if not os.isatty(number):
        return os.pipe()
    import pty
    import termios
    import tty

    ours, theirs = pty.openpty()
    tty.setraw(theirs, termios.TCSANOW)
    _copy_size(number, ours)
    os.set_inheritable(ours, False)
    return ours, theirs


def _copy_size(source: int, terminal: int) -> None:
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(source)
        import termios

        termios.tcsetwinsize(terminal, (size.lines, size.columns))
