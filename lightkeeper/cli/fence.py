"""`lightkeeper fence`: the operator's word that the processes of a group are gone."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.calls import Said, call
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_lighthouses, require_token
from lightkeeper.errors import ToldError, UsageError


def command(
    group: Annotated[str, typer.Option("--group", help="The group whose processes are gone.")],
    lighthouse: Annotated[
        str,
        typer.Option(envvar="LIGHTKEEPER_LIGHTHOUSE", metavar="HOST:PORT[,...]", help="Lighthouses to tell."),
    ] = DEFAULT_LIGHTHOUSE,
    job: Annotated[str, typer.Option(envvar="LIGHTKEEPER_JOB", help="Id of the job.")] = "job",
    token_file: shared.TokenFile = None,
) -> int:
    """Say that no process of a group lives any more, so that the job may go on without it.

    Make sure of it first (the node is off, the job step is gone): a group that still trains somewhere would go on
    beside the job. Refused for a group that beats.
    """
    addresses = check_lighthouses(lighthouse, "--lighthouse")
    token = require_token(token_file)
    from lightkeeper.protos import lighthouse_pb2

    request = lighthouse_pb2.FenceGroupRequest(group=group, by=f"{getpass.getuser()}@{socket.gethostname()}")
    said = [call("Lighthouse", "FenceGroup", address, request, job, token) for address in addresses]
    taken = [one.address for one in said if one.reply is not None]
    rest = "; ".join(_why_not(one) for one in said if one.reply is None)
    if not taken:
        error = ToldError if all(one.nobody for one in said) else UsageError
        raise error(rest)
    typer.echo(f"{group} of job {job} counts as gone at {', '.join(taken)}" + (f" ({rest})" if rest else ""))
    return 0


def _why_not(one: Said) -> str:
    if one.nobody:
        return f"no lighthouse answers at {one.address}: {one.details}"
    return f"the lighthouse at {one.address} says: {one.details}"
