"""`lightkeeper diagnose LOGFILE...`: why a rank ended, by its log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightkeeper.words import shown

if TYPE_CHECKING:
    from lightkeeper.diagnose import Diagnosis

LINE_CHARS_MAX = 160


def command(
    logs: Annotated[list[Path], typer.Argument(metavar="LOGFILE...", help="Logs of one job, one for each rank.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each log, and one for all.")] = False,
) -> int:
    """Say why a rank ended: the cause, the line of its log that decides, and how sure that is."""
    import json as encoder

    from lightkeeper.diagnose import classify
    from lightkeeper.diagnose.files import first_cause, read_tail

    tails = {path: read_tail(path) for path in dict.fromkeys(logs)}
    found = {path: classify(tail.lines) for path, tail in tails.items()}
    first = first_cause(found)
    if json:
        for path, diagnosis in found.items():
            sys.stdout.write(encoder.dumps(_fields(path, diagnosis, tails[path].cut)) + "\n")
        if len(found) > 1:
            sys.stdout.write(encoder.dumps({"first_cause": None if first is None else str(first)}) + "\n")
        return 0
    for path, diagnosis in found.items():
        sys.stdout.write(_line(path, diagnosis, tails[path].cut) + "\n")
    sys.stdout.write(_conclusion(found, first) + "\n")
    return 0


def _fields(path: Path, diagnosis: Diagnosis, cut: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {"log": str(path), **asdict(diagnosis), "cut": cut}


def _line(path: Path, diagnosis: Diagnosis, cut: bool) -> str:
    if not diagnosis.rule:
        return f"{path}: unknown: no line says why"
    victim = ", a victim of somebody else" if diagnosis.victim else ""
    rank = "" if diagnosis.rank is None else f", rank {diagnosis.rank}"
    where = f"line {diagnosis.number}{' of what was read of its end' if cut else ''}"
    head = f"{path}: {diagnosis.cause} (confidence {diagnosis.confidence:.2f}, {diagnosis.rule}{rank}{victim})"
    return f"{head}: {where}: {shown(diagnosis.line, LINE_CHARS_MAX)}"


def _conclusion(found: dict[Path, Diagnosis], first: Path | None) -> str:
    from lightkeeper.diagnose.rules import book

    causes = book().causes
    if first is not None:
        cause = causes[found[first].cause]
        whose = f"first cause: {first}: " if len(found) > 1 else ""
        return f"{whose}{cause.says}: {cause.advice}"
    silent = [str(path) for path, diagnosis in found.items() if not diagnosis.rule]
    if len(silent) == len(found):
        return f"{causes['unknown'].says}: {causes['unknown'].advice}"
    if silent:  # it was killed, or hung: the others waited for it
        return f"the others were left by somebody: look first at what ends without an error: {', '.join(silent)}"
    return "all that was read are victims: the first cause stands in another rank's log"
