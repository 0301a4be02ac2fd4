"""`lightkeeper preflight`: whether this node may join a job."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightkeeper.cli.options import TOKEN_FILE_VARIABLE, check_count, require_token
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.supervisor.preflight.request import Request
    from lightkeeper.supervisor.preflight.results import Result
    from lightkeeper.supervisor.preflight.verdict import Report


def _one(kind: Any, name: str, text: str, default: str | bool = False, metavar: str | None = None) -> Any:
    return Annotated[kind | None, typer.Option(name, help=text, show_default=default, metavar=metavar)]


def _many(kind: Any, name: str, text: str, metavar: str | None = None) -> Any:
    return Annotated[list[kind] | None, typer.Option(name, help=f"{text} May be repeated.", metavar=metavar)]


OPTIONS: dict[str, Any] = {
    "gpus": _one(int, "--gpus", "GPUs that there must be."),
    "gpu_name": _one(str, "--gpu-name", "What the names of the GPUs must hold, e.g. H200."),
    "memory_gib": _one(float, "--memory-gib", "Memory that must be free, GiB.", "not judged"),
    "disk": _many(str, "--disk", "Room that a disk must have, GiB.", "PATH:GIB"),
    "checkpoint": _one(Path, "--checkpoint", "Folder in which checkpoints are to be written."),
    "data": _many(str, "--data", "File or folder that must be readable.", "PATH"),
    "port": _many(int, "--port", "Port that must be free."),
    "host": _many(str, "--host", "Name of a host that must be known.", "NAME"),
    "link": _many(str, "--link", "Network interface or InfiniBand device that must be up, that fast.", "NAME[:GBIT]"),
    "xid_s": _one(float, "--xid-s", "For how long an Xid in the kernel's log counts, seconds.", "3600"),
    "open_files": _one(int, "--open-files", "Open files that a process must be allowed.", "1024"),
    "shm_gib": _one(float, "--shm-gib", "Size that /dev/shm must have, GiB.", "0.125"),
    "clock_skew_s": _one(float, "--clock-skew-s", "How far the clocks of nodes may be apart, seconds.", "1"),
    "nnodes": _one(int, "--nnodes", "Nodes that are looked at together; the same command is started on each.", "1"),
    "node_rank": _one(int, "--node-rank", "Which of them this is, from 0.", "0"),
    "rendezvous": _one(str, "--rendezvous", "Where they meet: node 0 listens there.", metavar="HOST:PORT"),
    "ranks": _one(int, "--ranks", "Ranks of each node in an all-reduce.", "--gpus, else 1"),
    "wait_s": _one(float, "--wait-s", "How long the other nodes may take to come, seconds.", "30"),
    "bandwidth_mib": _one(int, "--bandwidth-mib", "Size of an all-reduce, MiB.", "64"),
    "storage_mib": _one(int, "--storage-mib", "What each node writes and reads, MiB.", "64"),
}


def command(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="Only this check.")] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="NAME", help="Not this check.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the checks and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", help="Checks that run side by side.")] = 4,
    whole_s: Annotated[float, typer.Option("--whole-s", help="What has not ended by then hangs, seconds.")] = 105.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Search for slow nodes by pairs, floors or not.")] = False,
    expect: Annotated[Path | None, typer.Option(help="Facts that must hold: another node's --json.")] = None,
    floors: Annotated[Path | None, typer.Option(help="What must at least be measured: see --calibrate.")] = None,
    calibrate: Annotated[Path | None, typer.Option(help="Write floors there: the figures less 20 %.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(envvar=TOKEN_FILE_VARIABLE, help="File with the job token, for --nnodes.")
    ] = None,
    **given: Any,
) -> int:
    """Check whether this node may join a job: exit code 0 if it may, 1 if it must not, 2 for wrong input."""
    from lightkeeper.supervisor.preflight.registry import CHECKS, choose
    from lightkeeper.supervisor.preflight.service import CHECKS_S_MAX, preflight

    if listed:
        for check in CHECKS:
            sys.stdout.write(f"{check.name:<16} {check.says} (at most {check.limit_s:g} s)\n")
        return 0
    checks = choose(_names(only), _names(skip))
    check_count(jobs, "--jobs", 1, 256)
    if not 1 <= whole_s <= CHECKS_S_MAX:
        raise UsageError(f"--whole-s must be within 1..{CHECKS_S_MAX:g}, got {whole_s:g}")
    request = _request(expect, floors, token_file, sweep, given)
    if calibrate is not None and not calibrate.absolute().parent.is_dir():
        raise UsageError(f"--calibrate {calibrate}: there is no folder {calibrate.absolute().parent}")
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no check outlives it
    try:
        report = preflight(request, checks, jobs, whole_s, _say_if_failed)
    finally:
        signal.signal(signal.SIGTERM, before)
    _print(report, json)
    if calibrate is not None:
        _calibrate(str(calibrate), report)
    return 0 if report.may_join else 1


def takes_options() -> None:
    """Puts `OPTIONS` in the place of `**given`: typer reads a command's options from its signature."""
    shown = signature(command, eval_str=True)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in OPTIONS.items()]
    command.__signature__ = shown.replace(parameters=[*own, *options])  # type: ignore[attr-defined]


def _names(given: Sequence[str] | None) -> list[str]:
    return [name.strip() for words in given or () for name in words.split(",") if name.strip()]


def _request(
    expect: Path | None, floors: Path | None, token_file: Path | None, sweep: bool, given: dict[str, Any]
) -> Request:
    """What is asked of the node.

    Raises:
        UsageError: an option, or a file that it names, is wrong.
    """
    from lightkeeper.supervisor.preflight.expected import read_expected
    from lightkeeper.supervisor.preflight.floors import read_floors
    from lightkeeper.supervisor.preflight.request import Request

    fields = {name: value for name, value in given.items() if value is not None}
    fields.setdefault("ranks", max(1, fields.get("gpus") or 1))
    fields["disks"] = dict(_split(text, "--disk", "PATH:GIB", False) for text in fields.pop("disk", ()))
    fields["links"] = dict(_split(text, "--link", "NAME[:GBIT]", True) for text in fields.pop("link", ()))
    for option, name in (("port", "ports"), ("host", "hosts"), ("data", "data")):
        fields[name] = tuple(fields.pop(option, ()))
    if "checkpoint" in fields:
        fields["checkpoint"] = str(fields["checkpoint"].absolute())
    if expect is not None:
        fields["expect"] = read_expected(str(expect))
    if floors is not None:
        fields["floors"] = read_floors(str(floors))
    if fields.get("nnodes", 1) > 1:
        fields["token"] = require_token(token_file)
    return Request(sweep=sweep, **fields)


def _split(text: str, option: str, form: str, bare: bool) -> tuple[str, float]:
    name, colon, number = text.rpartition(":")
    if not colon and bare:
        return text, 0.0
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not name or not 0 <= value < 1e9:
        raise UsageError(f"{option} {text!r}: give {form}")
    return name, value


def _say_if_failed(result: Result) -> None:
    if result.state == "failed":
        say(f"lightkeeper: preflight: {result.name} failed: {result.reason}")


def _print(report: Report, json: bool) -> None:
    import json as encoder

    from lightkeeper.supervisor.preflight.verdict import table

    if json:
        sys.stdout.write(encoder.dumps(report.fields()) + "\n")
    else:
        sys.stdout.write("\n".join(table(report)) + "\n")


def _calibrate(path: str, report: Report) -> None:
    """Writes floors from the figures of all nodes that may join.

    Raises:
        ToldError: there are none.
    """
    from lightkeeper.supervisor.preflight.floors import floors_from, write_floors
    from lightkeeper.supervisor.preflight.runner import figures_of

    measured = [said["figures"] for said in report.nodes.values() if said.get("came") and said["may_join"]]
    if not report.nodes and report.may_join:
        measured = [figures_of(report.results)]
    if not any(measured):
        raise ToldError(f"--calibrate {path}: nothing was measured on a node that may join, so no floor is written")
    write_floors(path, floors_from(measured))
    say(f"lightkeeper: preflight: floors are in {path}")


takes_options()
