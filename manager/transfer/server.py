"""Serves what a peer of the same rank index needs: an entry that it missed, or a whole state and what follows."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import xxhash

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.groups import Note
from lightkeeper.manager.state.layout import LayoutError, state_name_from_json, state_name_to_json
from lightkeeper.manager.state.snapshot import Snapshot
from lightkeeper.manager.transfer.provider import EntryProvider, Provider, Refused
from lightkeeper.manager.transfer.wire import (
    HELLO_MAX,
    Connection,
    WireError,
    describe,
    entry_from_json,
    entry_to_json,
    part_names,
    parts_to_json,
)
from lightkeeper.words import Seldom

__all__ = ["EntryServer", "Refused", "TransferServer"]

WAIT_S_MAX = 60.0  # for an entry that is not there yet
HELLO_S = 5.0  # within which a connection shows the token
STRANGERS_MAX = 64  # connections that have not; the oldest makes room for a new one


class TransferServer:
    """Listens for peers in a thread, and serves each in a thread of its own.

    Args:
        token: The job's token; a peer that does not show it gets no answer but a refusal.
        provider: Gives what is served.
        refused: Told one line about every connection that was turned away (a wrong token, a malformed frame).
        host: Address to listen on.
        port: Port, 0 for a free one.
        timeout_s: Bound on one request with its reply, and on the wait for the next, in seconds.
        connections_max: Bound on transfers at one time; more are turned away.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        token: str,
        provider: Provider,
        refused: Note = lambda line: None,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 30.0,
        connections_max: int = 16,
    ) -> None:
        self._token = token.encode()
        self._provider = provider
        self._note, self._seldom = refused, Seldom()
        self._strangers: dict[socket.socket, None] = {}  # have not shown the token yet; oldest first
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._free = threading.Semaphore(connections_max)
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=connections_max)
        self._thread = threading.Thread(target=self._accept, name="transfer server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, "host:port" ("[host]:port" for IPv6)."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening; transfers under way end by themselves."""
        if self._closed:
            return
        self._closed = True
        _shut_down(self._listener)  # wakes accept()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._listener.accept()
            except OSError as e:
                if not self._closed:
                    self._refused(f"the transfer server stopped listening: {e}")
                return
            name = f"{peer[0]}:{peer[1]}"
            with self._lock:
                self._strangers[sock] = None
                if len(self._strangers) > STRANGERS_MAX:
                    _shut_down(next(iter(self._strangers)))
            threading.Thread(target=self._serve, args=(sock, name), name=f"serve {name}", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with Connection(sock, min(self._timeout_s, HELLO_S)) as connection:
                try:
                    known = self._greet(connection, peer)
                finally:
                    with self._lock:
                        self._strangers.pop(sock, None)
                if known and self._free.acquire(blocking=False):
                    try:
                        self._converse(connection)
                    finally:
                        self._free.release()
                elif known:
                    self._refused(f"{peer} was turned away: too many transfers at one time")
                    connection.send_header({"refused": "too many transfers at one time"})
        except (WireError, OSError) as e:
            self._refused(f"transfer to {peer} broke off: {e}")

    def _refused(self, line: str) -> None:
        if (said := self._seldom.lets(line)) is not None:
            self._note(said)

    def _greet(self, connection: Connection, peer: str) -> bool:
        """Whether the peer shows the token."""
        hello = connection.receive_header(HELLO_MAX)
        shown = hello.get("token")
        known = isinstance(shown, str) and hmac.compare_digest(shown.encode(errors="replace"), self._token)
        if not known:
            self._refused(f"{peer} was refused: {'no' if shown is None else 'a wrong'} job token")
            connection.send_header({"refused": "the job token is missing or wrong"})
        return known

    def _converse(self, connection: Connection) -> None:
        connection.renew(self._timeout_s)
        connection.send_header({"welcome": True})
        while not self._closed:
            connection.renew(self._timeout_s)
            try:
                if connection.ended():
                    return
            except OSError:
                return  # between two requests nothing is lost: it died, or has no more to ask
            self._answer(connection, connection.receive_header())

    def _answer(self, connection: Connection, request: dict[str, Any]) -> None:
        connection.renew(self._timeout_s)
        try:
            if "state" in request:
                self._answer_state(connection, request)
            elif "after" in request:
                self._answer_after(connection, request)
            else:
                name = entry_from_json(request.get("entry"))
                with self._provider.entry(name) as tensors:
                    _send_entry(connection, name, tensors, {})
        except Refused as e:
            connection.send_header({"refused": str(e), "kind": e.kind})

    def _answer_after(self, connection: Connection, request: dict[str, Any]) -> None:
        name, wait_s = _state_name(request["after"]), request.get("wait_s")
        if not isinstance(wait_s, int | float) or not 0 <= wait_s < float("inf"):
            raise WireError("the request does not say how long it may wait")
        wait_s = min(float(wait_s), WAIT_S_MAX)
        connection.renew(self._timeout_s + wait_s)
        with self._provider.after(name, wait_s) as successor:
            _send_entry(connection, successor.name, successor.tensors, {"after": state_name_to_json(name)})

    def _answer_state(self, connection: Connection, request: dict[str, Any]) -> None:
        name = None if request["state"] is None else _state_name(request["state"])
        with self._provider.snapshot(name) as snapshot:
            if "range" in request:
                _send_range(connection, snapshot, request["range"])
            elif "whole" in request:
                connection.send_header({"fingerprint": snapshot.fingerprint})
            else:
                _send_layout(connection, snapshot)


class EntryServer(TransferServer):
    """Serves entries only.

    Args:
        token: As for `TransferServer`, like all others.
        provider: Gives the tensors of an entry, buckets first and extras last, unchanged until the context is
            left; raises `Refused` on entering.
        refused: See there.
        host: See there.
        port: See there.
        timeout_s: See there.
        connections_max: See there.
    """

    def __init__(
        self,
        token: str,
        provider: EntryProvider,
        refused: Note = lambda line: None,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 30.0,
        connections_max: int = 16,
    ) -> None:
        super().__init__(token, _EntriesOnly(provider), refused, host, port, timeout_s, connections_max)


class _EntriesOnly(Provider):
    def __init__(self, provider: EntryProvider) -> None:
        self._provider = provider

    def entry(self, name: Entry) -> AbstractContextManager[Sequence[torch.Tensor]]:
        return self._provider(name)


def _state_name(data: Any) -> Entry:
    try:
        return state_name_from_json(data)
    except LayoutError as e:
        raise WireError(f"the request does not name a state: {e}") from e


def _send_layout(connection: Connection, snapshot: Snapshot) -> None:
    text = snapshot.layout.to_bytes()
    header = {
        "state": state_name_to_json(snapshot.name),
        "nbytes": len(text),
        "xxh3_64": xxhash.xxh3_64_hexdigest(text),
        "digest": snapshot.layout.digest,
    }
    connection.send_header(header, memoryview(text))


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # whoever reads from it is told
    except OSError:
        pass


def _send_range(connection: Connection, snapshot: Snapshot, index: Any) -> None:
    if type(index) is not int or not 0 <= index < snapshot.layout.ranges:
        raise WireError(f"the request names no range of {snapshot.layout.ranges}")
    header = {"range": index, "xxh3_64": snapshot.checksum(index)}
    connection.send_header(header, snapshot.range(index))


def _send_entry(connection: Connection, entry: Entry, tensors: Sequence[torch.Tensor], more: dict[str, Any]) -> None:
    names = part_names(len(tensors))
    data = [raw_bytes(tensor) for tensor in tensors]
    parts = [describe(name, tensor, raw) for name, tensor, raw in zip(names, tensors, data, strict=True)]
    header: dict[str, Any] = {"entry": entry_to_json(entry), "parts": parts_to_json(parts), **more}
    connection.send_header(header)
    for raw in data:
        connection.send(raw)
