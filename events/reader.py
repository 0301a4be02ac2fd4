"""Reading a run's event log: all files merged by time, torn lines reported, unknown kinds kept.

Order: within one file the writer's order always stands; between files of one host the monotonic clock
decides, and between hosts the wall clock (each host's monotonic clock is turned into wall time by the
offset its own lines show).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import msgspec

from lightkeeper.errors import RunFolderError
from lightkeeper.events.schema import KINDS, SCHEMA_VERSION, Event, Unknown

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(reduce(or_, KINDS))
_HEADER = ("run", "job", "process", "group", "incarnation", "host")


@dataclass(frozen=True)
class Torn:
    """A line that is no JSON: cut short by a kill or a full disk."""

    file: Path
    line: int
    text: str


@dataclass
class RunLog:
    """A run's events in order, and the lines that could not be read."""

    events: list[Event] = field(default_factory=list)
    torn: list[Torn] = field(default_factory=list)


def decode(line: bytes) -> Event:
    """One line as an event; what this version does not know comes back as `Unknown`.

    Raises:
        ValueError: the line is no JSON object.
    """
    try:
        event = _decoder.decode(line)
        if event.v <= SCHEMA_VERSION:
            return event
    except msgspec.ValidationError:
        pass
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    raw = msgspec.json.decode(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return _unknown(raw)


def _unknown(raw: dict[str, Any]) -> Unknown:
    def number(name: str) -> Any:
        value = raw.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0

    texts: dict[str, Any] = {name: str(raw.get(name) or "") for name in _HEADER}
    whole: dict[str, Any] = {name: int(number(name)) for name in ("v", "pid", "mono_ns", "seq")}
    kind = str(raw.get("kind") or "")
    return Unknown(name=kind, raw=raw, wall=float(number("wall")), **whole, **texts)


def events_folder(run: str | Path) -> Path:
    """`<run>/events`; `run` may also be that folder itself.

    Raises:
        RunFolderError: there is no event log.
    """
    folder = Path(run)
    for candidate in (folder / "events", folder):
        if candidate.is_dir() and (candidate.name == "events" or any(candidate.glob("*.jsonl"))):
            return candidate
    raise RunFolderError(f"no event log in {folder} (expected {folder / 'events'}/*.jsonl)")


def read_run(run: str | Path) -> RunLog:
    """Read all event files of a run folder.

    Args:
        run: the run's folder (or its `events` folder).

    Returns:
        Events merged by time, and torn lines.

    Raises:
        RunFolderError: there is no event log.
    """
    log = RunLog()
    for path in sorted(events_folder(run).glob("*.jsonl")):
        tail = _Tail(path)
        log.events.extend(tail.read(final=True))
        log.torn.extend(tail.torn)
    log.events = in_order(_of_its_groups(log.events))
    return log


def _of_its_groups(events: list[Event]) -> list[Event]:
    """Without what a lighthouse said of other jobs than those whose groups wrote here: it may serve several."""
    jobs = {event.job for event in events if event.process != "lighthouse"}
    if not jobs:
        return events
    return [event for event in events if event.process != "lighthouse" or event.job in ("", *jobs)]


def in_order(events: list[Event]) -> list[Event]:
    """Merge events of many files by time; one file's own order is never changed."""
    offsets: dict[str, float] = {}
    for event in events:
        offset = event.wall - event.mono_ns / 1e9
        offsets[event.host] = max(offsets.get(event.host, offset), offset)
    return sorted(events, key=lambda e: (e.mono_ns / 1e9 + offsets[e.host], e.process, e.pid, e.seq))


def seconds_between(earlier: Event, later: Event) -> float:
    """Seconds from one event to another: monotonic on one host, wall clock between hosts."""
    if earlier.host == later.host:
        return (later.mono_ns - earlier.mono_ns) / 1e9
    return later.wall - earlier.wall


def follow(
    run: str | Path,
    *,
    stop: Callable[[], bool],
    poll_s: float = 0.05,
    from_start: bool = True,
) -> Iterator[Event | None]:
    """Yield events as they are written, and None whenever there is nothing new (so that a view can redraw).

    Args:
        run: the run's folder; it need not exist yet.
        stop: asked when nothing new was found; True ends the iteration after one last look.
        poll_s: pause between looks, seconds.
        from_start: also yield what is there already.
    """
    tails: dict[Path, _Tail] = {}
    if not from_start:
        for path in _files(run):
            tails[path] = _Tail(path)
            list(tails[path].read())
    while True:
        stopping = stop()
        fresh: list[Event] = []
        for path in _files(run):
            tail = tails.setdefault(path, _Tail(path))
            fresh.extend(tail.read(final=stopping))
        yield from in_order(fresh)
        if stopping and not fresh:
            return
        if not fresh:
            yield None
            time.sleep(poll_s)


def _files(run: str | Path) -> list[Path]:
    try:
        return sorted(events_folder(run).glob("*.jsonl"))
    except RunFolderError:
        return []


class _Tail:
    """One file, read from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn: list[Torn] = []
        self._offset = 0
        self._line = 0

    def read(self, final: bool = False) -> list[Event]:
        """New events. A last line without its line break is left for later, unless `final`."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        *whole, rest = data.split(b"\n")
        self._offset += len(data) - len(rest)
        events = [event for line in whole if (event := self._decode(line)) is not None]
        if final and rest:
            self._offset += len(rest)
            event = self._decode(rest)
            events += [event] if event is not None else []
        return events

    def _decode(self, line: bytes) -> Event | None:
        self._line += 1
        if not line.strip():
            return None
        try:
            return decode(line)
        except ValueError:
            self.torn.append(Torn(self.path, self._line, line[:200].decode("utf-8", "replace")))
            return None
