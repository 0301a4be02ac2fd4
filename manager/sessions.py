"""Kills by session: whatever a rank started is found there, also what has lost its parent since.

As a process of its own (`python -m lightkeeper.manager.sessions PID...`) it is the one that stays behind to do so when
the ranks' launcher is killed: it waits for the end of its standard input, which the launcher holds. The kernel kills
the ranks themselves then, but not what they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def kill_sessions(leaders: Iterable[int]) -> list[int]:
    """Kills whatever is in the sessions of these processes, again until nothing new is found there.

    Args:
        leaders: pids that cannot have been given away: children of the caller that it has not waited for, or processes
            that ended a moment ago.

    Returns:
        The pids that were killed.
    """
    sessions, killed = set(leaders), dict[int, None]()
    while sessions:
        found = [pid for pid in _members(sessions) if pid not in killed]
        if not found:
            break
        for pid in found:
            killed[pid] = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return list(killed)


def _members(sessions: set[int]) -> Iterable[int]:
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(pid := int(name)) in sessions:
                yield pid


def main() -> None:
    """Waits for the end of standard input, then kills the sessions that the command line names."""
    while os.read(0, 1):
        pass
    kill_sessions(int(pid) for pid in sys.argv[1:])


if __name__ == "__main__":
    main()
