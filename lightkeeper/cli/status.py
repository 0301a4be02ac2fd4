"""`lightkeeper status`: ask the lighthouse who is a member."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_address, require_token
from lightkeeper.errors import ToldError, UsageError

ANSWER_S_MAX = 5.0


def command(
    lighthouse: Annotated[
        str,
        typer.Option(envvar="LIGHTKEEPER_LIGHTHOUSE", metavar="HOST:PORT", help="Address of the lighthouse."),
    ] = DEFAULT_LIGHTHOUSE,
    job: Annotated[str, typer.Option(envvar="LIGHTKEEPER_JOB", help="Id of the job.")] = "job",
    token_file: shared.TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what a lighthouse knows of a job: its epoch, its groups, and what is waited for."""
    check_address(lighthouse, "--lighthouse")
    reply = ask(lighthouse, job, require_token(token_file))
    if json:
        from google.protobuf.json_format import MessageToJson

        text = MessageToJson(reply, preserving_proto_field_name=True, indent=None)
        sys.stdout.write(text + "\n")
    else:
        show(reply)
    return 0


def ask(lighthouse: str, job: str, token: str) -> Any:
    """A `StatusReply` of the job.

    Args:
        lighthouse: `host:port`.
        job: the job's id.
        token: the job token.

    Raises:
        UsageError: the token is refused, or there is no such job.
        ToldError: nobody answers.
    """
    import grpc

    from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc
    from lightkeeper.wire import CHANNEL_OPTIONS, metadata

    with grpc.insecure_channel(lighthouse, options=CHANNEL_OPTIONS) as channel:
        stub = lighthouse_pb2_grpc.LighthouseStub(channel)
        try:
            return stub.Status(lighthouse_pb2.StatusRequest(), timeout=ANSWER_S_MAX, metadata=metadata(token, job))
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
    if code is grpc.StatusCode.NOT_FOUND:
        reason = "it has not begun, or it has ended and is forgotten"
        raise UsageError(f"the lighthouse at {lighthouse} says: {details} ({reason})")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        raise UsageError(f"the lighthouse at {lighthouse} says: {details}")
    raise ToldError(f"no lighthouse answers at {lighthouse}: {details}")


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
