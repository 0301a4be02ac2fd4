"""A log's lines without what launchers, loggers, kernels and terminals put around them.

`[rank3]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog` is the line `[Rank 3] Watchdog` of rank 3, so
that a rule sees the same text whoever printed it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

CHARS_MAX = 2000  # of one line: a longer one keeps its beginning and its end
PARTS_MAX = 50  # of one line between carriage returns: of a progress bar the last are kept
PREFIXES_MAX = 6

_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]"
)
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[?(?:(?:[Rr]ank|default|trainer|worker|local_rank|GPU)[ _:=]?(?P<rank>\d+))\](?:\[[^\]]{1,20}\])?:? ?",
        r"[Rr]ank (?P<rank>\d+):[ \t]",
        r"std(?:err|out): ?",
        r"\d+(?:\.\d+)?s\t\d+\t",  # Kaggle
        r"(?P<rank>\d{1,5}): ",  # srun --label
        r"\[\d+,(?P<rank>\d+)\]<std\w+>: ?",  # mpirun --tag-output
        r"\[(?P<level>[EWIF]) ?\d{3,4} \d\d:\d\d:\d\d[.\d]* [\w./]+:\d+\] ",  # c10
        r"\[(?P<level>[EWIF]) [\w./]+:\d+\] ",
        r"(?P<level>[EWIF])\d{4} \d\d:\d\d:\d\d[.\d]* +[^\]]{1,160}\] ",  # torchelastic
        r"\[[a-z][\w.-]{0,30}\] (?=\[?\d{4}-\d\d-\d\d)",  # a program's name
        r"\[?\d{4}[-/]\d\d[-/]\d\d[T ,_]+\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
        r"(?: +std(?:out|err) [FP])?[ \t,:|-]*",
        r"[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d [\w.-]+ [\w./-]+(?:\[\d+\])?: ",  # syslog
        r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4}\] ",  # dmesg -T
        r"\[ *\d+\.\d{3,}\] ",  # dmesg
        r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?[ \t:|-]+",
        r"\(\w[\w.]* pid=\d+(?:, ip=[\w.:]+)?\)[ \t]?",  # Ray
        # a host, a pod: an exception has a capital
        r"\[?[a-z][a-z0-9_.-]{0,60}\d[a-z0-9_.-]{0,60}(?:/[a-z0-9_.-]{1,60}){0,4}\]? ?[:|] ",
        r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):[a-z_][a-z0-9_.]*: ?",  # Python's logging by default
        r"(?:\[?[\w.]+(?::\d+)?\]?[ \t:|-]+){0,3}?(?<!NCCL )\[?"
        r"(?P<level>DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b\]?[ \t]*(?:[:|\]-]+ ?)?",
    )
)
_QUIET = re.compile(r"\b(?:\w*Warning|warning|WARNING): |^(?:DEBUG|INFO|WARNING)\b| - (?:DEBUG|INFO|WARNING) - ")
_QUIET_LEVELS = ("D", "I", "W")


@dataclass(frozen=True)
class Line:
    """One line of a log.

    Attributes:
        number: counted from 1; the parts of a progress bar share it.
        text: without prefixes; its own indentation is kept.
        raw: as it stands in the log, without the terminal's codes.
        rank: whose it is, if its prefix says so.
        quiet: whether it was logged as information or as a warning.
    """

    number: int
    text: str
    raw: str
    rank: int | None = None
    quiet: bool = False


def clean(lines: Iterable[str]) -> Iterator[Line]:
    """Every line, and every part of one that was overwritten on the terminal."""
    for number, line in enumerate(lines, 1):
        parts = [part for part in line.rstrip("\r\n").split("\r") if part.strip()]
        for part in parts[-PARTS_MAX:]:
            yield _line(number, part)


def _line(number: int, part: str) -> Line:
    raw = _TERMINAL.sub("", part)
    if len(raw) > CHARS_MAX:
        raw = raw[: CHARS_MAX // 2] + " ... " + raw[-CHARS_MAX // 2 :]
    text, rank, level = raw, None, ""
    for _ in range(PREFIXES_MAX):
        found = next((match for pattern in _PREFIXES if (match := pattern.match(text))), None)
        if found is None or not found.end():
            break
        groups = found.groupdict()
        rank = int(groups["rank"]) if groups.get("rank") is not None and rank is None else rank
        level = groups.get("level") or level
        text = text[found.end() :]
    quiet = level.startswith(_QUIET_LEVELS) or bool(_QUIET.search(text))
    return Line(number, text, raw.strip(), rank, quiet)
