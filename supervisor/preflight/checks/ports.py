"""Whether the ports that the job will listen at are free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Binds each `--port` on all addresses, and listens; none stays taken."""
    if not request.ports:
        return skipped("no --port is given")
    wrong = []
    for port in request.ports:
        for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            if why := _taken(family, any_address, port):
                wrong.append(f"port {port}: {why}")
                break
    if wrong:
        return failed("; ".join(wrong), {"ports": list(request.ports)})
    return ok(f"free: {', '.join(map(str, request.ports))}")


def _taken(family: int, address: str, port: int) -> str:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return ""  # no IPv6 here
    with probe:
        try:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free to a server
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return (
                "" if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL else f"{error.strerror or error}"
            )
    return ""
