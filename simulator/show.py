"""What `lightkeeper simulate` prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightkeeper.simulator import mutants
from lightkeeper.simulator.faults import KINDS
from lightkeeper.simulator.history import plan_history, run_history, transcript
from lightkeeper.simulator.phases import PHASES
from lightkeeper.simulator.report import IMPOSSIBLE, Report
from lightkeeper.simulator.run import Runs, run_all
from lightkeeper.simulator.shrink import from_file, shrink, to_json

SHOWN_LINES = 120
SHOWN_VIOLATIONS = 20


def show_histories(runs: Runs, workers: int, as_json: bool, keep: Path | None) -> int:
    """Runs them, prints what they came to, and returns the exit code."""
    start = time.monotonic()
    with _bar() as progress:
        task = progress.add_task("histories", total=runs.count, said="")

        def told(report: Report, done: int) -> None:
            said = f"{done / max(time.monotonic() - start, 1e-9):.1f}/s, {report.faults} faults"
            if report.violations:
                said += f", {len(report.violations)} VIOLATIONS"
            progress.update(task, completed=done, said=said)

        report = run_all(runs, workers, told)
    seconds = time.monotonic() - start
    figures = {**report.to_dict(), "seconds": round(seconds, 1), "workers": workers}
    figures["histories_per_s"] = round(runs.count / seconds, 2)
    if as_json:
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    else:
        _print_report(report, figures)
    if report.violations:
        _explain(runs, report, keep, as_json)
    return 1 if report.violations else 0


def _print_report(report: Report, figures: dict[str, Any]) -> None:
    console = Console(width=200 if not sys.stdout.isatty() else None)
    table = Table(title="faults by kind and by phase of the protocol (a fault counts in every phase that held)")
    table.add_column("fault")
    for phase in ("all", *PHASES):
        table.add_column(phase, justify="right", overflow="fold")
    for kind in KINDS:
        cells = ["-" if (kind, phase) in IMPOSSIBLE else str(report.cells[kind, phase]) for phase in PHASES]
        table.add_row(kind, str(report.kinds[kind]), *cells)
    console.print(table)
    lines = [
        f"{report.histories} histories ({report.idle} more in which too little happened to count), "
        f"{figures['histories_per_s']} a second; {report.finished} ran to the end, {report.stopped} were stopped",
        f"{report.faults} faults, {report.messages} messages, {report.commits} commits, "
        f"{report.adopted} entries adopted",
        f"kinds that never struck: {', '.join(report.never) or 'none'}",
        f"empty cells: {', '.join(f'{kind} at {phase}' for kind, phase in report.empty) or 'none'}",
        f"violations: {len(report.violations)}",
    ]
    for line in lines:
        console.print(line, highlight=False)


def _explain(runs: Runs, report: Report, keep: Path | None, as_json: bool) -> None:
    """Says which seeds broke, and shows the first one made small."""
    for seed, _, what in sorted(report.violations)[:SHOWN_VIOLATIONS]:
        print(f"seed {seed}: {what}", file=sys.stderr)
    seed, invariant, _ = min(report.violations)
    if as_json and keep is None:
        return
    plan = plan_history(seed, runs.groups, runs.window_s, runs.faults)
    print(f"seed {seed} is made smaller ...", file=sys.stderr)
    small, outcome = shrink(plan, invariant)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / f"{invariant.lower()}-{seed}.json"
        path.write_text(to_json(small, outcome), encoding="utf-8")
        print(f"its plan is in {path}", file=sys.stderr)
    if not as_json:
        print(transcript(small, run_history(small, traces=True).trace, SHOWN_LINES), file=sys.stderr)
        print(outcome.what, file=sys.stderr)


def show_file(path: Path) -> int:
    """Runs the plan in a file, prints its transcript, and returns the exit code."""
    plan = from_file(path)
    outcome = run_history(plan, traces=True)
    print(transcript(plan, outcome.trace))
    print(outcome.what or "every invariant held")
    return 1 if outcome.invariant else 0


def show_mutants(runs: Runs, workers: int, as_json: bool) -> int:
    """Runs every mutant until it is noticed, prints the seeds, and returns the exit code."""
    count = min(runs.count, mutants.HISTORIES_MAX) if runs.count != Runs().count else mutants.HISTORIES_MAX
    caught: list[mutants.Caught] = []
    with _bar() as progress, ThreadPoolExecutor(workers) as pool:
        task = progress.add_task("mutants", total=len(mutants.MUTANTS), said="")
        running = [pool.submit(mutants.run, mutant, runs.first, count) for mutant in mutants.MUTANTS]
        for future in as_completed(running):
            caught.append(future.result())
            progress.update(task, advance=1, said=caught[-1].name)
    order = [mutant.name for mutant in mutants.MUTANTS]
    caught.sort(key=lambda one: order.index(one.name))
    if as_json:
        sys.stdout.write(msgspec.json.encode([one.__dict__ for one in caught]).decode() + "\n")
    else:
        _print_mutants(caught)
    return 1 if any(one.seed is None for one in caught) else 0


def _print_mutants(caught: Iterable[mutants.Caught]) -> None:
    table = Table(title="rules undone, and the history that notices")
    for column in ("mutant", "seed", "invariant", "histories"):
        table.add_column(column, justify="right" if column in ("seed", "histories") else "left")
    for one in caught:
        seed = "NOT NOTICED" if one.seed is None else str(one.seed)
        table.add_row(one.name, seed, one.invariant, str(one.histories))
    Console(width=120 if not sys.stdout.isatty() else None).print(table)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
