"""`lightkeeper launch`: start one replica group on this node."""

from __future__ import annotations

from typing import Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.options import LaunchOptions
from lightkeeper.errors import UsageError


def command(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The training script and its arguments."),
    ] = None,
    group: shared.Group = None,
    ranks: shared.Ranks = None,
    lighthouse: shared.Lighthouse = None,
    job: shared.Job = None,
    groups: shared.Groups = None,
    minimum: shared.Minimum = None,
    start_window_s: shared.StartWindow = None,
    token_file: shared.TokenFile = None,
    run_folder: shared.RunFolder = None,
    outage_budget_s: shared.OutageBudget = None,
    host: shared.Host = None,
    bucket_mb: shared.BucketMb = None,
    history_mb: shared.HistoryMb = None,
    fingerprint_every: shared.FingerprintEvery = None,
) -> int:
    """Start one replica group: its manager and its ranks. Ends with the exit code of its ranks."""
    settings = shared.settings(
        token_file,
        run_folder,
        group=group,
        ranks=ranks,
        lighthouse=lighthouse,
        job=job,
        groups=groups,
        minimum=minimum,
        start_window_s=start_window_s,
        outage_budget_s=outage_budget_s,
        host=host,
        bucket_mb=bucket_mb,
        history_mb=history_mb,
        fingerprint_every=fingerprint_every,
    )
    if not script:
        raise UsageError("no script: lightkeeper launch --group g0 ... -- train.py ARGS")
    from lightkeeper.manager.launch import run

    return run(LaunchOptions(settings, tuple(script)))
