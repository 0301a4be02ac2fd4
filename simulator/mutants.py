"""Mutations of the machines, each a line of the protocol undone, that the histories must notice.

A checker that never fails may be blind. So each mutant replaces a piece of source text, which must be there exactly
once, in a fresh interpreter, and histories are run until one breaks that does not break without it. They are full of
the faults under which the rule matters.

``python -m lightkeeper.simulator.mutants NAME seeds FIRST COUNT`` runs histories with one, and ``NAME shrink SEED
FILE`` keeps the small form of one that breaks; each prints a line of JSON.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightkeeper.simulator.mutations import MUTANTS as FIRST_MUTANTS
from lightkeeper.simulator.mutations import UNNOTICED, Mutant
from lightkeeper.simulator.mutations_of_checkpoints import OF_CHECKPOINTS
from lightkeeper.simulator.mutations_of_quorum import OF_QUORUM
from lightkeeper.simulator.mutations_of_spares import OF_SPARES
from lightkeeper.simulator.mutations_of_takeovers import OF_TAKEOVERS

if TYPE_CHECKING:
    from lightkeeper.simulator.history import Plan

HISTORIES_MAX = 10_000
RUN_S_MAX = 3600
EVEN = {  # unless a mutant says otherwise
    "by_speed": False, "slow": (), "spares": 0, "surplus": 0, "last_to_work": 0, "saves": 0, "resumed": (), "unlike": 0,
}  # fmt: skip
FAULTS = 18.0  # of a history on average, half as many again as in others

MUTANTS = (*FIRST_MUTANTS, *OF_SPARES, *OF_CHECKPOINTS, *OF_QUORUM, *OF_TAKEOVERS)


@dataclass(frozen=True)
class Caught:
    """What came of a mutant: the first seed that broke (None: none did), the invariant, and after how many."""

    name: str
    seed: int | None
    invariant: str
    what: str
    histories: int


def named(name: str) -> Mutant:
    """The mutant of this name.

    Raises:
        KeyError: there is none.
    """
    return {mutant.name: mutant for mutant in (*MUTANTS, *UNNOTICED)}[name]


def source_of(mutant: Mutant) -> str:
    """The text of the file that it changes."""
    return files("lightkeeper").joinpath(f"{mutant.module}.py").read_text(encoding="utf-8")


def run(mutant: Mutant, first: int = 0, count: int = HISTORIES_MAX) -> Caught:
    """Runs histories with it, in a fresh interpreter, until one breaks that holds with the rule in place."""
    from lightkeeper.simulator.history import run_history

    tried = 0
    while tried < count:
        caught = _fresh(mutant, "seeds", str(first + tried), str(count - tried))
        tried += caught.histories
        if caught.seed is None:
            break
        if not run_history(plan_of(mutant, caught.seed)).invariant:  # else it shows a bug, and nothing of the mutant
            return dataclasses.replace(caught, histories=tried)
    return Caught(mutant.name, None, "", "", tried)


def _fresh(mutant: Mutant, *words: str) -> Caught:
    command = [sys.executable, "-m", "lightkeeper.simulator.mutants", mutant.name, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"mutant {mutant.name!r} could not be run: {done.stderr[-500:]}")
    return Caught(**json.loads(done.stdout))


class _Mutated(importlib.machinery.SourceFileLoader):
    """Loads one module from its changed text."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        text = source_of(self._mutant)
        assert text.count(self._mutant.old) == 1, (
            f"{self._mutant.name}: its text is there {text.count(self._mutant.old)} times"
        )
        return compile(text.replace(self._mutant.old, self._mutant.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.fullname = "lightkeeper." + mutant.module.replace("/", ".")

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.fullname:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_Mutated(fullname, spec.origin, self._mutant)
        )


def undo(mutant: Mutant) -> None:
    """From now on the module that it changes is loaded from its changed text; it must not be loaded yet."""
    finder = _Finder(mutant)
    assert finder.fullname not in sys.modules, f"{mutant.module} is loaded already"
    sys.meta_path.insert(0, finder)


def plan_of(mutant: Mutant, seed: int) -> Plan:
    """The plan of a seed, among the faults and with the shape under which its rule matters."""
    from lightkeeper.simulator.history import plan_history

    return plan_history(seed, faults=FAULTS, favoured=mutant.favoured, shape={**EVEN, **mutant.shape})


def _seeds(name: str, first: int, count: int) -> Caught:
    from lightkeeper.simulator.history import run_history

    mutant = named(name)
    for number in range(count):
        outcome = run_history(plan_of(mutant, first + number))
        if outcome.invariant:
            return Caught(name, outcome.seed, outcome.invariant, outcome.what, number + 1)
    return Caught(name, None, "", "", count)


def _shrunk(name: str, seed: int, path: Path) -> Caught:
    from lightkeeper.simulator.history import run_history
    from lightkeeper.simulator.shrink import shrink, to_json

    plan = plan_of(named(name), seed)
    small, outcome = shrink(plan, run_history(plan).invariant)
    path.write_text(to_json(small, outcome, name), encoding="utf-8")
    return Caught(name, seed, outcome.invariant, outcome.what, 1)


def _main(name: str, what: str, *words: str) -> None:
    undo(named(name))
    if what == "seeds":
        caught = _seeds(name, int(words[0]), int(words[1]))
    else:
        caught = _shrunk(name, int(words[0]), Path(words[1]))
    print(json.dumps(caught.__dict__))


if __name__ == "__main__":
    _main(*sys.argv[1:])
