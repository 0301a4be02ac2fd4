"""A TCP connection that can be cut and mended: between one manager and the lighthouse, while all others are whole."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Listens on a port of its own and forwards to `target` while it is not cut.

    Args:
        target: ``host:port``.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.is_cut = self._closed = False
        self.refused = 0  # connections that came while it was cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Breaks what stands, and lets nothing through."""
        with self._lock:
            self.is_cut = True
            ends, self._open = self._open, set()
        for end in ends:
            _end(end)

    def mend(self) -> None:
        """Lets everything through again."""
        with self._lock:
            self.is_cut = False

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        self.cut()
        _end(self._listener)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                let = not self.is_cut
                self.refused += self.is_cut
            try:
                far = socket.create_connection(self._target, 5) if let else None
            except OSError:
                far = None
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(a, b), name="proxy", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with self._lock:
                self._open.discard(end)
            _end(end)


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
