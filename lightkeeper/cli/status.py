"""`lightkeeper status`: ask the lighthouse who is a member, or the groups themselves while there is none."""

from __future__ import annotations

import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli import outage
from lightkeeper.cli.calls import Said, call
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_addresses, check_lighthouses
from lightkeeper.cli.outage import Found, managers_in
from lightkeeper.cli.runfolder import DEFAULT_JOB, VARIABLE, reach
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.manager.addresses import FILE


def command(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="The run's folder, as --run-folder.", show_default=False)
    ] = None,
    lighthouse: Annotated[
        str | None,
        typer.Option(
            envvar="LIGHTKEEPER_LIGHTHOUSE",
            metavar="HOST:PORT[,...]",
            help="Addresses of the lighthouse, or file:PATH with them in it.",
            show_default=DEFAULT_LIGHTHOUSE,
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(envvar="LIGHTKEEPER_JOB", help="Id of the job.", show_default=DEFAULT_JOB)
    ] = None,
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
            envvar=VARIABLE,
            help="The run's folder. Lighthouse, job and token, unless they are given, are taken from it if the run is "
            "supervised; its events say where managers listen, if no lighthouse answers.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what a lighthouse knows of a job: its epoch, its groups, and what is waited for.

    If no lighthouse answers, the groups' own managers are asked.
    """
    managers = check_addresses(manager, "--manager") if manager else ()
    run_folder = _one_folder(run, run_folder)
    to = reach(run_folder, lighthouse, job, token_file)
    lighthouse, job, token = to.lighthouse, to.job, to.token
    addresses, unusable = _addresses(lighthouse, others=bool(managers or run_folder))
    said = ask(addresses, job, token) + ([Said(lighthouse, None, "UNAVAILABLE", unusable)] if unusable else [])
    best = choose(said)
    found = Found() if managers or (best is not None and best.reply.members_in_touch) else managers_in(run_folder, job)
    if best is None:
        return outage.show(said, managers, found, job, token, json)
    others = {one.address: _beside(one, best) for one in said if one is not best}
    if json:
        from google.protobuf.json_format import MessageToDict

        told = MessageToDict(best.reply, preserving_proto_field_name=True)
        sys.stdout.write(json_module.dumps({**told, "address": best.address, "also_asked": others}) + "\n")
        return 0
    for address, text in others.items():
        typer.echo(f"also asked {address}: {text}")
    show(best)
    elsewhere = (
        "" if best.reply.members_in_touch else outage.elsewhere(managers or found.addresses, addresses, job, token)
    )
    if elsewhere:
        typer.echo(elsewhere)
    return 0


def _one_folder(run: Path | None, run_folder: Path | None) -> Path | None:
    """The argument, which goes before the environment; not beside the option.

    Raises:
        UsageError: both are given.
    """
    if run is not None and run_folder is not None and str(run_folder) != os.environ.get(VARIABLE):
        raise UsageError(f"the run's folder is given twice: {run} and --run-folder {run_folder}")
    return run or run_folder


def _addresses(lighthouse: str, others: bool) -> tuple[tuple[str, ...], str]:
    """The addresses, and why the file that should hold them cannot be used, if there are `others` to ask."""
    try:
        return check_lighthouses(lighthouse, "--lighthouse"), ""
    except UsageError as error:
        if not others or not lighthouse.startswith(FILE):
            raise
        return (), str(error)


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
    """The answer of who decides for the job, as far as can be seen.

    That is who reigns and has members in touch; else who has most of them in touch, or knows the newest epoch. A
    lighthouse with an old log believes that it reigns, but nobody is there.
    """

    def weight(one: Said) -> tuple[bool, int, int, bool, bool]:
        reply, number = one.reply, one.reply.membership.epoch.number
        here = reply.members_in_touch
        return reply.reigns and here > 0, here, number, reply.reigns, reply.HasField("membership")

    return max((one for one in said if one.reply is not None), key=weight, default=None)


def _beside(one: Said, best: Said) -> str:
    """What another lighthouse than the best said, in a few words."""
    if one.reply is None:
        return f"no lighthouse answers ({one.details})" if one.nobody else one.details
    here, number = one.reply.members_in_touch, one.reply.membership.epoch.number
    touch = f"{here} of its members in touch with it" if here else "nobody is in touch with it"
    newest = best.reply.membership.epoch.number
    if not one.reply.HasField("membership") or number == newest:
        return f"stands by; {touch}"
    return f"knows {'an older' if number < newest else 'a newer'} epoch ({number}); {touch}"


def show(said: Said) -> None:
    """Print the reply for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, reply = Console(highlight=False), said.reply
    head = f"job {reply.job}, term {reply.term.number} of lighthouse {reply.term.lighthouse} at {said.address}"
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
    if reply.ended:
        console.print(Text(f"before that: {reply.ended}"))
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
