"""What every gRPC call of ours has in common: its options, its token, its addresses."""

from __future__ import annotations

import hmac
import os
import re
import socket
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its fork handlers crash children of a process with live calls
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters of it reaches us as an error, and is said once

TOKEN_KEY = "lightkeeper-token"
JOB_KEY = "lightkeeper-job"
MESSAGE_BYTES_MAX = 4 << 20
_HOST = re.compile(r"[A-Za-z0-9_.-]{0,253}")  # empty: this host
_PORT = re.compile(r"[0-9]{1,5}")

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),  # the control plane never goes through a proxy
    ("grpc.so_reuseport", 0),  # two servers on one port must not share it silently
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

# A frozen lighthouse keeps its sockets open; only a ping that stays unanswered tells. Such a stream breaks 3 to 5 s
# after the freeze (measured), a freeze of less than 3 s breaks none. `keepalive_timeout_ms` has no say in it.
PING_S = 2.0
PONG_S_MAX = 3.0
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # how long one attempt may take, whatever its name says
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.keepalive_time_ms", round(1000 * PING_S)),
    ("grpc.keepalive_timeout_ms", round(1000 * PONG_S_MAX)),
    ("grpc.http2.ping_timeout_ms", round(1000 * PONG_S_MAX)),
)

# Whether a manager is silent is for the membership machine to judge: a server's own pings only find dead sockets.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # else it takes the clients' pings for an attack
    ("grpc.http2.max_ping_strikes", 0),
)


def metadata(token: str, job: str) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    return ((TOKEN_KEY, token), (JOB_KEY, job))


def authorised(carried: Any, token: str) -> bool:
    """Whether a call's metadata carries the token; compared in constant time."""
    given = dict(carried or ()).get(TOKEN_KEY, "")
    return hmac.compare_digest(str(given).encode(), token.encode())


def plain_details(details: str | None) -> str:
    """The details of a gRPC error as a person says it: ``connection refused``; what is not known is left as it is."""
    details = details or "no details"
    if "DNS resolution failed" in details or "errors resolving" in details:
        return "its name cannot be resolved"
    found = re.search(r"Failed to connect to remote host: (?:connect: )?([^:;(]+)", details)
    return details if found is None else found[1].strip().lower()


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` in two.

    Raises:
        ValueError: with one line that says what is expected.
    """
    host, separator, port = address.rpartition(":")
    if "/" in host:
        raise ValueError(f"{address!r} is a URL: give HOST:PORT")
    if not separator or not _PORT.fullmatch(port) or int(port) >= 65_536:
        raise ValueError(f"{address!r} is not an address of the form HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            IPv6Address(host)
        except ValueError:
            raise ValueError(f"{address!r}: {host!r} is not an IPv6 address") from None
    elif ":" in host:
        raise ValueError(f"{address!r}: give an IPv6 address in brackets, as in [::1]:29400")
    elif not _HOST.fullmatch(host):
        raise ValueError(f"{address!r}: {host!r} is not the name or address of a host")
    return host or "127.0.0.1", int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address_towards(addresses: Sequence[str]) -> str:
    """The address of the interface that routes to the first of these that resolves; nothing is sent.

    Args:
        addresses: ``host:port`` each.
    """
    for address in addresses:
        host, port = split_address(address)
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
