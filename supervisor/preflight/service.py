"""A whole preflight: node 0 opens the meeting, the checks run, and all tell each other what came of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightkeeper.supervisor.preflight.check import Check
from lightkeeper.supervisor.preflight.meeting import LeftOut, Meeting, MeetingLost, Place
from lightkeeper.supervisor.preflight.request import WHOLE_S_MAX, Request
from lightkeeper.supervisor.preflight.results import OK, Result
from lightkeeper.supervisor.preflight.runner import Runner, figures_of
from lightkeeper.supervisor.preflight.verdict import Report, summary

END_S = 4.0  # beyond the checks' time, for the others to tell how they ended
CHECKS_S_MAX = WHOLE_S_MAX - 2 * END_S  # so that the whole run, with what is killed at its end, stays under two minutes


def preflight(
    request: Request, checks: Sequence[Check], jobs: int, checks_s: float, told: Callable[[Result], None]
) -> Report:
    """Makes the checks, with the other nodes if one of the checks needs them.

    Args:
        request: what is asked of this node.
        checks: which are made.
        jobs: how many run side by side.
        checks_s: seconds that all of them may take.
        told: called with each result as it comes.

    Raises:
        UsageError: node 0 cannot listen where the nodes are to meet.
    """
    began = time.monotonic()
    host = socket.gethostname()
    request = replace(request, start=f"{host}/{os.getpid()}")
    together = request.nnodes > 1 and any(check.name == "peers" for check in checks)
    meeting = Meeting(request) if together and request.node_rank == 0 else None
    if meeting is not None:
        meeting.start()
    try:
        results = Runner(request, jobs, checks_s, told).run(checks)
        nodes: dict[int, Mapping[str, Any]] = {}
        if together:
            left_s = max(END_S, began + checks_s + END_S - time.monotonic())
            nodes = _tell_each_other(request, host, results, left_s)
    finally:
        if meeting is not None:
            meeting.stop()
    return Report(request.node_rank, host, time.monotonic() - began, tuple(results), nodes)


def _tell_each_other(
    request: Request, host: str, results: Sequence[Result], wait_s: float
) -> dict[int, Mapping[str, Any]]:
    """What became of each node. One that did not come is there too; nobody but this node if the meeting is lost."""
    own = summary(host, results, figures_of(results))
    peers = next(result for result in results if result.name == "peers")
    if peers.state != OK:
        missing = {node: {"came": False} for node in peers.evidence.get("missing", [])}
        return missing | {request.node_rank: own}
    place = Place(request)
    try:
        heard = place.exchange("end", own, wait_s)
    except (MeetingLost, LeftOut):
        return {request.node_rank: own}
    finally:
        place.close()
    absent = {node: {"came": False} for node in range(request.nnodes)}
    return absent | heard.values
