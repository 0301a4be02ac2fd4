"""`lightkeeper events RUN`: read a run's event log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightkeeper.errors import RunFolderError, UsageError
from lightkeeper.words import unknown

if TYPE_CHECKING:
    from lightkeeper.events.schema import Event

FOLDER_S_MAX = 10.0
RULE_BROKEN = 1
_SECONDS = re.compile(r"\d+(\.\d+)? s\b")  # also in words: "rank 0 compute of step 12 for 1.9 s"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is written.")] = False,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only this kind, e.g. group_lost; may be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--except", help="Not this kind, e.g. committed; may be repeated.")
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Without the steps, and who waits once, not every second.")
    ] = False,
    group: Annotated[str, typer.Option(help="Only events about this group.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON, merged by time.")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print the rules over the log instead; ends with 1 if one does not hold.")
    ] = False,
) -> int:
    """Print the events of a run, merged over all of its processes."""
    from lightkeeper.events import reader
    from lightkeeper.events.pretty import json_line, line, summary_lines, torn_lines
    from lightkeeper.events.schema import BY_NAME, kind_of

    if wrong := sorted({*(kind or []), *(without or [])} - set(BY_NAME)):
        raise UsageError(unknown("event kind", wrong[0], BY_NAME))
    if follow and summary:
        raise UsageError("--summary is of what is written so far: it does not go with --follow")
    hidden = {*(without or []), *(["committed"] if brief else [])}

    repeated = _Repeated()

    def show(event: Event) -> None:
        shown = kind_of(event)
        if brief and repeated.says(event):
            return
        if (not kind or shown in kind) and shown not in hidden and (not group or event.group == group):
            sys.stdout.write((json_line(event) if json else line(event)) + "\n")

    if follow:
        _await_folder(run, reader.events_folder)
        for event in reader.follow(run, stop=lambda: False):
            show(event) if event is not None else sys.stdout.flush()
        return 0
    log, holds = reader.read_run(run), True
    if summary:
        lines, holds = summary_lines(log.events)
        for text in lines:
            sys.stdout.write(text + "\n")
    else:
        for event in log.events:
            show(event)
    for text in torn_lines(log.torn):
        print(f"lightkeeper: {text}", file=sys.stderr)
    return 0 if holds else RULE_BROKEN


class _Repeated:
    """Whether a process waits for what it said it waits for in its event before; only its seconds are new."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, int], tuple[str, str, str] | None] = {}  # by writer, None: no `waiting`

    def says(self, event: Event) -> bool:
        from lightkeeper.events.schema import Waiting

        waits = (event.group, event.whom, _SECONDS.sub("s", event.why)) if isinstance(event, Waiting) else None
        writer = event.process, event.host, event.pid
        before, self._last[writer] = self._last.get(writer), waits
        return waits is not None and waits == before


def _await_folder(run: Path, find: Callable[[Path], Path]) -> None:
    """Waits a little for a run that is just being started.

    Raises:
        RunFolderError: there is still no event log.
    """
    deadline, told = time.monotonic() + FOLDER_S_MAX, False
    while True:
        try:
            find(run)
            return
        except RunFolderError:
            if time.monotonic() > deadline:
                raise
        if not told:
            print(f"lightkeeper: waiting {FOLDER_S_MAX:g} s for an event log in {run}", file=sys.stderr)
            told = True
        time.sleep(0.1)
