"""What of a job file cannot change while its groups run: they were told it at their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.jobfile import JobFile

FIXED = (
    "name", "groups", "minimum", "spares", "ranks", "nodes_per_group", "command", "outage_budget_s", "torchtitan",
    "checkpoints",
)  # fmt: skip


def shape_of(job: JobFile) -> dict[str, Any]:
    """As JSON."""
    shape = {key: getattr(job, key) for key in FIXED}
    return {**shape, "command": list(job.command), "nodes": list(job.nodes), "lighthouse": job.lighthouse.address}


def check_shape(job: JobFile, before: Mapping[str, Any], running: Sequence[tuple[str, str]]) -> None:
    """Refuses to go on with groups that run by another job file.

    Raises:
        UsageError: it has changed, and something runs.
    """
    now = shape_of(job)
    if before["name"] != job.name:
        raise UsageError(
            f"this folder holds the run of job {before['name']}, and this is {job.name}: name another run_folder"
        )
    changed = [f"{key} was {before[key]} and is {now[key]}" for key in now if key in before and before[key] != now[key]]
    if running and changed:
        names = ", ".join(sorted({name for _, name in running}))
        raise UsageError(
            f"the job file has changed while the job runs ({names}): {'; '.join(changed)}: change it back, and end the "
            "job by SIGTERM first"
        )
