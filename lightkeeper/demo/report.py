"""The table at the end: every line is a rule over the event log, and the exit code is all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lightkeeper.demo.options import DemoOptions
from lightkeeper.events import lineage, summary
from lightkeeper.events.reader import seconds_between
from lightkeeper.events.schema import Committed, Event, FaultInjected, ProcessEnded, ProcessStarted, Recovered

LOSS_TOLERANCE = 0.01  # nats; the order of summation differs once the members do
REJOIN_S_MAX = 60.0  # a run that went on for longer than this after the restart was not too short to come back
FAULT_WORDS = {"kill": "SIGKILL", "freeze": "SIGSTOP"}


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: what was asked.
        text: the answer in words.
        holds: whether it is as it must be; None: only told.
    """

    name: str
    text: str
    holds: bool | None


@dataclass
class Report:
    """The outcome of a demo.

    Attributes:
        lines: the table.
        figures: the same as figures, for `--json`.
    """

    lines: list[Line] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every check holds."""
        return all(line.holds is not False for line in self.lines)

    def add(self, name: str, text: str, holds: bool | None, **figures: Any) -> None:
        """Add a line and its figures."""
        self.lines.append(Line(name, text, holds))
        self.figures.update(figures)

    def as_dict(self) -> dict[str, Any]:
        """One JSON object."""
        failed = {line.name: line.text for line in self.lines if line.holds is False}
        return {**self.figures, "failed": failed, "ok": self.ok}


@dataclass(frozen=True)
class Outcome:
    """What is left of a run.

    Attributes:
        events: its event log.
        exit_codes: of the lighthouse and the groups' launchers.
        leftovers: processes that outlived their group.
        folder: the run's folder.
        victim: the group that was broken, empty if none.
        trouble: why the run was given up, empty if it was not.
    """

    events: Sequence[Event]
    exit_codes: Mapping[str, int | None]
    leftovers: Sequence[str]
    folder: Path
    victim: str = ""
    trouble: str = ""

    def starts(self) -> list[ProcessStarted]:
        """Those of the broken group, by its launcher, in order."""
        return [e for e in lineage.pick(self.events, ProcessStarted) if e.process == f"manager {self.victim}"]

    def broken_codes(self) -> dict[str, int]:
        """What the broken group ended with before it was started again."""
        ends = [e for e in lineage.pick(self.events, ProcessEnded) if e.process == f"manager {self.victim}"]
        return {self.victim: ends[0].exit_code} if len(self.starts()) > 1 and ends else {}


def build(options: DemoOptions, outcome: Outcome, reference: Outcome | None) -> Report:
    """Hold the rules against the run.

    Args:
        options: what was asked.
        outcome: the run with the fault.
        reference: the same run without it; None if no fault was asked for.
    """
    report = Report()
    report.figures.update(
        groups=options.groups,
        steps=options.steps,
        microbatches=options.microbatches,
        seed=options.seed,
        fault=options.fault,
    )
    if outcome.trouble:
        report.add("the run", outcome.trouble, False)
    if options.fault == "none":
        lost = summary.blamed(outcome.events)
        report.add("fault", "none" if lost.holds else lost.why, lost.holds)
    else:
        _fault_lines(report, options, outcome)
    _state_lines(report, options, outcome)
    _loss_line(report, outcome, reference)
    _process_lines(report, outcome)
    report.add("event log", str(outcome.folder / "events"), None, event_log=str(outcome.folder / "events"))
    return report


def _fault_lines(report: Report, options: DemoOptions, outcome: Outcome) -> None:
    events = outcome.events
    fault = next(iter(lineage.pick(events, FaultInjected)), None)
    if fault is None:
        report.add("fault", f"{options.fault} was asked for and did not happen", False)
        return
    word = FAULT_WORDS.get(fault.fault, fault.fault)
    text = f"{word} of {fault.target or fault.group} inside {fault.phase} of step {fault.step}"
    as_asked = (fault.fault, fault.group, fault.phase) == (options.fault, outcome.victim, "reduce")
    report.add("fault", text, as_asked, fault_group=fault.group, fault_phase=fault.phase, fault_step=fault.step)
    found = summary.detected_after(events, fault)
    text = f"{found.value:.3f} s" if found.value is not None else found.why
    report.add("detected after", text, found.holds, detected_after_s=found.value)
    blamed = summary.blamed(events)
    report.add("blamed", blamed.why or f"{outcome.victim} and nobody else", blamed.holds and found.holds)
    _stood_line(report, options, summary.stalls(events, fault), events)
    recovery = summary.recovery_ran(events)
    report.add("recovery ran", recovery.why or "yes", recovery.holds)
    _rejoin_lines(report, options, outcome)


def _rejoin_lines(report: Report, options: DemoOptions, outcome: Outcome) -> None:
    rejoin = _rejoined(outcome)
    if rejoin is None:
        text, holds = _why_not_back(options, outcome)
        report.add("rejoined after", text, holds, rejoined_after_s=None)
        return
    report.add(
        "rejoined after",
        f"{rejoin.after_s:.1f} s from {rejoin.since}, as a member from step {rejoin.step} on",
        True,
        rejoined_after_s=rejoin.after_s,
        rejoined_step=rejoin.step,
    )
    rate = rejoin.bytes_per_s
    text = f"{rejoin.bytes / (1 << 20):.2f} MiB in {rejoin.fetch_s:.3f} s"
    text += "" if rate is None else f", {rate / (1 << 20):,.0f} MiB/s"
    report.add("state fetched", text, rejoin.bytes > 0, heal_bytes=rejoin.bytes, heal_bytes_per_s=rate)
    pause = rejoin.pause_s
    text = "unknown" if pause is None else f"{pause * 1000:.1f} ms of a member's training thread, at most"
    report.add("snapshot pause", text, pause is not None, snapshot_pause_s=pause)
    report.add("entries replayed", str(rejoin.replayed), None, entries_replayed=rejoin.replayed)
    beyond = max((stall.stood_s for stall in rejoin.survivors), default=None)
    text = "unknown"
    if beyond is not None:
        worst = max(rejoin.survivors, key=lambda stall: stall.stood_s)
        text = f"{worst.stood_s:.3f} s beyond a step of {worst.normal_s:.3f} s, in step {worst.step}"
    known = len(rejoin.survivors) == options.groups - 1
    report.add("longest iteration at the rejoin", text, known, rejoin_stood_s=beyond)


def _rejoined(outcome: Outcome) -> summary.Rejoin | None:
    return next((rejoin for rejoin in summary.rejoins(outcome.events) if rejoin.group == outcome.victim), None)


def _why_not_back(options: DemoOptions, outcome: Outcome) -> tuple[str, bool | None]:
    """Too few steps to come back is no fault of the group; anything else is."""
    starts = outcome.starts()[1:]
    if not starts:
        return f"{outcome.victim} was not started again: the run ended before it could be", None
    last = lineage.pick(outcome.events, Committed)[-1]
    went_on_s = max(0.0, seconds_between(starts[-1], last))
    if went_on_s > REJOIN_S_MAX or outcome.trouble:
        return f"{outcome.victim} was started again and did not come back within {went_on_s:.1f} s", False
    text = f"not shown: --steps {options.steps} is too few; the run ended {went_on_s:.1f} s after the new start"
    return f"{text} of {outcome.victim}", None


def _stood_line(report: Report, options: DemoOptions, stalls: Sequence[summary.Stall], events: Sequence[Event]) -> None:
    name, gaps = "survivors stood for", [event.stall_s for event in lineage.pick(events, Recovered)]
    if not stalls:
        report.add(name, "unknown", False, survivors_stood_s=None)
        return
    worst = max(stall.stood_s for stall in stalls)
    normal = max(stall.normal_s for stall in stalls)
    text = f"{worst:.3f} s beyond a step of {normal:.3f} s and the work inherited"
    if gaps:
        text += f"; {max(gaps):.3f} s from the failure to the repeated reduce"
    everyone = len(stalls) == options.groups - 1
    gap = max(gaps, default=None)
    report.add(name, text, everyone, survivors_stood_s=worst, normal_step_s=normal, failure_to_reduce_s=gap)


def _state_lines(report: Report, options: DemoOptions, outcome: Outcome) -> None:
    events = outcome.events
    lost = summary.steps_lost(events)
    reached = lineage.lineage(events).last_step + 1
    text = f"{lost.value}" if lost.holds else lost.why
    if reached != options.steps:
        text += f"; only {reached} of {options.steps} steps were committed"
    report.add("steps lost", text, lost.holds and reached == options.steps, steps_lost=lost.value, steps_done=reached)
    again = summary.recomputed_by_survivors(events)
    report.add(
        "microbatches recomputed",
        again.why or f"{again.value}",
        again.holds,
        microbatches_recomputed=again.value,
    )
    once = summary.samples_exactly_once(events, options.steps)
    text = f"yes, {once.value} microbatches" if once.holds else f"no: {once.why}"
    report.add("samples consumed exactly once", text, once.holds, samples_exactly_once=once.holds)
    same = summary.fingerprints_equal(events)
    live = ", ".join(sorted(lineage.live_groups(events))) or "nobody"
    text = f"yes: {live}" if same.holds else f"no: {same.why}"
    everyone = len(lineage.live_groups(events)) == _expected(options, outcome)
    if same.holds and not everyone:
        text = f"only of {live}, {_expected(options, outcome)} groups should be there"
    text += f" ({len(lineage.live_groups(events))} of {options.groups})"
    report.add("fingerprints equal", text, same.holds and everyone, fingerprints_equal=same.holds)
    line = summary.one_lineage(events)
    report.add("one lineage", line.why or "yes", line.holds)
    good = summary.goodput(events)
    if good.value is not None:
        report.add("goodput", f"{good.value:.1%}", None, goodput=good.value)


def _expected(options: DemoOptions, outcome: Outcome) -> int:
    """How many groups there must be at the end: all, but for one that was broken and had no time to come back."""
    return options.groups - (1 if outcome.victim and _rejoined(outcome) is None else 0)


def _loss_line(report: Report, outcome: Outcome, reference: Outcome | None) -> None:
    final = summary.final_loss(outcome.events)
    report.figures["final_loss"] = final
    if reference is None:
        report.add("final loss", "unknown" if final is None else f"{final:.4f}", final is not None)
        return
    want = summary.final_loss(reference.events)
    report.figures["reference_loss"] = want
    if final is None or want is None:
        trouble = reference.trouble or outcome.trouble or "a final loss is missing"
        report.add("final loss without the fault", f"unknown: {trouble}", False, loss_difference=None)
        return
    difference = final - want
    text = f"{final:.4f}, differs by {difference:+.2e} from the same run without fault"
    report.add("final loss", text, abs(difference) <= LOSS_TOLERANCE, loss_difference=difference)


def _process_lines(report: Report, outcome: Outcome) -> None:
    broken = outcome.victim if _rejoined(outcome) is None else ""
    codes = {name: code for name, code in outcome.exit_codes.items() if name != broken}
    wrong = {name: code for name, code in codes.items() if code != 0}
    text = ", ".join(f"{name} {code}" for name, code in sorted(wrong.items())) or f"0 of {', '.join(sorted(codes))}"
    text += "".join(f"; {code} of {name} when it was broken" for name, code in outcome.broken_codes().items())
    report.add(
        "exit codes",
        text,
        not wrong,
        exit_codes=dict(outcome.exit_codes),
        broken_exit_codes=outcome.broken_codes(),
    )
    left = ", ".join(outcome.leftovers) or "none"
    report.add("processes left over", left, not outcome.leftovers)


def table(report: Report) -> Table:
    """The report for a terminal."""
    drawn = Table(title="lightkeeper demo", title_justify="left", show_header=False)
    drawn.add_column("what")
    drawn.add_column("answer", overflow="fold")
    drawn.add_column("")
    for line in report.lines:
        mark = {True: Text("ok", style="green"), False: Text("FAILED", style="bold red"), None: Text("")}[line.holds]
        drawn.add_row(line.name, line.text, mark)
    return drawn


def plain_lines(report: Report) -> list[str]:
    """The report where there is no terminal."""
    marks = {True: "ok", False: "FAILED", None: ""}
    return [f"{marks[line.holds]:<7} {line.name:<33} {line.text}" for line in report.lines]
