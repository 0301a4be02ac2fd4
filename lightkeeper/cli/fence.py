"""`lightkeeper fence`: the operator's word that the processes of a group are gone."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.calls import Said, call, operator
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_lighthouses
from lightkeeper.cli.runfolder import DEFAULT_JOB, RunFolder, reach
from lightkeeper.errors import ToldError, UsageError


def command(
    group: Annotated[str, typer.Option("--group", help="The group whose processes are gone.")],
    lighthouse: Annotated[
        str | None,
        typer.Option(
            envvar="LIGHTKEEPER_LIGHTHOUSE",
            metavar="HOST:PORT[,...]",
            help="Lighthouses to tell: all that there are.",
            show_default=DEFAULT_LIGHTHOUSE,
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(envvar="LIGHTKEEPER_JOB", help="Id of the job.", show_default=DEFAULT_JOB)
    ] = None,
    token_file: shared.TokenFile = None,
    run_folder: RunFolder = None,
) -> int:
    """Say that no process of a group lives any more, so that the job may go on without it.

    Make sure of it first (the node is off, the job step is gone): a group that still trains somewhere would go on
    beside the job. Every address is asked first; if the group is heard at one of them, none is told.
    """
    to = reach(run_folder, lighthouse, job, token_file)
    job, token, addresses = to.job, to.token, check_lighthouses(to.lighthouse, "--lighthouse")
    from lightkeeper.protos import lighthouse_pb2

    question = lighthouse_pb2.FenceGroupRequest(group=group, check=True)
    asked = [call("Lighthouse", "FenceGroup", address, question, job, token) for address in addresses]
    _check_nobody_objects(asked)
    lines, rest = [], [_why_not(one) for one in asked if one.reply is None or one.reply.refused]
    for one in (one for one in asked if one.reply is not None and not one.reply.refused):
        name = f"{group} (incarnation {one.reply.incarnation}) of job {job}"
        if one.reply.HasField("gone_ms"):
            lines.append(f"{name} already counts as gone at {one.address}, since {_clock(one.reply.gone_ms)}")
            continue
        request = lighthouse_pb2.FenceGroupRequest(group=group, by=operator(), incarnation=one.reply.incarnation)
        told = call("Lighthouse", "FenceGroup", one.address, request, job, token)
        if told.reply is None:
            rest.append(_why_not(told))
        else:
            lines.append(f"{name} counts as gone at {one.address}")
    if not lines:
        error = ToldError if all(one.nobody for one in asked) else UsageError
        raise error("; ".join(rest))
    for line in (*lines, *rest):
        typer.echo(line)
    return 0


def _check_nobody_objects(asked: list[Said]) -> None:
    """Whether the word may be given at all.

    Raises:
        UsageError: a lighthouse hears the group, or does not answer the question.
    """
    for one in asked:
        known = one.reply is not None or one.nobody or one.code == "NOT_FOUND"
        if not known or (one.reply is not None and one.reply.HasField("heard_ms")):
            raise UsageError(_why_not(one) + ("; no lighthouse was told anything" if len(asked) > 1 else ""))


def _why_not(one: Said) -> str:
    return one.why_not("" if one.reply is None else one.reply.refused)


def _clock(ago_ms: int) -> str:
    at = datetime.datetime.now() - datetime.timedelta(milliseconds=ago_ms)
    return f"{at:%H:%M:%S} ({ago_ms / 1000:.0f} s ago)"
