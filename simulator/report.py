"""What many histories came to: faults by kind and phase, cells that are empty, and violations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lightkeeper.simulator.faults import KINDS
from lightkeeper.simulator.history import Outcome
from lightkeeper.simulator.phases import PHASES

SUMS = (
    "histories", "idle", "finished", "stopped", "faults", "messages", "events", "commits", "adopted", "restarts",
)  # fmt: skip
NO_MEMBERS = "whom it strikes is a member, and nobody is one yet"
ALL_DOWN = "whom it strikes is up"
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("kill_several", "start"): NO_MEMBERS,
    ("kill_donor", "start"): NO_MEMBERS,
    ("raise_error", "start"): NO_MEMBERS,
    ("operator_speaks", "lighthouse away"): ALL_DOWN,
    ("slow_rank", "start"): NO_MEMBERS,
}


@dataclass
class Report:
    """Sums over histories.

    Attributes:
        histories: those in which enough happened to count.
        idle: the others.
        cells: faults by (kind, phase); a fault counts in every phase that held when it struck.
        violations: seed, invariant and what, of the first ones.
    """

    histories: int = 0
    idle: int = 0
    finished: int = 0
    stopped: int = 0
    faults: int = 0
    messages: int = 0
    events: int = 0
    commits: int = 0
    adopted: int = 0
    restarts: int = 0
    simulated_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One more history."""
        if outcome.invariant:
            self.violations.append((outcome.seed, outcome.invariant, outcome.what))
        if not outcome.counts:
            self.idle += 1
            return
        self.histories += 1
        self.finished += outcome.finished
        self.stopped += bool(outcome.stopped)
        self.faults += outcome.faults
        self.messages += outcome.messages
        self.events += outcome.events
        self.commits += outcome.commits
        self.adopted += outcome.adopted
        self.restarts += outcome.restarts
        self.simulated_s += outcome.at_s
        self.kinds.update(outcome.kinds)
        self.cells.update(outcome.cells)

    def merge(self, other: Report) -> None:
        """Adds what another process found."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.simulated_s += other.simulated_s
        self.kinds.update(other.kinds)
        self.cells.update(other.cells)
        self.violations += other.violations

    @property
    def never(self) -> list[str]:
        """Kinds of faults that never struck."""
        return [kind for kind in KINDS if not self.kinds[kind]]

    @property
    def empty(self) -> list[tuple[str, str]]:
        """Cells that are empty and need not be."""
        cells = [(kind, phase) for kind in KINDS for phase in PHASES]
        return [cell for cell in cells if not self.cells[cell] and cell not in IMPOSSIBLE]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        table = {kind: {phase: self.cells[kind, phase] for phase in PHASES} for kind in KINDS}
        return {
            **{name: getattr(self, name) for name in SUMS},
            "simulated_s": round(self.simulated_s, 1),
            "kinds": {kind: self.kinds[kind] for kind in KINDS},
            "cells": table,
            "never": self.never,
            "empty": [list(cell) for cell in self.empty],
            "impossible": [[*cell, why] for cell, why in IMPOSSIBLE.items()],
            "violations": [{"seed": s, "invariant": i, "what": w} for s, i, w in sorted(self.violations)],
        }
