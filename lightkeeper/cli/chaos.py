"""`lightkeeper chaos`: faults for real processes, each with who must be blamed for it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from lightkeeper.cli.options import check_address, check_count
from lightkeeper.errors import UsageError

MINUTES_MAX = 7 * 24 * 60.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 1.0, 3600.0
SEED_MAX = 2**31 - 1
LINE_CHARS_MIN, LINE_CHARS_MAX = 60, 120

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Seed = Annotated[int, typer.Option(help="Decides whom and when the fault strikes; the same seed does the same.")]
_Folder = Annotated[Path | None, typer.Option(help="Where event log and journal go; a new folder under ./runs.")]


def build() -> typer.Typer:
    """The commands below `chaos`."""
    app = typer.Typer(help="Break real processes, and check who was blamed and what was lost.", no_args_is_help=True)
    app.command("list")(list_faults)
    app.command("run")(run)
    app.command("soak")(soak)
    app.command("repeat")(repeat)
    app.command("inject")(inject)
    return app


def list_faults(json: _Json = False) -> int:
    """All faults, what each does, and where it can be done."""
    from lightkeeper.chaos.faults import FAULTS

    if json:
        import msgspec

        rows = [
            {"name": f.name, "what": f.what, "live": f.live, "soak": f.soak, "supervised": f.shape.supervised}
            for f in FAULTS.values()
        ]
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        return 0
    width = max(LINE_CHARS_MIN, min(LINE_CHARS_MAX, shutil.get_terminal_size((LINE_CHARS_MAX, 0)).columns))
    for fault in FAULTS.values():
        where = "run, soak, inject" if fault.live and fault.soak else "run, inject" if fault.live else "run"
        supervised = " (supervised job)" if fault.shape.supervised else ""
        line = f"{fault.name:17} {where:17} {fault.what}{supervised}"
        typer.echo(textwrap.fill(line, width, subsequent_indent=" " * 36))
    return 0


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which fault; `chaos list` names them all.")],
    seed: _Seed = 0,
    run_folder: _Folder = None,
    json: _Json = False,
) -> int:
    """Start a small job of real processes, do one fault to it, and check that nothing was lost and who was blamed.

    Ends with 0 only if every check holds, and with 77 where this machine does not allow the fault.
    """
    check_count(seed, "--seed", 0, SEED_MAX)
    from lightkeeper.chaos.run import run as run_it

    return run_it(name, seed, run_folder, json)


def soak(
    minutes: Annotated[float, typer.Option(help="How long faults go on.")] = 10.0,
    seed: _Seed = 0,
    interval_s: Annotated[
        float, typer.Option(help="Seconds between two faults; one waits until all groups train again.")
    ] = 20.0,
    supervised: Annotated[
        bool,
        typer.Option("--supervised", help="The job runs under `lightkeeper run`, and nodes and supervisor die too."),
    ] = False,
    run_folder: _Folder = None,
    json: _Json = False,
) -> int:
    """Do one fault after another to one job, drawn from the seed, and check what was lost and who was blamed.

    Ends with 0 only if every check holds.
    """
    check_count(seed, "--seed", 0, SEED_MAX)
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise UsageError(f"--interval-s must be within {INTERVAL_S_MIN:g}..{INTERVAL_S_MAX:g}, got {interval_s:g}")
    if not interval_s / 60 <= minutes <= MINUTES_MAX:
        least = interval_s / 60
        raise UsageError(
            f"--minutes must be within {least:g}..{MINUTES_MAX:g} (one interval at least), got {minutes:g}"
        )
    from lightkeeper.chaos.soak import soak as soak_it

    return soak_it(minutes, seed, interval_s, supervised, run_folder, json)


def repeat(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an earlier run or soak, with its journal.")],
    run_folder: _Folder = None,
    json: _Json = False,
) -> int:
    """Do again what the journal of an earlier run or soak tells: the same faults, by its seed, on a new job."""
    from lightkeeper.chaos.run import repeat as repeat_it

    return repeat_it(folder, run_folder, json)


def inject(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which fault; `chaos list` says which can be injected.")],
    run: Annotated[Path | None, typer.Option("--run", help="Run folder of the job.")] = None,
    lighthouse: Annotated[
        str, typer.Option(help="HOST:PORT of the job's lighthouse, instead: its processes here name their run folder.")
    ] = "",
    group: Annotated[str, typer.Option(help="The group that is hit; lighthouse-kill needs none.")] = "",
    rank: Annotated[int, typer.Option(help="Which of its ranks.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    json: _Json = False,
) -> int:
    """Do a fault to a job that runs on this machine, and check who was blamed for it.

    Processes are found by what they wrote into the run's event log. In a terminal it asks first. What it froze it thaws
    afterwards; what it killed it does not start again.
    """
    check_count(rank, "--rank", 0)
    from lightkeeper.chaos.inject import Injection, check_live, find_folder
    from lightkeeper.chaos.inject import inject as inject_it

    fault = check_live(name)
    folder = find_folder(run, check_address(lighthouse, "--lighthouse") if lighthouse else "")
    injection = Injection(fault, folder, group, rank)
    if not yes and sys.stdin.isatty():
        typer.confirm(f"{fault.what}: {injection.target} of the run in {folder}. Go on?", abort=True)
    return inject_it(injection, json)
