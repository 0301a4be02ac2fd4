"""The lighthouse's log: terms, epoch numbers and memberships, fsynced before they are spoken of.

One JSON object a line. The file is locked while a lighthouse reigns by it; a copy of it is not the log.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from lightkeeper.lighthouse.actions import Activated, Ended, Promised, Record, Superseded
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term


class LogError(RuntimeError):
    """The log cannot be used; the message says why and what to do."""


@dataclass
class JobHistory:
    """What the log knows of a job.

    Attributes:
        broken_off: newest epoch of a job that ended before its last step: nobody goes on from it, or from one below.
        reigns: whether no other lighthouse is known to have been obeyed since the newest membership was logged.
    """

    highest: int = 0
    membership: Membership | None = None
    prepared: list[Membership] = field(default_factory=list)
    reigns: bool = True
    broken_off: Epoch | None = None

    def copy(self) -> JobHistory:
        """The same, to be changed apart from this one."""
        return replace(self, prepared=list(self.prepared))

    def apply(self, record: Record) -> None:
        """Takes one record in."""
        if isinstance(record, Promised):
            self.highest = max(self.highest, record.number)
            if record.planned is not None:
                self.prepared.append(record.planned)
        elif isinstance(record, Superseded):
            self.reigns = False
        elif isinstance(record, Activated):
            self.membership, self.reigns = record.membership, True
            self.highest = max(self.highest, record.membership.epoch.number)
            self.prepared = [p for p in self.prepared if p.base == record.membership.epoch]
        else:
            if self.membership is not None and not record.ok:
                self.broken_off = self.membership.epoch
            self.membership, self.prepared, self.reigns = None, [], True


class LighthouseLog:
    """Opens (or creates) the log in a folder, starts a new term in it and appends records.

    Args:
        folder: the log's folder; None keeps everything in memory, so that a restart knows nothing.

    Raises:
        LogError: if the folder cannot be written, another lighthouse holds it, or a line in it is not readable.
    """

    def __init__(self, folder: Path | None) -> None:
        self.jobs: dict[str, JobHistory] = {}
        self._file: TextIO | None = None
        number, lighthouse = 0, secrets.token_hex(4)
        if folder is not None:
            path = folder / "lighthouse.log"
            self._file = self._open(path)
            for record in self._read(path):
                if record["kind"] == "term":
                    number, lighthouse = record["number"], record["lighthouse"]
                else:
                    self.jobs.setdefault(record["job"], JobHistory()).apply(_decode(record))
        self.term = Term(number, lighthouse)
        self.rise(number + 1)

    def rise(self, number: int) -> Term:
        """Starts a higher term of this lighthouse, fsynced."""
        self.term = Term(number, self.term.lighthouse)
        self._write({"kind": "term", "number": number, "lighthouse": self.term.lighthouse})
        return self.term

    def append(self, job: str, record: Record) -> None:
        """Takes a record in and returns when it is on disk."""
        self.jobs.setdefault(job, JobHistory()).apply(record)
        self._write({"job": job, **_encode(record)})

    def close(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def _open(path: Path) -> TextIO:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise LogError(f"cannot write the lighthouse log {path}: {error.strerror}; give another --log") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise LogError(f"another lighthouse holds the log {path}; stop it or give another --log") from error
        return file

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        data = path.read_bytes()
        records = []
        offset = 0
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):  # torn by a crash while it was written: it was never spoken of
                os.truncate(path, offset)
                break
            try:
                record = json.loads(line)
                if record["kind"] == "term":
                    _term_in(record["number"], record["lighthouse"])
                else:
                    _decode(record)
            except (ValueError, KeyError, TypeError) as error:
                raise LogError(f"{path} is damaged at byte {offset}; move it away to start without it") from error
            offset += len(line)
            records.append(record)
        return records

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LogError(f"cannot write the lighthouse log {self._file.name}: {error.strerror}") from error


def _encode(record: Record) -> dict[str, Any]:
    if isinstance(record, Promised):
        planned = None if record.planned is None else _membership_out(record.planned)
        return {"kind": "promised", "number": record.number, "planned": planned}
    if isinstance(record, Activated):
        return {"kind": "activated", "membership": _membership_out(record.membership)}
    if isinstance(record, Superseded):
        return {"kind": "superseded"}
    return {"kind": "ended", "reason": record.reason, "ok": record.ok}


def _decode(raw: dict[str, Any]) -> Record:
    if raw["kind"] == "promised":
        return Promised(_number(raw["number"]), None if raw["planned"] is None else _membership_in(raw["planned"]))
    if raw["kind"] == "activated":
        return Activated(_membership_in(raw["membership"]))
    if raw["kind"] == "ended":
        return Ended(raw["reason"], raw.get("ok", False) is True)
    if raw["kind"] == "superseded":
        return Superseded()
    raise LogError(f"the lighthouse log holds a record of kind {raw['kind']!r}, which this version does not know")


def _epoch_out(epoch: Epoch) -> list[Any]:
    return [epoch.number, epoch.term.number, epoch.term.lighthouse]


def _epoch_in(raw: list[Any]) -> Epoch:
    return Epoch(_number(raw[0]), _term_in(raw[1], raw[2]))


def _term_in(number: Any, lighthouse: Any) -> Term:
    if not isinstance(lighthouse, str):
        raise TypeError(f"{lighthouse!r} is no lighthouse's name")
    return Term(_number(number), lighthouse)


def _number(raw: Any) -> int:
    if type(raw) is not int:
        raise TypeError(f"{raw!r} is no number")
    return raw


def _membership_out(membership: Membership) -> dict[str, Any]:
    return {
        "epoch": _epoch_out(membership.epoch),
        "base": None if membership.base is None else _epoch_out(membership.base),
        "members": [[m.group, m.incarnation, m.manager, list(m.ranks)] for m in membership.members],
    }


def _membership_in(raw: dict[str, Any]) -> Membership:
    members = tuple(
        Member(group, incarnation, manager, tuple(ranks)) for group, incarnation, manager, ranks in raw["members"]
    )
    base = None if raw["base"] is None else _epoch_in(raw["base"])
    return Membership(_epoch_in(raw["epoch"]), members, base)
