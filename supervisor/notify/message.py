"""What a person is told. Pure: a frozen message in, texts out; every text has a limit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightkeeper.words import shown

# What may have happened, and how it is said in a subject.
WHAT = {
    "finished": "finished",
    "failed": "failed",
    "stalled": "makes no progress",
    "goes_on": "goes on",
    "crash_loop": "fails again and again, and was stopped",
    "budget": "has used up its restarts",
    "quorum_lost": "has too few groups, for long",
    "no_lighthouse": "has no lighthouse, for long",
    "quarantine": "has lost a node to quarantine",
}
LINES_MAX, LINE_CHARS_MAX = 30, 300
SUMMARY_CHARS_MAX, CAUSE_CHARS_MAX, PLACE_CHARS_MAX, NAME_CHARS_MAX = 1000, 1000, 500, 100


@dataclass(frozen=True)
class Message:
    """One thing that happened.

    Attributes:
        what: one of `WHAT`.
        job: whose name the person knows.
        summary: what happened, in one line.
        run: the run's folder.
        cause: the classified cause, in words; "" if none is known.
        evidence: folder in which what speaks for it was kept.
        lines: the last lines that were printed.
        host: where it was seen.
        wall: when, in seconds since 1970.
    """

    what: str
    job: str
    summary: str
    run: str = ""
    cause: str = ""
    evidence: str = ""
    lines: tuple[str, ...] = ()
    host: str = ""
    wall: float = 0.0

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise ValueError(f"no {self.what!r} can happen (there are: {', '.join(WHAT)})")
        limits = {"job": NAME_CHARS_MAX, "summary": SUMMARY_CHARS_MAX, "cause": CAUSE_CHARS_MAX}
        for name in ("run", "evidence", "host"):
            limits[name] = PLACE_CHARS_MAX
        for name, chars_max in limits.items():
            object.__setattr__(self, name, shown(" ".join(getattr(self, name).split()), chars_max))
        object.__setattr__(self, "lines", last_lines(self.lines))

    @property
    def subject(self) -> str:
        """``job a: makes no progress``, for a mail's subject and a log."""
        return f"job {self.job}: {WHAT[self.what]}"

    @property
    def text(self) -> str:
        """The whole message for a person, in plain text."""
        named = (("cause", self.cause), ("run", self.run), ("evidence", self.evidence), ("seen on", self.host))
        head = [f"{self.subject}: {self.summary}", *(f"{name}: {value}" for name, value in named if value)]
        return "\n".join([*head, *(["last lines:", *(f"  {line}" for line in self.lines)] if self.lines else [])])

    @property
    def json(self) -> str:
        """One JSON object with all fields, and `text`, which chat services show."""
        return json.dumps({"text": self.text, "subject": self.subject, **asdict(self)})


def last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines that say something, each fit for a terminal."""
    said = [shown(line.rstrip().expandtabs(4), LINE_CHARS_MAX) for line in lines if line.strip()]
    return tuple(said[-LINES_MAX:])
