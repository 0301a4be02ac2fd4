"""`lightkeeper status`: ask the lighthouse who is a member."""

from __future__ import annotations

from typing import Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, StatusOptions, check_address, require_token


def command(
    lighthouse: Annotated[
        str,
        typer.Option(envvar="LIGHTKEEPER_LIGHTHOUSE", metavar="HOST:PORT", help="Address of the lighthouse."),
    ] = DEFAULT_LIGHTHOUSE,
    job: Annotated[str, typer.Option(help="Only this job.")] = "",
    token_file: shared.TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show the jobs, epochs and groups that a lighthouse knows."""
    check_address(lighthouse, "--lighthouse")
    options = StatusOptions(lighthouse=lighthouse, job=job, token=require_token(token_file), as_json=json)
    from lightkeeper.lighthouse.main import status

    return status(options)
