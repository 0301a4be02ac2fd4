"""One incident's folder, with a size budget: what does not fit, or did not come, is said and never dropped silently."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from lightkeeper.events.schema import Evidence

INCIDENT_BYTES_MAX = 32 << 20
RUN_BYTES_MAX = 512 << 20
INCIDENTS_MAX = 1000  # folders of a run
INCIDENTS = "incidents"


def folder_name(wall: float, group: str, step: int, why: str) -> str:
    """``20261130T102345Z-g0-step7-killed``: sorts by time, in UTC."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall))
    return f"{stamp}-{group}-step{step}-{re.sub(r'[^a-z0-9]+', '-', why.lower()).strip('-') or 'lost'}"


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder, 0 if there is none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


@dataclass
class Incident:
    """One incident.

    Attributes:
        run_folder: the run's folder.
        name: of the incident's folder, below `INCIDENTS`.
        reason: what happened, in words.
        taken: size in bytes by what was kept.
        missing: by what there is none of, why.
        recorder: what the comparison of the flight recorders' dumps says.
        log_class: what the last lines of the logs say of the cause.
    """

    run_folder: Path
    name: str
    reason: str
    bytes_max: int = INCIDENT_BYTES_MAX
    run_bytes_max: int = RUN_BYTES_MAX
    taken: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    recorder: str = ""
    log_class: str = ""
    _room: int = 0
    _made: bool = False
    _given_up: bool = False
    _refused: str = ""  # why the first thing was not kept

    @property
    def path(self) -> Path:
        """The folder."""
        return self.run_folder / INCIDENTS / self.name

    def make(self, joint: bool = False) -> bool:
        """Makes the folder; whether there is one now. If there is not, `missing` says why.

        Args:
            joint: several processes may write into one folder of this name; else another name is taken.
        """
        above = self.path.parent
        try:
            above.mkdir(exist_ok=True)
            if len(os.listdir(above)) >= INCIDENTS_MAX:
                self.missing["folder"] = f"{above} holds {INCIDENTS_MAX} incidents already"
                return False
            self._make(joint)
        except OSError as error:
            self.missing["folder"] = f"{error.filename or above}: {error.strerror or error}"
            return False
        of_run = self.run_bytes_max - bytes_below(above)
        self._room, self._made = min(self.bytes_max - bytes_below(self.path), of_run), True
        if of_run <= 0:
            self.missing["folder"] = f"the incidents of this run fill their {self.run_bytes_max} bytes"
        return True

    def _make(self, joint: bool) -> None:
        name = self.name
        for number in range(2, 100):
            try:
                self.path.mkdir()
                return
            except FileExistsError:
                if joint:
                    return
                self.name = f"{name}-{number}"
        raise FileExistsError(f"{name} is there a hundred times")

    def put(self, what: str, data: bytes, suffix: str = ".txt") -> bool:
        """Keeps something, as a whole or not at all; whether it was kept."""
        if not self._made:
            return self._refuse(what, "there is no folder for it")
        if len(data) > self._room:
            return self._refuse(what, f"{len(data)} bytes do not fit into the {max(0, self._room)} that are left")
        path = self.path / f"{what}{suffix}"
        try:
            with open(path, "xb") as file:
                file.write(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            return self._refuse(what, error.strerror or str(error))
        self._room -= len(data)
        self.taken[what] = len(data)
        return True

    def _refuse(self, what: str, why: str) -> bool:
        self.missing[what] = why
        self._refused = self._refused or why
        return False

    def given_up(self, why: str) -> None:
        """Nobody waits for the storage any more; but a thread may still write, so the folder is named all the same."""
        self.missing["folder"], self._given_up = why, True

    @property
    def named(self) -> str:
        """The folder as it stands below the run's; empty if there is none."""
        return f"{INCIDENTS}/{self.name}" if self._made or self._given_up else ""

    def kept_in_words(self) -> str:
        """The folder; where nothing was kept, or nobody knows, also why."""
        why = self.missing.get("folder") or self._refused
        if self._given_up:
            return f"{self.named}, perhaps not all: {why}"
        if self.taken:
            return self.named
        return f"nothing{f' in {self.named}' if self.named else ''}: {why}"

    def event(self, seconds: float) -> Evidence:
        """What the event log is told, as of now: a thread that was given up may still write."""
        return Evidence(
            folder=self.named, reason=self.reason, taken=dict(self.taken), missing=dict(self.missing),
            seconds=round(seconds, 3), recorder=self.recorder, log_class=self.log_class,
        )  # fmt: skip
