"""`lightkeeper demo`: a small language model, several replica groups, one of them broken inside a step."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lightkeeper.cli.options import check_count
from lightkeeper.errors import UsageError


class Fault(StrEnum):
    """What happens to one group."""

    kill = "kill"
    freeze = "freeze"
    none = "none"


def command(
    groups: Annotated[int, typer.Option(help="Replica groups.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps; a restarted group needs some to come back.")] = 120,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step, over all groups.")] = 24,
    fault: Annotated[
        Fault, typer.Option(help="What happens to one group inside a reduce; then it is started again.")
    ] = Fault.kill,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    run_folder: Annotated[
        Path | None, typer.Option(help="Where the event log goes; a new folder under ./runs by default.")
    ] = None,
) -> int:
    """Train with real processes, break one group inside a reduce, start it again, and check that nothing was lost."""
    check_count(groups, "--groups", 1, 16)
    check_count(steps, "--steps", 4, 100_000)
    check_count(seed, "--seed", 0, 2**31 - 1)
    if microbatches < groups:
        raise UsageError(f"--microbatches must be at least --groups ({groups}), got {microbatches}")
    if groups == 1 and fault is not Fault.none:
        raise UsageError("--groups 1 has no peer that could go on: nothing can heal it; use --fault none")
    from lightkeeper.demo.options import DemoOptions
    from lightkeeper.demo.runner import run

    return run(
        DemoOptions(
            groups=groups,
            steps=steps,
            microbatches=check_count(microbatches, "--microbatches", 1, 10_000),
            fault=fault.value,
            seed=seed,
            as_json=json,
            run_folder=run_folder,
        )
    )
