"""Exit codes in words."""

from __future__ import annotations

import signal


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
