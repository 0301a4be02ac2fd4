"""Exit codes in words."""

from __future__ import annotations

import signal

USAGE = 2  # wrong input
REFUSED = 103  # by the lighthouse
FENCED = 104  # left out of the job
GAVE_UP = 105  # waited for longer than the outage budget, or too few groups were left
STOPPED = 106  # the job stopped
ORPHANED = 107  # a rank without its manager, a group that lost a node, or whose ranks lost each other
ASKED = 128 + signal.SIGTERM  # asked twice to leave


def describe_exit(exit_code: int | None) -> str:
    """``exited 3``, ``was killed by SIGKILL``, or that nobody knows.

    Args:
        exit_code: negative for a signal, as in `subprocess`; None if nobody could tell.
    """
    if exit_code is None:
        return "ended abruptly (killed by a signal, or by os._exit)"
    if exit_code >= 0:
        return f"exited {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
