"""`lightkeeper why RUN [last|STEP|GROUP]`: who did it, in six lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    which: Annotated[
        str, typer.Argument(metavar="[last|STEP|GROUP]", help="The last incident, that of a step, the last of a group.")
    ] = "last",
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object.")] = False,
) -> int:
    """Say of an incident who did it, since when, by what evidence, what was done, what it cost and what to do."""
    from lightkeeper.events import reader, verdict, why
    from lightkeeper.events.pretty import torn_lines

    log = reader.read_run(run)
    incidents = verdict.incidents(log.events)
    blind = bool(log.events) and not any(event.process == "lighthouse" for event in log.events)
    if not incidents:
        known = (
            "the members tell of no loss, and of no failed reduce" if blind else "nobody was lost, and no reduce failed"
        )
        sys.stdout.write("null\n" if json else f"no incident in {run}: {known}{why.unsaved(log.events)}\n")
    else:
        incident = why.choose(incidents, which)
        told = [why.json_line(incident)] if json else why.lines(incident, incidents)
        sys.stdout.write("\n".join(told) + "\n")
    if blind:
        print(f"lightkeeper: {why.BLIND}", file=sys.stderr)
    for text in torn_lines(log.torn):
        print(f"lightkeeper: {text}", file=sys.stderr)
    return 0
