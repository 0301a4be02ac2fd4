"""`lightkeeper status`: ask the lighthouse who is a member, or the groups themselves while there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli import outage
from lightkeeper.cli.calls import Said, call
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_addresses, check_lighthouses, require_token
from lightkeeper.errors import ToldError, UsageError


def command(
    lighthouse: Annotated[
        str,
        typer.Option(
            envvar="LIGHTKEEPER_LIGHTHOUSE",
            metavar="HOST:PORT[,...]",
            help="Addresses of the lighthouse, or file:PATH with them in it.",
        ),
    ] = DEFAULT_LIGHTHOUSE,
    job: Annotated[str, typer.Option(envvar="LIGHTKEEPER_JOB", help="Id of the job.")] = "job",
    token_file: shared.TokenFile = None,
    manager: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT[,...]",
            help="A group's manager, asked if no lighthouse answers; it names the others.",
        ),
    ] = "",
    run_folder: Annotated[
        Path | None,
        typer.Option(
            envvar="LIGHTKEEPER_RUN_FOLDER",
            help="The run's folder: its events say where managers listen, if no lighthouse answers.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what a lighthouse knows of a job: its epoch, its groups, and what is waited for.

    If no lighthouse answers, the groups' own managers are asked.
    """
    addresses = check_lighthouses(lighthouse, "--lighthouse")
    managers = check_addresses(manager, "--manager") if manager else ()
    token = require_token(token_file)
    said = ask(addresses, job, token)
    best = choose(said)
    if best is None:
        return outage.show(said, managers or outage.managers_in(run_folder), job, token, json)
    if json:
        from google.protobuf.json_format import MessageToJson

        text = MessageToJson(best.reply, preserving_proto_field_name=True, indent=None)
        sys.stdout.write(text + "\n")
        return 0
    for one in said:
        if one is not best:
            standby = "stands by" if one.reply is not None else one.details
            typer.echo(f"also asked {one.address}: {'no lighthouse answers' if one.nobody else standby}")
    show(best.reply)
    return 0


def ask(addresses: tuple[str, ...], job: str, token: str) -> list[Said]:
    """What each of the lighthouses says of the job.

    Raises:
        UsageError: one of them refuses the token.
    """
    from lightkeeper.protos import lighthouse_pb2

    request = lighthouse_pb2.StatusRequest()
    said = [call("Lighthouse", "Status", address, request, job, token) for address in addresses]
    for one in said:
        if one.code == "UNAUTHENTICATED":
            raise UsageError(f"the lighthouse at {one.address} says: {one.details}")
        if one.code not in ("", "NOT_FOUND") and not one.nobody:
            raise ToldError(f"the lighthouse at {one.address} says: {one.details}")
    return said


def choose(said: list[Said]) -> Said | None:
    """The answer of the lighthouse that reigns, else of one that knows who is a member, else any."""
    answers = [one for one in said if one.reply is not None]
    return max(answers, key=lambda one: (one.reply.reigns, one.reply.HasField("membership")), default=None)


def show(reply: Any) -> None:
    """Print the reply for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    head = f"job {reply.job}, term {reply.term.number} of lighthouse {reply.term.lighthouse}"
    if reply.HasField("membership"):
        head += f", epoch {reply.membership.epoch.number}"
    console.print(Text(head))
    if reply.HasField("membership") and not reply.reigns:
        console.print(
            Text("this lighthouse does not reign: its log does not hold the newest epoch, or others obey another")
        )
    if reply.stopped:  # nobody is waited for any more
        console.print(Text(reply.stopped if reply.stopped.startswith("finished") else f"stopped: {reply.stopped}"))
    elif reply.waiting:
        console.print(Text(f"waiting for {reply.waiting}"))
    if not reply.groups:
        console.print(Text("no group is here: the job has not begun, or it has ended"))
        return
    table = Table()
    for column in ("group", "state", "phase", "step", "silent for"):
        table.add_column(column)
    for group in reply.groups:
        silent = "-" if reply.stopped else f"{group.silent_ms / 1000:.1f} s"
        table.add_row(*map(Text, (group.group, group.state, group.phase, str(group.step), silent)))
    console.print(table)
