"""Events for people: one line each, header first, then whatever the event holds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from lightkeeper.events import lineage, summary
from lightkeeper.events.schema import Event, FaultInjected, Unknown, kind_of

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


def summary_lines(events: Sequence[Event]) -> tuple[list[str], bool]:
    """Every rule over the run, one line each: holds or not, its figure, and why not.

    Rules that ask about an injected fault do not apply (n/a) to a run without one; of a run that goes on only the
    steps that all members have committed are looked at, and what only its end can show is n/a.

    Returns:
        The lines, and whether every rule that applies holds.
    """
    faulty, ended = bool(lineage.pick(events, FaultInjected)), lineage.has_ended(events)
    settled = None if ended else lineage.settled_steps(events)
    lines = [] if ended else [_row("the run", "", "", f"has not ended; {settled} steps are settled")]
    lines.append(_row("groups lost", "", "", _lost(events)))
    rules: dict[str, summary.Finding | str] = {
        "detected after (s)": summary.detected_after(events) if faulty else "no fault was injected",
        "steps lost": summary.steps_lost(events),
        "microbatches recomputed by survivors": summary.recomputed_by_survivors(events),
        "samples consumed exactly once": summary.samples_exactly_once(events, settled),
        "fingerprints equal": _fingerprints(events, ended),
        "one lineage": summary.one_lineage(events),
        "only hit groups blamed": summary.blamed(events) if faulty else "no fault was injected",
        "goodput": summary.goodput(events),
    }
    for name, found in rules.items():
        if isinstance(found, str):
            lines.append(_row(name, "n/a", "", found))
            continue
        figure = "" if found.value is None else f"{found.value:.4g}"
        lines.append(_row(name, "yes" if found.holds else "no", figure, found.why))
    for stall in summary.stalls(events):
        lines.append(_row(f"stood: {stall.group}", "", "", f"{stall.stood_s:.4g} s in step {stall.step}"))
    lines += [_row(f"rejoined: {rejoin.group}", "", "", rejoin_in_words(rejoin)) for rejoin in summary.rejoins(events)]
    return lines, all(isinstance(found, str) or found.holds for found in rules.values())


def rejoin_in_words(rejoin: summary.Rejoin) -> str:
    """`at step 90, 9.8 s after its new start, with 3.1 MiB at 250 MiB/s and 4 entries replayed`."""
    mib = rejoin.bytes / (1 << 20)
    rate = "" if rejoin.bytes_per_s is None else f" at {rejoin.bytes_per_s / (1 << 20):,.0f} MiB/s"
    text = f"at step {rejoin.step}, {rejoin.after_s:.1f} s after {rejoin.since}, with {mib:.1f} MiB{rate}"
    return f"{text} and {rejoin.replayed} entries replayed"


def _lost(events: Sequence[Event]) -> str:
    if not any(event.process == "lighthouse" for event in events):
        return "n/a: the lighthouse, which says so, did not write into this folder (give it the same --run-folder)"
    return summary.lost_in_words(events) or "none"


def _fingerprints(events: Sequence[Event], ended: bool) -> summary.Finding | str:
    found = summary.fingerprints_equal(events)
    open_end = found.why.startswith("at the end: ") and not ended
    if not open_end:
        return found
    return "equal so far; the run has not ended" if found.value else "none so far; the run has not ended"


def _row(name: str, verdict: str, figure: str, text: str) -> str:
    return f"{name:<40} {verdict:<4} {figure:<8} {text}".rstrip()
