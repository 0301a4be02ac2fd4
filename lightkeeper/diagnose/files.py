"""The ends of log files, and which of several ranks' logs holds the first cause."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.diagnose.classify import Diagnosis
from lightkeeper.diagnose.rules import book
from lightkeeper.errors import UsageError

TAIL_BYTES_MAX = 4 << 20
_STAMP = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?")


@dataclass(frozen=True)
class Tail:
    """The end of a log; `cut`: something before it was not read, and lines are counted from where it begins."""

    lines: list[str]
    cut: bool


def read_tail(path: Path, bytes_max: int = TAIL_BYTES_MAX) -> Tail:
    """The last lines of a log, whatever bytes it holds.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    try:
        if not path.is_file():  # a pipe would block, a folder has no lines
            raise UsageError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - bytes_max)
            file.seek(start)
            data = file.read(bytes_max)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", "replace")
    else:
        text = data.decode("utf-8", "replace")
    lines = text.split("\n")
    return Tail(lines[1:] if start and len(lines) > 1 else lines, start > 0)


def first_cause(found: Mapping[Path, Diagnosis]) -> Path | None:
    """Whose log holds the first cause: no victim's, the surest kind of line first, then the earliest if both say when.

    Args:
        found: the diagnosis of each rank's log.

    Returns:
        None if all are victims, or no log says anything.
    """
    rules = {rule.name: rule for rule in book().rules}
    own = {path: diagnosis for path, diagnosis in found.items() if diagnosis.rule and not diagnosis.victim}
    if not own:
        return None
    order = {path: rules[diagnosis.rule].order for path, diagnosis in own.items()}
    best = [path for path in own if order[path] == min(order.values())]
    stamps = {path: _stamp(own[path].line) for path in best}
    if all(stamps.values()):
        return min(best, key=lambda path: stamps[path])
    return max(best, key=lambda path: own[path].confidence)


def _stamp(line: str) -> str:
    """The time in a line, so that the earlier one is the lower; "" if it has none."""
    found = _STAMP.search(line)
    return "" if found is None else "".join(found.group(1, 2, 3, 4)) + "." + (found[5] or "0")
