"""Makes a history that shows a violation smaller: fewer faults, then a simpler shape; and keeps it as a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.simulator.faults import KINDS, Fault
from lightkeeper.simulator.history import Outcome, Plan, run_history
from lightkeeper.simulator.phases import PHASES
from lightkeeper.simulator.shape import shape_from, shape_out

TRIES_MAX = 400


def shrink(plan: Plan, invariant: str, tries_max: int = TRIES_MAX) -> tuple[Plan, Outcome]:
    """The smallest plan found that still breaks this invariant, and what comes of it.

    Args:
        plan: breaks it.
        invariant: its name.
        tries_max: how many histories may be run.
    """
    best, outcome = plan, run_history(plan)
    tries, found = 0, True
    while found and tries < tries_max:
        found = False
        for smaller in _smaller(best):
            tries += 1
            tried = run_history(smaller)
            if tried.invariant == invariant:
                best, outcome, found = smaller, tried, True
                break
            if tries >= tries_max:
                break
    return best, outcome


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are one step smaller: half of the faults first, then single ones, then a simpler shape."""
    faults = plan.faults
    size = len(faults) // 2
    while size >= 1:
        for start in range(0, len(faults), size):
            yield dataclasses.replace(plan, faults=faults[:start] + faults[start + size :])
        size //= 2
    simpler: dict[str, Any] = {"ranks": 1, "buckets": 1, "lighthouses": 1, "again": 0.0, "late_s": 0.0, "before": False}
    simpler |= {"saves": 0, "resumed": (), "unlike": 0}
    for field, value in simpler.items():
        if getattr(plan.shape, field) != value:
            yield dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, **{field: value}))
    for i, fault in enumerate(faults):
        if fault.phase:
            aimless = dataclasses.replace(fault, phase="")
            yield dataclasses.replace(plan, faults=(*faults[:i], aimless, *faults[i + 1 :]))


# ---------------------------------------------------------------- as a file


def to_json(plan: Plan, outcome: Outcome, note: str = "") -> str:
    """A plan as the text of a file under ``tests/simulation/seeds``."""
    fields = {
        "broke": outcome.what,
        "note": note,
        "seed": plan.seed,
        "shape": shape_out(plan.shape),
        "faults": [_without_defaults(fault) for fault in plan.faults],
    }
    return json.dumps(fields, indent=1) + "\n"


def _without_defaults(fault: Fault) -> dict[str, object]:
    defaults = {field.name: field.default for field in dataclasses.fields(Fault)}
    return {name: value for name, value in dataclasses.asdict(fault).items() if value != defaults[name]}


def from_file(path: Path) -> Plan:
    """The plan in a seed's file.

    Raises:
        UsageError: if it is not one.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        faults = tuple(Fault(**fault) for fault in fields["faults"])
        plan = Plan(int(fields["seed"]), shape_from(fields["shape"]), faults)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the file of a simulated history: {error}") from error
    for fault in faults:
        if fault.kind not in KINDS or fault.phase not in ("", *PHASES):
            raise UsageError(f"{path} has a fault {fault.kind!r} at {fault.phase!r}, which the simulator does not know")
    return plan
