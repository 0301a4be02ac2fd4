"""Serves this rank's newest entry to a peer of the same rank index that missed it."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.groups import Note
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


class Refused(Exception):
    """The entry asked for is not served; one line says why."""


Provider: TypeAlias = Callable[[Entry], AbstractContextManager[Sequence[torch.Tensor]]]
"""Gives the tensors of an entry, unchanged until the context is left; raises `Refused` on entering."""


class EntryServer:
    """Listens for peers in a thread, and serves each in a thread of its own.

    Args:
        token: The job's token; a peer that does not show it gets no answer but a refusal.
        provider: Gives the tensors, buckets first and extras last.
        refused: Told one line about every connection that was turned away (a wrong token, a malformed frame).
        host: Address to listen on.
        port: Port, 0 for a free one.
        timeout_s: Bound on one transfer, in seconds.
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
        self._refused = refused
        self._timeout_s = timeout_s
        self._free = threading.Semaphore(connections_max)
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=connections_max)
        self._thread = threading.Thread(target=self._accept, name="entry server", daemon=True)
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
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError:
            pass
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._listener.accept()
            except OSError as e:
                if not self._closed:
                    self._refused(f"the entry server stopped listening: {e}")
                return
            name = f"{peer[0]}:{peer[1]}"
            if not self._free.acquire(blocking=False):
                sock.close()
                self._refused(f"{name} was turned away: too many transfers at one time")
                continue
            threading.Thread(target=self._serve, args=(sock, name), name=f"serve {name}", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with Connection(sock, self._timeout_s) as connection:
                self._converse(connection, peer)
        except (WireError, OSError) as e:
            self._refused(f"transfer to {peer} broke off: {e}")
        finally:
            self._free.release()

    def _converse(self, connection: Connection, peer: str) -> None:
        hello = connection.receive_header(HELLO_MAX)
        shown = hello.get("token")
        if not isinstance(shown, str) or not hmac.compare_digest(shown.encode(), self._token):
            self._refused(f"{peer} was refused: {'no' if shown is None else 'a wrong'} job token")
            connection.send_header({"refused": "the job token is missing or wrong"})
            return
        connection.send_header({"welcome": True})
        request = connection.receive_header()
        entry = entry_from_json(request.get("entry"))
        try:
            with self._provider(entry) as tensors:
                _send_entry(connection, entry, tensors)
        except Refused as e:
            connection.send_header({"refused": str(e)})


def _send_entry(connection: Connection, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
    names = part_names(len(tensors))
    data = [raw_bytes(tensor) for tensor in tensors]
    parts = [describe(name, tensor, raw) for name, tensor, raw in zip(names, tensors, data, strict=True)]
    header: dict[str, Any] = {"entry": entry_to_json(entry), "parts": parts_to_json(parts)}
    connection.send_header(header)
    for raw in data:
        connection.send(raw)
