"""A rank's end of the local socket: calls, pushes, and the end of the rank with its manager.

When the manager's socket ends, the listening thread ends this process. A rank that holds the interpreter lock just then
ends when it lets go of it, or at once where `lightkeeper launch` started it (the kernel sees to that).
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.util
import os
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lightkeeper.errors import ToldError
from lightkeeper.manager import exits, local
from lightkeeper.manager.groups import GroupFailed
from lightkeeper.manager.processes import die_with_parent, heed_parent_alone
from lightkeeper.manager.progress import ProgressPage
from lightkeeper.words import say

BEAT_S = 0.1


class ManagerLost(ToldError):
    """There is no manager to speak to."""

    exit_code = exits.ORPHANED


class Pushes(Protocol):
    """What the listening thread hands on; called in that thread."""

    def abort(self, below: int, reason: str) -> None:
        """Epochs below this number are over."""

    def build(self, plan: local.Plan) -> None:
        """Build this epoch's group in the background."""

    def touch(self) -> None:
        """A copy of the state will be wanted at a boundary ahead."""

    def instead(self, source: local.Source) -> None:
        """The donors that are waited for copy at another boundary."""

    def release(self) -> None:
        """Nobody needs the copy and the kept entries any more."""


class ManagerClient:
    """Connects to the group's manager and registers this rank.

    Args:
        path: the manager's local socket.
        register: who this rank is.
        page: beaten while the listening thread lives.
        how_it_ended: says how the manager's process ended, for the last words of an orphaned rank.
    """

    def __init__(
        self, path: Path, register: local.Register, page: ProgressPage, how_it_ended: Callable[[], str]
    ) -> None:
        self._page, self._how_it_ended = page, how_it_ended
        self._socket = _connect(path)
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[local.Answer] = queue.SimpleQueue()
        self._keys: dict[int, queue.SimpleQueue[local.Key]] = {}
        self._requests = itertools.count(1)
        self._closed = False
        self._forked_by_main = False
        self._pushes: Pushes | None = None
        self._wishes: deque[local.AskLeave] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.send(register)
        registered = self._receive()
        if not isinstance(registered, local.Registered):
            raise ManagerLost("the group's manager ended, or refused this rank; see its last line")
        self.registered = registered
        os.register_at_fork(before=self._note_thread, after_in_child=self._forget_in_child)
        multiprocessing.util.register_after_fork(self, ManagerClient._heed_parent_alone)

    def listen(self, pushes: Pushes) -> None:
        """Starts the listening thread."""
        self._pushes = pushes
        threading.Thread(target=self._listen, name="lightkeeper", daemon=True).start()

    # ------------------------------------------------------------ calls

    def call(self, message: local.Ready | local.Vote) -> local.Answer:
        """Sends a vote (or that the rank is ready) and waits for the group's answer.

        The wait is bounded by the manager, which gives up after the outage budget, and by its death.
        """
        self.send(message)
        return self.next_answer()

    def next_answer(self) -> local.Answer:
        """The answer proper, after one that asked for something first."""
        return self._answers.get()

    def send(self, message: local.FromRank) -> None:
        """Sends a message that is not answered."""
        data = local.frame(message)
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def wish_to_leave(self, reason: str, notice: bool = False) -> None:
        """A signal's handler asks for the group to leave; the listening thread says it.

        The handler may have interrupted a `send` of this very thread, so it takes no lock and sends nothing.

        Args:
            reason: which signal, and to whom.
            notice: it was one that only gives notice: the next one is not a second one.
        """
        if not self._closed:
            self._wishes.append(local.AskLeave(reason=reason, signal=not notice))
            os.eventfd_write(self._wake, 1)

    def set_key(self, epoch: int, key: str, value: bytes, timeout_s: float) -> None:
        """Sets a rendezvous key of an epoch.

        Raises:
            GroupFailed: if the epoch is over or the key's holder cannot be reached.
        """
        request, answers = self._request()
        self.send(local.SetKey(epoch=epoch, key=key, value=value, timeout_ms=round(timeout_s * 1000), request=request))
        self._key(request, answers, timeout_s)

    def get_key(self, epoch: int, key: str, timeout_s: float, request: int | None = None) -> bytes:
        """Waits for a rendezvous key of an epoch.

        Raises:
            GroupFailed: as for `set_key`, or if the wait was cancelled.
        """
        request, answers = self._request(request)
        self.send(local.GetKey(epoch=epoch, key=key, timeout_ms=round(timeout_s * 1000), request=request))
        return self._key(request, answers, timeout_s)

    def next_request(self) -> int:
        """A number by which a `get_key` can be cancelled."""
        return next(self._requests)

    def cancel(self, request: int, reason: str) -> None:
        """Makes a pending `get_key` raise."""
        if (answers := self._keys.get(request)) is not None:
            answers.put(local.Key(request=request, error=reason))

    def close(self) -> None:
        """The rank goes on without its manager (after the run is closed)."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ inside

    def _request(self, number: int | None = None) -> tuple[int, queue.SimpleQueue[local.Key]]:
        number = next(self._requests) if number is None else number
        answers: queue.SimpleQueue[local.Key] = queue.SimpleQueue()
        self._keys[number] = answers
        return number, answers

    def _key(self, request: int, answers: queue.SimpleQueue[local.Key], timeout_s: float) -> bytes:
        try:
            key = answers.get(timeout=timeout_s + 2 * BEAT_S)
        except queue.Empty:
            raise GroupFailed(f"no rendezvous key within {timeout_s:.0f} s", waited=True) from None
        finally:
            self._keys.pop(request, None)
        if key.error:
            raise GroupFailed(f"rendezvous: {key.error}", waited=True)
        return key.value

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            self._page.beat()
            ready = {descriptor for descriptor, _ in poll.poll(BEAT_S * 1000)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._wishes:
                    self.send(self._wishes.popleft())
            if self._socket.fileno() not in ready:
                continue
            message = self._receive()
            if message is None:
                if not self._closed:
                    self._end_orphaned()
                break
            self._take(message)
        os.close(self._wake)

    def _take(self, message: local.ToRank) -> None:
        assert self._pushes is not None
        if isinstance(message, local.Answer):
            self._answers.put(message)
        elif isinstance(message, local.Key):
            if (answers := self._keys.get(message.request)) is not None:
                answers.put(message)
        elif isinstance(message, local.Abort):
            self._pushes.abort(message.below, message.reason)
        elif isinstance(message, local.Build):
            self._pushes.build(message.plan)
        elif isinstance(message, local.Touch):
            self._pushes.touch()
        elif isinstance(message, local.Instead):
            self._pushes.instead(message.source)
        elif isinstance(message, local.Release):
            self._pushes.release()
        elif isinstance(message, local.Say):
            say(f"lightkeeper: {message.line}")

    def _receive(self) -> local.ToRank | None:
        header = self._read(local.HEADER.size)
        if header is None:
            return None
        (size,) = local.HEADER.unpack(header)
        if size > local.FRAME_BYTES_MAX:
            raise ConnectionError(f"a frame of {size} bytes from the group's manager")
        body = self._read(size)
        return None if body is None else local.to_rank.decode(body)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionResetError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)

    def _end_orphaned(self) -> None:
        say(f"lightkeeper: {self._how_it_ended()}; this rank ends with it")
        os._exit(exits.ORPHANED)

    def _note_thread(self) -> None:
        self._forked_by_main = threading.current_thread() is threading.main_thread()

    def _forget_in_child(self) -> None:
        """A forked child (a data-loader worker) has nothing to do with the control plane, and ends with its trainer:
        it holds the trainer's connections too, and peers see them end only when it is gone. (The kernel counts the
        thread that forked as the parent, so only the main thread's children are tied.)
        """
        if self._forked_by_main:
            die_with_parent()
        if not self._closed:
            os.close(self._wake)
        self._closed = True
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _heed_parent_alone(self) -> None:
        """A data-loader worker stays while its trainer leaves, though both were sent the signal."""
        if self._forked_by_main:
            heed_parent_alone()


class EpochKeys:
    """Some rendezvous keys of an epoch, those of one rank index for instance, as a process group's store sees them."""

    def __init__(self, client: ManagerClient, epoch: int, prefix: str) -> None:
        self._client, self._epoch, self._prefix = client, epoch, prefix
        self._aborted: str | None = None
        self._pending: set[int] = set()

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        self._check()
        self._client.set_key(self._epoch, self._prefix + key, value, timeout_s=30.0)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a key."""
        request = self._client.next_request()
        self._pending.add(request)
        try:
            self._check()
            return self._client.get_key(self._epoch, self._prefix + key, timeout_s, request)
        finally:
            self._pending.discard(request)

    def abort(self, reason: str) -> None:
        """Makes pending and later calls raise."""
        self._aborted = reason
        for request in tuple(self._pending):
            self._client.cancel(request, reason)

    def _check(self) -> None:
        if self._aborted is not None:
            raise GroupFailed(f"rendezvous: {self._aborted}", aborted=self._aborted)


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        raise ManagerLost(
            f"the group's manager at {path} is not there ({error.strerror}); see its last line"
        ) from error
    return connection
