"""`lightkeeper simulate`: the whole protocol in a seeded world, under faults, with checkers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightkeeper.cli.options import check_count
from lightkeeper.errors import UsageError

if TYPE_CHECKING:
    from lightkeeper.simulator.run import Runs

HOUR_S = 3600.0
WINDOW_S_MIN, WINDOW_S_MAX = 1.0, 24 * HOUR_S
FAULTS_MAX = 1000


def command(
    seeds: Annotated[int, typer.Option(help="Histories to run.")] = 1000,
    first: Annotated[int, typer.Option(help="The first seed; N seeds from there on.")] = 0,
    groups: Annotated[int, typer.Option(help="Replica groups of each history; 0 draws it from the seed.")] = 0,
    faults_per_hour: Annotated[float, typer.Option(help="Faults per simulated hour.")] = 1800.0,
    hours: Annotated[float, typer.Option(help="Simulated hours in which faults strike.")] = 24 / HOUR_S,
    workers: Annotated[int, typer.Option(help="Processes; 0 takes one per core.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Undo one rule after another, and show the seed that notices.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the shrunk plan of the first seed that breaks, to be replayed.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Run the plan in a file, and print its transcript.")] = None,
) -> int:
    """Run the lighthouse's and the managers' machines in thousands of histories with faults, and check what must hold.

    Ends with 1 if an invariant did not hold, and says the seed that repeats it.
    """
    check_count(seeds, "--seeds", 1, 100_000_000)
    check_count(first, "--first", 0, 2**31 - 1)
    check_count(groups, "--groups", 0, 16)
    check_count(workers, "--workers", 0, 256)
    runs = _runs(seeds, first, groups, faults_per_hour, hours)
    if replay is not None:
        from lightkeeper.simulator.show import show_file

        return show_file(replay)
    if mutants:
        from lightkeeper.simulator.show import show_mutants

        return show_mutants(runs, workers or os.cpu_count() or 1, json)
    from lightkeeper.simulator.show import show_histories

    return show_histories(runs, workers or os.cpu_count() or 1, json, keep)


def _runs(seeds: int, first: int, groups: int, faults_per_hour: float, hours: float) -> Runs:
    from lightkeeper.simulator.run import Runs

    window_s = hours * HOUR_S
    if not WINDOW_S_MIN <= window_s <= WINDOW_S_MAX:
        least, most = WINDOW_S_MIN / HOUR_S, WINDOW_S_MAX / HOUR_S
        raise UsageError(f"--hours must be within {least:.4f}..{most:.0f}, got {hours}")
    faults = faults_per_hour * hours
    if not 1 <= faults <= FAULTS_MAX:
        raise UsageError(
            f"--faults-per-hour {faults_per_hour:g} over --hours {hours:g} makes {faults:.3g} faults a history; "
            f"it must be within 1..{FAULTS_MAX}"
        )
    return Runs(first, seeds, groups, window_s, faults)
