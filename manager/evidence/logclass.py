"""What the last lines of a group's logs say of the cause, by the rules of `lightkeeper diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CHARS_MAX = 300


def log_class(tails: Mapping[int, bytes]) -> str:
    """``cuda_oom (rank 1): torch.OutOfMemoryError: ...``; empty if no line says anything, or only victims speak.

    Args:
        tails: by rank, the last bytes that it printed.
    """
    from lightkeeper.diagnose import classify
    from lightkeeper.diagnose.files import first_cause

    found = {
        Path(str(rank)): classify(tail.decode(errors="replace").splitlines()) for rank, tail in sorted(tails.items())
    }
    if (first := first_cause(found)) is None:
        return ""
    return f"{found[first].cause} (rank {first}): {found[first].line}"[:CHARS_MAX]
