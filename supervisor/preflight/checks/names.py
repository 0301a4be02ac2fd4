"""Whether names are known: this node's own, and those of the hosts it will speak to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok
from lightkeeper.wire import split_address


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Resolves each; of several nodes none may call itself by an address of its loopback.

    gloo and torch's stores listen at the address of the node's own name, and one like 127.0.1.1 (a line that
    installers write into /etc/hosts) is reached by nobody else.
    """
    own = socket.gethostname()
    wrong, evidence = [], {}
    for host in (own, *request.hosts):
        try:
            evidence[host] = addresses = _addresses(host)
        except OSError as error:
            wrong.append(f"{host} is not known: {error.strerror or error}")
            continue
        if host == own and _is_far(request) and all(ipaddress.ip_address(one).is_loopback for one in addresses):
            wrong.append(f"this node's own name {own} is {addresses[0]}, at which no other node reaches it")
    if wrong:
        return failed("; ".join(wrong), evidence)
    return ok(", ".join(f"{host} is {addresses[0]}" for host, addresses in evidence.items()), evidence)


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[4][0]).partition("%")[0] for where in found))


def _is_far(request: Request) -> bool:
    """Whether there are nodes on other machines: where they meet is not the loopback."""
    if request.nnodes == 1:
        return False
    try:
        return not any(
            ipaddress.ip_address(one).is_loopback for one in _addresses(split_address(request.rendezvous)[0])
        )
    except OSError:
        return True
