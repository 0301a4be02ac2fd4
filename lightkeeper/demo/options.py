"""What the demo is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoOptions:
    """`lightkeeper demo`.

    Attributes:
        groups: replica groups.
        steps: training steps.
        microbatches: microbatches of a step, over all groups.
        fault: "kill", "freeze" or "none".
        seed: seed of weights and data order.
        as_json: print one JSON object and nothing else.
        run_folder: where the event log goes; None: a new folder under ./runs.
    """

    groups: int = 3
    steps: int = 120
    microbatches: int = 24
    fault: str = "kill"
    seed: int = 0
    as_json: bool = False
    run_folder: Path | None = None
