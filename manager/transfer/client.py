"""Fetches an entry from a donor, straight into the memory of the tensors that it is for."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.state.layout import state_name_to_json
from lightkeeper.manager.transfer.wire import (
    Connection,
    PartHeader,
    WireError,
    dtype_name,
    entry_from_json,
    entry_to_json,
    part_names,
    parts_from_json,
    tensor_bytes,
)


class TransferFailed(RuntimeError):
    """What was asked for could not be fetched whole; one line says why. What it was read into holds nothing of use.

    Attributes:
        torn: Whether that is the training state, so that nobody may go on from it.
    """

    torn = False


class NotYet(TransferFailed):
    """The donor does not have the entry yet: ask again."""


class StartOver(TransferFailed):
    """The donor will never have it: a fresh snapshot is needed."""


class DonorRefused(WireError):
    """The donor's refusal, in its words.

    Attributes:
        kind: "refused", "not yet" or "never".
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def connect(
    address: str, token: str, timeout_s: float, stall_s: float | None = None, source_host: str | None = None
) -> Connection:
    """A connection on which requests may be sent.

    Args:
        address: Of the donor's server, "host:port" or "[host]:port".
        token: The job's token.
        timeout_s: Bound on everything done with the connection, in seconds.
        stall_s: Bound on a time in which no byte moves, in seconds.
        source_host: Own address to connect from; None for the one that routes to the donor.

    Raises:
        WireError: the donor refuses, or is something else.
        OSError: it cannot be reached in time.
    """
    started = time.monotonic()
    host, _, port = address.rpartition(":")
    source = (source_host, 0) if source_host else None
    first_s = timeout_s if stall_s is None else min(timeout_s, stall_s)
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=first_s, source_address=source)
    connection = Connection(sock, max(0.0, timeout_s - (time.monotonic() - started)), stall_s)
    try:
        connection.send_header({"token": token})
        receive_reply(connection)  # the welcome: a request sent before it could cut off the refusal
    except BaseException:
        sock.close()
        raise
    return connection


def receive_reply(connection: Connection) -> dict[str, Any]:
    """The header of a reply.

    Raises:
        DonorRefused: it is a refusal.
    """
    reply = connection.receive_header()
    if "refused" in reply:
        raise DonorRefused(f"refused: {str(reply['refused'])[:500]}", str(reply.get("kind", "refused")))
    return reply


def fetch_entry(address: str, token: str, name: Entry, into: Sequence[torch.Tensor], timeout_s: float) -> None:
    """Read the entry `name` from a donor into `into`.

    Args:
        address: Of the donor's server, "host:port" or "[host]:port".
        token: The job's token.
        name: The entry's full name; a donor that holds another one refuses.
        into: Its tensors, buckets first and extras last, dense and contiguous, with the dtypes and shapes
            that the donor's have.
        timeout_s: Bound on the whole transfer, in seconds.

    Raises:
        TransferFailed: the donor cannot be reached, refuses, breaks off, or sends something else.
    """
    try:
        with connect(address, token, timeout_s) as connection:
            connection.send_header({"entry": entry_to_json(name)})
            reply = receive_reply(connection)
            if entry_from_json(reply.get("entry")) != name:
                raise WireError("the donor sends another entry")
            _receive_parts(connection, reply, into)
    except (WireError, OSError) as e:
        raise TransferFailed(f"{name} from {address}: {e}") from e


def fetch_after(
    address: str,
    token: str,
    name: Entry,
    into: Sequence[torch.Tensor],
    timeout_s: float,
    wait_s: float | None = None,
    source_host: str | None = None,
) -> Entry:
    """Read the entry that follows `name` from a donor into `into`; the donor waits for it.

    Args:
        address: Of the donor's server.
        token: The job's token.
        name: The entry that was applied here last; only one whose predecessor it is may be applied next.
        into: As for `fetch_entry`.
        timeout_s: Bound on wait and transfer together, in seconds.
        wait_s: Bound on the wait for an entry that is not there yet, in seconds; by default half of that.
        source_host: As for `connect`.

    Returns:
        The name of the entry that was read.

    Raises:
        NotYet: it is not there yet: ask again.
        StartOver: it will never be there: a fresh snapshot is needed.
        TransferFailed: the donor cannot be reached, refuses, breaks off, or sends something else.
    """
    wait_s = timeout_s / 2 if wait_s is None else wait_s
    try:
        with connect(address, token, timeout_s, source_host=source_host) as connection:
            connection.send_header({"after": state_name_to_json(name), "wait_s": wait_s})
            reply = receive_reply(connection)
            found = entry_from_json(reply.get("entry"))
            if reply.get("after") != state_name_to_json(name) or found.step != name.step + 1:
                raise WireError("the donor sends an entry that follows another")
            _receive_parts(connection, reply, into)
            return found
    except DonorRefused as e:
        kinds: dict[str, type[TransferFailed]] = {"not yet": NotYet, "never": StartOver}
        raise kinds.get(e.kind, TransferFailed)(f"the entry after {name} from {address}: {e}") from e
    except (WireError, OSError) as e:
        raise TransferFailed(f"the entry after {name} from {address}: {e}") from e


def _receive_parts(connection: Connection, reply: dict[str, Any], into: Sequence[torch.Tensor]) -> None:
    parts = parts_from_json(reply.get("parts"))
    if len(parts) != len(into):
        raise WireError(f"the donor's entry has {len(parts)} parts, not {len(into)}")
    for wanted, part, tensor in zip(part_names(len(into)), parts, into, strict=True):
        _check_part(wanted, part, tensor)
    for part, tensor in zip(parts, into, strict=True):
        _receive_part(connection, part, tensor)


def _check_part(wanted: str, part: PartHeader, tensor: torch.Tensor) -> None:
    here = (wanted, dtype_name(tensor), tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
    there = (part.name, part.dtype, part.shape, part.start, part.nbytes)
    if here != there:
        raise WireError(f"the donor's part is {there}, not {here}")


def _receive_part(connection: Connection, part: PartHeader, tensor: torch.Tensor) -> None:
    target = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
    data = tensor_bytes(target)
    if connection.receive_checked([data], lambda count: None) != part.xxh3_64:
        raise WireError(f"{part.name} arrived with another checksum than it was sent with")
    if target is not tensor:
        tensor.copy_(target)
