"""Fetches an entry from a donor, straight into the memory of the tensors that it is for."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.transfer.wire import (
    Connection,
    PartHeader,
    WireError,
    checksum,
    dtype_name,
    entry_from_json,
    entry_to_json,
    part_names,
    parts_from_json,
    tensor_bytes,
)


class TransferFailed(RuntimeError):
    """The entry could not be fetched whole; one line says why. What it was read into holds nothing of use."""


def fetch_entry(address: str, token: str, name: Entry, into: Sequence[torch.Tensor], timeout_s: float) -> None:
    """Read the entry `name` from a donor into `into`.

    Args:
        address: Of the donor's entry server, "host:port" or "[host]:port".
        token: The job's token.
        name: The entry's full name; a donor that holds another one refuses.
        into: Its tensors, buckets first and extras last, dense and contiguous, with the dtypes and shapes
            that the donor's have.
        timeout_s: Bound on the whole transfer, in seconds.

    Raises:
        TransferFailed: the donor cannot be reached, refuses, breaks off, or sends something else.
    """
    started = time.monotonic()
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        with Connection(sock, max(0.0, timeout_s - (time.monotonic() - started))) as connection:
            connection.send_header({"token": token})
            _receive_reply(connection)  # the welcome: a request sent before it could cut off the refusal
            connection.send_header({"entry": entry_to_json(name)})
            _receive(connection, name, into)
    except (WireError, OSError) as e:
        raise TransferFailed(f"{name} from {address}: {e}") from e


def _receive_reply(connection: Connection) -> dict[str, Any]:
    reply = connection.receive_header()
    if "refused" in reply:
        raise WireError(f"refused: {str(reply['refused'])[:500]}")
    return reply


def _receive(connection: Connection, name: Entry, into: Sequence[torch.Tensor]) -> None:
    reply = _receive_reply(connection)
    if entry_from_json(reply.get("entry")) != name:
        raise WireError("the donor sends another entry")
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
    connection.receive_into(data)
    if checksum(data) != part.xxh3_64:
        raise WireError(f"{part.name} arrived with another checksum than it was sent with")
    if target is not tensor:
        tensor.copy_(target)
