"""`lightkeeper events RUN`: read a run's event log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lightkeeper.errors import UsageError


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is written.")] = False,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only this kind, e.g. group_lost; may be repeated.")
    ] = None,
    group: Annotated[str, typer.Option(help="Only events about this group.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON, merged by time.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Print the rules over the log instead.")] = False,
) -> int:
    """Print the events of a run, merged over all of its processes."""
    from lightkeeper.events import reader
    from lightkeeper.events.pretty import json_line, line
    from lightkeeper.events.schema import BY_NAME, Event, kind_of

    unknown = sorted(set(kind or []) - set(BY_NAME))
    if unknown:
        raise UsageError(f"no event kind {unknown[0]!r} (there are: {', '.join(BY_NAME)})")

    def show(event: Event) -> None:
        if (not kind or kind_of(event) in kind) and (not group or event.group == group):
            sys.stdout.write((json_line(event) if json else line(event)) + "\n")

    if follow:
        for event in reader.follow(run, stop=lambda: False):
            show(event) if event is not None else sys.stdout.flush()
        return 0
    log = reader.read_run(run)
    if summary:
        from lightkeeper.events.pretty import summary_lines

        for text in summary_lines(log.events):
            sys.stdout.write(text + "\n")
    else:
        for event in log.events:
            show(event)
    for torn in log.torn:
        print(f"lightkeeper: {torn.file.name} line {torn.line} is torn: {torn.text[:60]}", file=sys.stderr)
    return 0
