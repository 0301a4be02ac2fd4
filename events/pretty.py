"""Events for people: one line each, header first, then whatever the event holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lightkeeper.events import ending, lineage, summary
from lightkeeper.events.of_checkpoints import CheckpointFailed, CheckpointLoaded, CheckpointSaved
from lightkeeper.events.reader import Torn
from lightkeeper.events.schema import Event, FaultInjected, Finished, Parked, Promoted, Unknown, kind_of
from lightkeeper.words import counted, shown

TEXT_CHARS_MAX, LINE_CHARS_MAX = 1000, 20_000  # of one value, and of all that an event holds
ROW_CHARS_MAX, TORN_CHARS_MAX = 2000, 60
TORN_FILES_MAX = 10

_TOO_EARLY = ("no step was committed", "no live commit was recorded", "fewer than two commits")
_HEADER = {field.name for field in msgspec.structs.fields(Event)}


def line(event: Event) -> str:
    """`12:00:01.250 rank g2/0  committed  step=4 epoch=2 ...`; fields at their defaults are left out."""
    stamp = time.strftime("%H:%M:%S", time.localtime(event.wall)) + f".{int(event.wall % 1 * 1000):03d}"
    about = f" {event.group}" if event.group and event.group not in event.process else ""
    told = f"{stamp} {event.process:<14}{about} {kind_of(event):<16} {' '.join(_fields(event))}".rstrip()
    return shown(told, LINE_CHARS_MAX)


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
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"  # a count is shown whole
    if isinstance(value, str):
        first = value.strip().splitlines()[0] if value.strip() else ""
        cut = first if len(first) <= TEXT_CHARS_MAX else first[: TEXT_CHARS_MAX - 3] + "..."
        return repr(cut) if " " in first or first != value else cut
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

    Rules that ask about an injected fault do not apply (n/a) to a run without one; of a run that has not finished only
    the steps that all members have committed are looked at, and what only its end can show is n/a. Of several runs in
    the folder the last one is judged.

    Returns:
        The lines, and whether every rule that applies holds and the run did not end without finishing.
    """
    events, starts = ending.newest_run(events)
    end = ending.ending(events)
    faulty = bool(lineage.pick(events, FaultInjected))
    settled = None if end.finished else lineage.settled_steps(events)
    lines = []
    if starts > 1:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(events[0].wall))
        lines.append(
            _row("runs", "", "", f"the job began {starts} times in this folder; judged: since the last, {since}")
        )
    if not end.finished:
        text = f"{end.words or 'has not ended'}; {settled} steps are settled"
        lines.append(_row("the run", "" if end.well else "no", "", text))
    lines.append(_row("groups lost", "", "", _lost(events, end.broken_off)))
    lines += _benched(events) + _checkpoints(events)
    rules: dict[str, summary.Finding | str] = {
        "detected after (s)": summary.detected_after(events) if faulty else "no fault was injected",
        "steps lost": summary.steps_lost(events),
        "microbatches recomputed by survivors": summary.recomputed_by_survivors(events),
        "samples consumed exactly once": summary.samples_exactly_once(events, settled),
        "fingerprints equal": _fingerprints(events, end),
        "one lineage": summary.one_lineage(events),
        "only hit groups blamed": summary.blamed(events) if faulty else "no fault was injected",
        "goodput": summary.goodput(events),
    }
    if not end.finished:
        rules = {name: _nothing_yet(found, " so far") for name, found in rules.items()}
    elif _had_nothing_to_do(events):
        why = ": the run was at its end when it was resumed"
        rules = {name: _nothing_yet(found, why) for name, found in rules.items()}
    for name, found in rules.items():
        if isinstance(found, str):
            lines.append(_row(name, "n/a", "", found))
            continue
        figure = "" if found.value is None else _text(float(found.value))
        lines.append(_row(name, "yes" if found.holds else "no", figure, found.why))
    for stall in summary.stalls(events):
        lines.append(_row(f"stood: {stall.group}", "", "", f"{stall.stood_s:.4g} s in step {stall.step}"))
    for rejoin in summary.rejoins(events):
        how = "rejoined" if rejoin.again else "came in"
        lines.append(_row(f"{how}: {rejoin.group}", "", "", rejoin_in_words(rejoin)))
    return lines, end.well and all(isinstance(found, str) or found.holds for found in rules.values())


def _benched(events: Sequence[Event]) -> list[str]:
    """Spares that were promoted, and groups that were parked; nothing of a run without them."""
    lines = []
    if promoted := lineage.pick(events, Promoted):
        told = ", ".join(f"{event.group} (step {event.step})" for event in promoted)
        lines.append(_row("spares promoted", "", str(len(promoted)), told))
    if parked := lineage.pick(events, Parked):
        names = sorted({event.group for event in parked})
        lines.append(_row("groups parked", "", str(len(names)), ", ".join(names)))
    return lines


def _checkpoints(events: Sequence[Event]) -> list[str]:
    """What was saved and loaded; nothing of a run without checkpoints."""
    told = []
    if loaded := lineage.pick(events, CheckpointLoaded):
        told.append(f"begun at step {loaded[0].step}")  # whoever came later loaded what was the newest then
    if saved := lineage.pick(events, CheckpointSaved):
        newest = max(saved, key=lambda event: event.step)
        size = f"{newest.bytes / (1 << 20):.1f} MiB in {newest.write_s:.1f} s"
        told.append(f"the newest of step {newest.step} ({newest.tier}, {size})")
    if failed := lineage.pick(events, CheckpointFailed):
        told.append(f"{counted(len(failed), 'save')} failed or late, last: {failed[-1].reason}")
    return [_row("checkpoints saved", "", str(len(saved)), "; ".join(told))] if told else []


def rejoin_in_words(rejoin: summary.Rejoin) -> str:
    """`at step 90, 9.8 s after its new start, with 3.1 MiB at 250 MiB/s and 4 entries replayed`."""
    mib = rejoin.bytes / (1 << 20)
    rate = "" if rejoin.bytes_per_s is None else f" at {rejoin.bytes_per_s / (1 << 20):,.0f} MiB/s"
    text = f"at step {rejoin.step}, {rejoin.after_s:.1f} s after {rejoin.since}, with {mib:.1f} MiB{rate}"
    return f"{text} and {rejoin.replayed} entries replayed"


def _lost(events: Sequence[Event], broken_off: Sequence[str]) -> str:
    told = [f"{group} (its log breaks off)" for group in broken_off]
    if not any(event.process == "lighthouse" for event in events):
        told.append(
            "n/a: the lighthouse, which says so, did not write into this folder (give it the same --run-folder; if it "
            "serves several jobs, copy its events/lighthouse-*.jsonl into this folder's events)"
        )
    if lost := summary.lost_in_words(events):
        told.append(lost)
    return ", ".join(told) or "none"


def _fingerprints(events: Sequence[Event], end: ending.Ending) -> summary.Finding | str:
    found = summary.fingerprints_equal(events)
    open_end = found.why.startswith("at the end: ") and not end.finished
    if not open_end:
        return found
    return (
        f"{'equal' if found.value else 'none'} so far; the run {'was not finished' if end.ended else 'has not ended'}"
    )


def _nothing_yet(found: summary.Finding | str, when: str) -> summary.Finding | str:
    """A run that has only begun, or had nothing left to do, breaks no rule by what it has not done."""
    return f"{found.why}{when}" if isinstance(found, summary.Finding) and found.why in _TOO_EARLY else found


def _had_nothing_to_do(events: Sequence[Event]) -> bool:
    first = lineage.lineage(events).first_step
    return first > 0 and all(event.step == first for event in lineage.pick(events, Finished))


def _row(name: str, verdict: str, figure: str, text: str) -> str:
    return shown(f"{name:<40} {verdict:<4} {figure:<8} {text}".rstrip(), ROW_CHARS_MAX)


def torn_lines(torn: Sequence[Torn]) -> list[str]:
    """`rank-g0-0.jsonl line 4 is torn: {"kind":"comm`; of a file with many, such as a foreign one, one line in all."""
    by_file: dict[Path, list[Torn]] = {}
    for one in torn:
        by_file.setdefault(one.file, []).append(one)
    told = []
    for path, own in list(by_file.items())[:TORN_FILES_MAX]:
        lines = (
            f"line {own[0].line} is torn" if len(own) == 1 else f"{len(own)} lines are torn, first line {own[0].line}"
        )
        told.append(f"{shown(path.name)} {lines}: {shown(own[0].text, TORN_CHARS_MAX)}")
    if len(by_file) > TORN_FILES_MAX:
        told.append(f"torn lines in {counted(len(by_file) - TORN_FILES_MAX, 'more file')}")
    return told
