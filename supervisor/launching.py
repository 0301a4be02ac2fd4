"""The command line that starts a group, or what one node has of it."""

from __future__ import annotations

import sys
from pathlib import Path

from lightkeeper.supervisor.jobfile import JobFile


def launch_argv(job: JobFile, folder: Path, lighthouse: str, group: str, node_rank: int) -> list[str]:
    """What is run on a node of a group.

    Args:
        job: what the job file says.
        folder: of the run, absolute.
        lighthouse: its address.
        group: its name.
        node_rank: which of the group's nodes it is.
    """
    options = {
        "group": group, "groups": job.groups, "minimum": job.minimum, "spares": job.spares, "ranks": job.ranks,
        "lighthouse": lighthouse, "job": job.name, "run-folder": folder, "restarts": job.budget.in_place,
        "outage-budget-s": job.outage_budget_s, **job.options,
    }  # fmt: skip
    if job.nodes_per_group > 1:
        options |= {"nnodes": job.nodes_per_group, "node-rank": node_rank}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    titan = ["--torchtitan"] if job.torchtitan else []
    return [sys.executable, "-m", "lightkeeper", "launch", *words, *titan, "--", *job.command_in(folder)]
