"""`lightkeeper manager`: one group's manager process. Started by `launch` or by rank 0, not by hand."""

from __future__ import annotations

from lightkeeper.cli import group as shared


def command(
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
    """Run the manager of one replica group, without its ranks."""
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
    from lightkeeper.manager.main import run

    return run(settings)
