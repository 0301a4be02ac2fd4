"""`lightkeeper quarantine`: which nodes get no work, and how they come back."""

from __future__ import annotations

import json as encoder
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightkeeper.cli.options import check_count
from lightkeeper.errors import UsageError
from lightkeeper.words import counted, shown

if TYPE_CHECKING:
    from lightkeeper.supervisor.quarantine import Book, Node
    from lightkeeper.supervisor.quarantine_file import QuarantineFile

FAILED = 1
TOP = 10
_File = Annotated[
    Path | None, typer.Option("--file", envvar="LIGHTKEEPER_QUARANTINE", help="The quarantine's file (JSON).")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Node = Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as the scheduler calls it.")]


def build() -> typer.Typer:
    """The commands below `quarantine`."""
    app = typer.Typer(help="See who gets no work, put nodes aside, and bring them back.", no_args_is_help=True)
    app.command("ls")(ls)
    app.command("add")(add)
    app.command("release")(release)
    app.command("burn-in")(burn_in)
    return app


def _open(file: Path | None) -> QuarantineFile:
    from lightkeeper.supervisor.quarantine_file import QuarantineFile, default_path

    return QuarantineFile(file or default_path())


@contextmanager
def _allowed() -> Iterator[None]:
    from lightkeeper.supervisor.quarantine import NotAllowed

    try:
        yield
    except NotAllowed as error:
        raise UsageError(str(error)) from None


def _reason(words: str) -> str:
    """An option that stands where a reason should would be taken for one, and the next word for a further argument."""
    if words.startswith("-"):
        raise typer.BadParameter(f"it takes a reason in words, and got {words}")
    return words


def _name(node: str) -> str:
    if not node or len(node) > 253 or not node.isprintable() or node.startswith("-") or " " in node:
        raise UsageError(f"{node!r} is no name of a node")
    return node


# ---------------------------------------------------------------- ls, add, release


def ls(
    everyone: Annotated[bool, typer.Option("--all", help="Also those that have come back.")] = False,
    file: _File = None,
    json: _Json = False,
) -> int:
    """Show who gets no work and why, and how much of all exclusions the worst nodes have."""
    from lightkeeper.supervisor.quarantine import concentration
    from lightkeeper.supervisor.quarantine_file import plain

    opened = _open(file)
    book, wall = opened.read(), time.time()
    shares = concentration(book.nodes.values())
    if json:
        top = [vars(share) for share in shares[:TOP]]
        _print({"file": str(opened.path), **plain(_shown(book, everyone)), "concentration": top})
        return 0
    chosen = list(_shown(book, everyone).nodes.values())
    if not chosen:
        typer.echo(f"nobody is in quarantine ({opened.path})")
    for node in sorted(chosen, key=lambda node: (not node.out, node.name)):
        typer.echo(_line(node, wall))
    if shares:
        total = sum(share.count for share in shares)
        typer.echo(f"{counted(total, 'exclusion')} of {counted(len(shares), 'node')}; the most often:")
        for share in shares[:TOP]:
            above = f"with those above {share.together:6.1%}"
            typer.echo(f"  {shown(share.name):<24} {share.count:>5}  {share.share:6.1%}  {above}")
    return 0


def _shown(book: Book, everyone: bool) -> Book:
    from lightkeeper.supervisor.quarantine import Book

    return book if everyone else Book({name: node for name, node in book.nodes.items() if node.out})


def _line(node: Node, wall: float) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(node.failures[-1].wall)) if node.failures else "-"
    if not node.out:
        back = f"back {node.released}"
    elif node.passed:
        back = "passed a burn-in; a person may release it"
    elif node.returns_by_itself(wall):
        back = "comes back by a burn-in"
    else:
        back = f"failed {node.recent(wall)} times in a week: a person must release it"
    evidence = f" [{node.failures[-1].evidence}]" if node.failures and node.failures[-1].evidence else ""
    serial = f" ({node.serial})" if node.serial else ""
    text = f"{node.name}{serial}  {node.count}x, last {since}: {node.reason}{evidence}; {back}"
    return shown(text, 1500)


def add(
    node: _Node,
    reason: Annotated[str, typer.Option(help="Why.", callback=_reason)],
    evidence: Annotated[str, typer.Option(help="Where what speaks for it was kept.")] = "",
    serial: Annotated[str, typer.Option(help="Of its hardware; read if NODE is this machine.")] = "",
    file: _File = None,
    json: _Json = False,
) -> int:
    """Put a node aside: it gets no work until it has passed a burn-in."""
    from lightkeeper.supervisor.quarantine_file import own_serial

    if not reason.strip():
        raise UsageError("--reason must say why")
    skipped = ""
    if not serial and _is_here(_name(node)):
        serial, skipped = own_serial()
    with _allowed(), _open(file).change() as held:
        held[0] = held[0].add(node, reason, time.time(), serial=serial, evidence=evidence)
        made = held[0].find(node, serial)
    assert made is not None
    _told(made, json, f"{made.name} is in quarantine, {counted(made.count, 'time')} in all")
    if skipped and not json:
        typer.echo(f"without its serial: {skipped}")
    return 0


def release(
    node: _Node,
    force: Annotated[
        str,
        typer.Option(
            metavar="REASON", help="Why it may come back although it has passed no burn-in.", callback=_reason
        ),
    ] = "",
    file: _File = None,
    json: _Json = False,
) -> int:
    """Give a node work again, after it has passed a burn-in, or by a person's word."""
    from lightkeeper.cli.calls import operator

    with _allowed(), _open(file).change() as held:
        held[0] = held[0].release(_name(node), operator(), force)
        made = held[0].nodes[node]
    _told(made, json, f"{node} gets work again: released {made.released}")
    return 0


# ---------------------------------------------------------------- burn-in


def burn_in(
    node: _Node,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="What is run. Default: lightkeeper preflight.")
    ] = None,
    via: Annotated[
        str, typer.Option(metavar="'PROGRAM ARG...'", help="What brings the command to the node, such as 'ssh NODE'.")
    ] = "",
    here: Annotated[
        bool, typer.Option("--here", help="Run it on this machine, whatever it is called, without --via.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="At least so many rounds.")] = 3,
    for_s: Annotated[float, typer.Option(metavar="S", help="And for at least so many seconds.")] = 0.0,
    round_s: Annotated[
        float, typer.Option(metavar="S", help="A round that takes longer is killed and failed.")
    ] = 600.0,
    file: _File = None,
    json: _Json = False,
) -> int:
    """Run a command on a node again and again; it comes back if every round goes well. Ends with 1 if one does not.

    A node that failed twice in a week does not come back by that alone: release it.
    """
    from lightkeeper.supervisor import burn_in as burning
    from lightkeeper.supervisor.quarantine import BurnIn

    check_count(rounds, "--rounds", highest=100_000)
    for value, option, lowest in ((for_s, "--for-s", 0.0), (round_s, "--round-s", 0.1)):
        if not lowest <= value <= 30 * 86400:
            raise UsageError(f"{option} must be within {lowest:g}..{30 * 86400}, got {value:g}")
    argv = _argv(_name(node), command or [], via, here)
    opened = _open(file)
    known = opened.read().nodes.get(node)
    if known is None or not known.out:
        raise UsageError(f"{node} is not in quarantine ({opened.path})")

    def told(number: int, seconds: float) -> None:
        if not json:
            typer.echo(f"round {number} went well ({seconds:.1f} s)")

    result = burning.burn_in(argv, rounds, for_s, round_s, told)
    passed = BurnIn(time.time(), not result.why, result.rounds, round(result.seconds, 1), shown(shlex.join(argv)))
    with _allowed(), opened.change() as held:
        held[0] = held[0].burned_in(node, passed, known.count, f"burn-in failed: {result.why}")
        made = held[0].nodes[node]
    if result.why:
        words = f"{node} stays in quarantine: {shown(result.why, 300)}"
    elif made.out:
        why = "it was put aside again meanwhile" if made.count != known.count else "it failed twice in a week"
        words = f"{node} has passed, but {why}: lightkeeper quarantine release {node}"
    else:
        words = f"{node} gets work again: {made.released}"
    _told(made, json, words)
    return FAILED if result.why else 0


def _argv(node: str, command: list[str], via: str, here: bool) -> list[str]:
    """The whole command.

    Raises:
        UsageError: nobody says how it comes to that node.
    """
    if via and here:
        raise UsageError("--here and --via are two ways: give one")
    try:
        prefix = shlex.split(via)
    except ValueError as error:
        raise UsageError(f"--via: {error}: {via}") from None
    if not prefix and not here and not _is_here(node):
        raise UsageError(f"{node} is not this machine: give --via 'ssh {node}', or --here")
    if command:
        return [*prefix, *command]
    own = ["lightkeeper"] if prefix else [sys.executable, "-m", "lightkeeper"]
    return [*prefix, *own, "preflight"]


def _is_here(node: str) -> bool:
    name = socket.gethostname()
    return node in (name, name.partition(".")[0])


def _told(node: Node, json: bool, words: str) -> None:
    if json:
        from dataclasses import asdict

        _print(asdict(node))
    else:
        typer.echo(words)


def _print(values: dict[str, Any]) -> None:
    sys.stdout.write(encoder.dumps(values) + "\n")
