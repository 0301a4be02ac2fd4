"""`lightkeeper lighthouse`: the process that knows who is a member."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_address, require_token


def command(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one.")
    ] = DEFAULT_LIGHTHOUSE,
    token_file: shared.TokenFile = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the log of terms and epochs, read back at the next start."),
    ] = None,
    run_folder: Annotated[
        Path | None, typer.Option(help="Write events to this run's folder; without it none are written.")
    ] = None,
    lease_s: Annotated[
        float, typer.Option(help="Seconds of missed beats after which a group is held to be silent.")
    ] = 2.0,
    admit_interval_s: Annotated[
        float,
        typer.Option(
            help="For so many seconds after a planned change nobody else is taken in, then all that are ready."
        ),
    ] = 1.0,
) -> int:
    """Run the lighthouse: who is a member of which job, and of which epoch."""
    check_address(bind, "--bind")
    token = require_token(token_file)
    from lightkeeper.lighthouse.main import Options, run

    options = Options(
        bind=bind, token=token, log=log, run_folder=run_folder, lease_s=lease_s, admit_interval_s=admit_interval_s
    )
    return run(options)
