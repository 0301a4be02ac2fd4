"""Whether the other nodes have come. Who has not is named, and those who have are not made to pay for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from lightkeeper.supervisor.preflight.meeting import RETRY_S, LeftOut, MeetingLost, Place
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Waits for all, `--wait-s` from the first on.

    A node that cannot reach node 0 cannot know whether that one is missing or itself cut off. It is not failed here,
    since then the loss of node 0 would stop everybody; in node 0's report it is the one that did not come.
    """
    place = Place(request)
    until = time.monotonic() + request.wait_s
    while True:
        try:
            heard = place.exchange("peers", socket.gethostname(), request.wait_s, range(request.nnodes))
            break
        except LeftOut as error:
            return failed(str(error))
        except MeetingLost as error:
            if time.monotonic() >= until:
                why = f"{error}; node 0 did not come, or this node cannot reach it"
                return skipped(why, {"missing": [0]})
            time.sleep(RETRY_S)
    hosts = {str(node): host for node, host in sorted(heard.values.items())}
    missing = "".join(f"; node {node} did not come: do not join it" for node in heard.missing)
    told = f"{len(hosts)} of {request.nnodes} have come{missing}"
    return ok(told, {"hosts": hosts, "missing": list(heard.missing)})
