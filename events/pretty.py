"""Events for people: one line each, header first, then whatever the event holds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from lightkeeper.events import summary
from lightkeeper.events.schema import Event, Unknown, kind_of

_HEADER = {field.name for field in msgspec.structs.fields(Event)}


def line(event: Event) -> str:
    """`12:00:01.250 rank g2/0  committed  step=4 epoch=2 ...`; fields at their defaults are left out."""
    stamp = time.strftime("%H:%M:%S", time.localtime(event.wall)) + f".{int(event.wall % 1 * 1000):03d}"
    about = f" {event.group}" if event.group and event.group not in event.process else ""
    return f"{stamp} {event.process:<14}{about} {kind_of(event):<16} {' '.join(_fields(event))}".rstrip()


def _fields(event: Event) -> list[str]:
    if isinstance(event, Unknown):
        return [f"{name}={_text(value)}" for name, value in event.raw.items() if name not in (*_HEADER, "kind")]
    shown = []
    for field in msgspec.structs.fields(type(event)):
        value = getattr(event, field.name)
        if field.name in _HEADER or (not field.required and value in (field.default, (), {}, "", None)):
            continue
        shown.append(f"{field.name}={_text(value)}")
    return shown


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        first = value.strip().splitlines()[0] if value.strip() else ""
        return repr(first) if " " in first or first != value else value
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(part) for part in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(part)}" for name, part in value.items()) + "}"
    return str(value)


def json_line(event: Event) -> str:
    """The event as it stands in the file; an unknown one as it stood there."""
    return msgspec.json.encode(event.raw if isinstance(event, Unknown) else event).decode()


def summary_lines(events: Sequence[Event]) -> list[str]:
    """Every rule over the run, one line each: holds or not, its figure, and why not."""
    rules = {
        "detected after (s)": summary.detected_after,
        "steps lost": summary.steps_lost,
        "microbatches recomputed by survivors": summary.recomputed_by_survivors,
        "samples consumed exactly once": summary.samples_exactly_once,
        "fingerprints equal": summary.fingerprints_equal,
        "one lineage": summary.one_lineage,
        "only hit groups blamed": summary.blamed,
        "goodput": summary.goodput,
    }
    lines = []
    for name, rule in rules.items():
        found = rule(events)
        figure = "" if found.value is None else f"{found.value:.4g}"
        lines.append(f"{name:<40} {'yes' if found.holds else 'no':<4} {figure:<8} {found.why}".rstrip())
    for stall in summary.stalls(events):
        lines.append(f"{'stood: ' + stall.group:<40} {'':<4} {stall.stood_s:.4g} s in step {stall.step}")
    return lines
