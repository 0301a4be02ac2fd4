"""What travels between two ranks: frames of a JSON header and raw bytes. Nothing that arrives is unpickled.

A frame is the magic, the header's length (unsigned 32 bits, little-endian), the header (UTF-8 JSON), and the
raw bytes that the header announces. A conversation starts with hello (the token; nothing is answered before it
is checked) and welcome; then each request gets one reply, in order, until the client ends it. Requests may be
sent ahead of the replies.

    {"entry": name}                    the parts of that entry
    {"after": name, "wait_s": 2.5}     the parts of the entry that follows it, and its name
    {"state": name or null}            the description of the snapshot of that name, or of the newest
    {"state": name, "range": 7}        the bytes of one range of it, with their checksum
    {"state": name, "whole": true}     its fingerprint

A refusal is a reply {"refused": one line, "kind": ...}. A part is a range of bytes of one tensor with its
checksum; an entry is sent as one part per tensor.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.fingerprint import raw_bytes

MAGIC = b"LKT1"
HEADER_MAX = 1 << 20  # bytes
HELLO_MAX = 4 << 10  # bytes, of a header that has not shown its token yet
PARTS_MAX = 8192  # tensors of an entry
SLICE_BYTES = 512 << 10  # received at one go, and hashed while it is in the cache

_PREFIX = struct.Struct("<4sI")
_TIMEVAL = struct.Struct("@ll")


class WireError(ValueError):
    """What arrived is not what the protocol allows; one line."""


@dataclass(frozen=True)
class PartHeader:
    """A range of bytes of one tensor.

    Attributes:
        name: Of the tensor; in an entry "bucket.<i>" or "extras".
        dtype: Such as "float32".
        shape: Of the whole tensor.
        start: First byte of the range within the tensor's row-major bytes.
        nbytes: Length of the range.
        xxh3_64: Checksum of the range, 16 hexadecimal digits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    xxh3_64: str


def part_names(count: int) -> list[str]:
    """Names of the tensors of an entry: buckets, then extras."""
    return [*(f"bucket.{i}" for i in range(count - 1)), "extras"]


def describe(name: str, tensor: torch.Tensor, data: memoryview) -> PartHeader:
    """The header of a whole tensor whose raw bytes are `data`."""
    return PartHeader(name, dtype_name(tensor), tuple(tensor.shape), 0, data.nbytes, checksum(data))


def dtype_name(tensor: torch.Tensor) -> str:
    """Such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def checksum(data: memoryview) -> str:
    """xxh3_64 of `data`, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """The full name of an entry as JSON."""
    term = entry.epoch.term
    return {"epoch": entry.epoch.number, "term": term.number, "lighthouse": term.lighthouse, "step": entry.step}


def entry_from_json(data: Any) -> Entry:
    """Read what `entry_to_json` wrote.

    Raises:
        WireError: it is not the name of an entry.
    """
    if not isinstance(data, dict) or not isinstance(data.get("lighthouse"), str):
        raise WireError("the request does not name an entry")
    epoch, term, step = (_number(data, key) for key in ("epoch", "term", "step"))
    return Entry(Epoch(epoch, Term(term, data["lighthouse"])), step)


def _number(data: dict[str, Any], key: str) -> int:
    number = data.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 63:
        raise WireError("the request does not name an entry")
    return number


def parts_to_json(parts: Sequence[PartHeader]) -> list[dict[str, Any]]:
    """Part headers as JSON."""
    return [asdict(part) for part in parts]


def parts_from_json(data: Any) -> list[PartHeader]:
    """Read what `parts_to_json` wrote.

    Raises:
        WireError: it is not a list of part headers.
    """
    if not isinstance(data, list) or len(data) > PARTS_MAX:
        raise WireError(f"the reply does not list its parts (at most {PARTS_MAX})")
    try:
        return [
            PartHeader(
                str(p["name"]), str(p["dtype"]), tuple(int(n) for n in p["shape"]),
                int(p["start"]), int(p["nbytes"]), str(p["xxh3_64"]),
            )
            for p in data
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as e:
        raise WireError(f"the reply describes a part wrongly: {e!r}") from e


class Connection:
    """One end of a conversation, bounded in time as a whole.

    Args:
        sock: A connected socket; closed with this.
        timeout_s: Bound on everything together, in seconds.
        stall_s: Bound on a time in which no byte moves, in seconds; None for no other bound.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, stall_s: float | None = None) -> None:
        self._sock = sock
        self._until = time.monotonic() + timeout_s
        self._stall_s = stall_s
        self._bound_s = 0.0  # of one system call, as the kernel knows it
        sock.settimeout(None)  # the kernel bounds calls: with a time-out of Python's own, each one polls first
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # requests are small, and waited for

    def renew(self, timeout_s: float) -> None:
        """Bound what follows by `timeout_s`, counted from now."""
        self._until = time.monotonic() + timeout_s

    def shutdown(self) -> None:
        """End the connection from another thread: whoever waits for it is told."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def ended(self) -> bool:
        """Wait for the next frame; True if the other end has finished instead.

        Raises:
            OSError: the connection broke, or its time is up.
        """
        with self._bounded():
            return not self._sock.recv(1, socket.MSG_PEEK)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()

    def send_header(self, header: dict[str, Any], body: memoryview | None = None) -> None:
        """Send a frame's header, and the bytes that follow it.

        Raises:
            WireError: it is too long.
            OSError: the connection broke, or its time is up.
        """
        data = json.dumps(header, separators=(",", ":")).encode()
        if len(data) > HEADER_MAX:
            raise WireError(f"a header of {len(data)} bytes is too long: at most {HEADER_MAX}")
        head = memoryview(_PREFIX.pack(MAGIC, len(data)) + data)
        if body is None:
            self.send(head)
            return
        with self._bounded():
            sent = self._sock.sendmsg([head, body])  # together, or the receiver wakes up once more
        self.send(head[sent:])
        self.send(body[max(0, sent - head.nbytes) :])

    def receive_header(self, bytes_max: int = HEADER_MAX) -> dict[str, Any]:
        """Receive a frame's header of at most `bytes_max` bytes.

        Raises:
            WireError: not a header, or a longer one.
            OSError: the connection broke or ended, or its time is up.
        """
        prefix = bytearray(_PREFIX.size)
        self.receive_into(memoryview(prefix))
        magic, length = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise WireError("what arrived is not a frame of this protocol")
        if length > bytes_max:
            raise WireError(f"a header of {length} bytes is too long: at most {bytes_max}")
        data = bytearray(length)
        self.receive_into(memoryview(data))
        try:
            header = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise WireError("a header is not JSON") from e
        if not isinstance(header, dict):
            raise WireError("a header is not a JSON object")
        return header

    def send(self, data: memoryview) -> None:
        """Send raw bytes; errors as for `send_header`."""
        while data.nbytes:
            with self._bounded():
                data = data[self._sock.send(data) :]

    def receive_into(self, data: memoryview) -> None:
        """Fill `data` with what arrives; errors as for `receive_header`."""
        while data.nbytes:
            data = data[self._receive_some(data) :]

    def receive_checked(self, views: Sequence[memoryview], moved: Callable[[int], None]) -> str:
        """Fill `views` with what arrives, and hash it while it is still in the cache.

        Args:
            views: Filled one after the other.
            moved: Told the number of bytes after every piece.

        Returns:
            The checksum of all of it.
        """
        digest = xxhash.xxh3_64()
        for view in views:
            while view.nbytes:
                count = self._receive_some(view[:SLICE_BYTES])
                digest.update(view[:count])
                moved(count)
                view = view[count:]
        return digest.hexdigest()

    def _receive_some(self, data: memoryview) -> int:
        with self._bounded():
            count = self._sock.recv_into(data, 0, socket.MSG_WAITALL)  # woken up once, not for every packet
        if count == 0:
            raise ConnectionError("the connection ended early")
        return count

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Bound the system call inside by what is left of the time."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this transfer is up")
        bound_s = left if self._stall_s is None else min(left, self._stall_s)
        if not 0.9 * self._bound_s <= bound_s <= self._bound_s:
            self._set_bound(bound_s)
        try:
            yield
        except BlockingIOError as e:
            raise TimeoutError(f"timed out: no byte moved for {self._bound_s:.1f} s") from e

    def _set_bound(self, bound_s: float) -> None:
        self._bound_s = max(bound_s, 0.001)
        value = _TIMEVAL.pack(int(self._bound_s), int(self._bound_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The writable raw bytes of a dense, contiguous tensor on the CPU."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "bytes are read straight into tensors on the CPU"
    return raw_bytes(tensor)
