"""Mutations of the machines, each a line of the protocol undone, that the histories must notice.

A checker that never fails may be blind. So each mutant replaces a piece of source text, which must be there exactly
once, in a fresh interpreter, and histories are run until one breaks. Files under ``simulator/`` hold what the trainer's
side does with tensors (which entry is served, what follows on what); those mutants undo a rule there.

``python -m lightkeeper.simulator.mutants NAME seeds FIRST COUNT`` runs histories with one, and ``NAME shrink SEED
FILE`` keeps the small form of one that breaks; each prints a line of JSON.
"""

from __future__ import annotations

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
from typing import Any

HISTORIES_MAX = 10_000
RUN_S_MAX = 3600


@dataclass(frozen=True)
class Mutant:
    """One mutation.

    Attributes:
        name: what is undone.
        module: under ``lightkeeper``, with a slash.
        old: the source text that is there exactly once.
        new: what stands there instead.
    """

    name: str
    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Caught:
    """What came of a mutant: the first seed that broke (None: none did), the invariant, and after how many."""

    name: str
    seed: int | None
    invariant: str
    what: str
    histories: int


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "no fence",
        "lighthouse/takeover",
        "return [note, *self._send(group, m.Fence(reason))]",
        "return [note]",
    ),
    Mutant(
        "no lease",
        "lighthouse/silence",
        "return since is not None and now - since > patience.lease_s * times",
        "return since is not None",
    ),
    Mutant(
        "who moved away is waited for before the first epoch",
        "lighthouse/changes",
        "if group.connection is not None and silent_s > self.patience.away_s:",
        "if False:",
    ),
    Mutant(
        "who comes from a job that broke off goes on with it",
        "lighthouse/takeover",
        "return hello.known.epoch <= self.broken_off",
        "return False",
    ),
    Mutant(
        "joiners of two histories begin one job",
        "lighthouse/changes",
        "candidates = of_one_history(candidates, promises)",
        "pass",
    ),
    Mutant(
        "its own standstill counts as the others' silence",
        "lighthouse/machine",
        "if gap_s > self.bounds.lease_s / 2:",
        "if False:",
    ),
    Mutant(
        "silence taken for death when nobody is left",
        "lighthouse/job",
        'KNOWN_BY = ("manager", "operator", "left")',
        'KNOWN_BY = ("manager", "operator", "left", "lease", "stream", "frozen")',
    ),
    Mutant(
        "old epoch activated",
        "manager/machine",
        "epoch = membership.epoch\n        if epoch.number < self.promised or (",
        "epoch = membership.epoch\n        if False and (",
    ),
    Mutant(
        "old term acknowledged",
        "manager/machine",
        "if self.acknowledged is not None and welcome.term < self.acknowledged:",
        "if False:",
    ),
    Mutant(
        "promise not kept",
        "manager/votes",
        'if "failed" in outcomes or self.promised > epoch.number:',
        'if "failed" in outcomes:',
    ),
    Mutant(
        "commit before all ranks have voted",
        "manager/votes",
        "or self.suspended or len(self.votes) < self.settings.ranks:",
        "or self.suspended or 0 not in self.votes:",
    ),
    Mutant(
        "an incomplete sum is committed",
        "manager/votes",
        'if outcomes == {"reduced"}:',
        'if "reduced" in outcomes or "again" in outcomes:',
    ),
    Mutant(
        "fresh deal in a recovery",
        "lighthouse/recovery",
        "{group: promises[group].held for group in ahead}",
        "{}",
    ),
    Mutant(
        "fresh deal after an adopted entry",
        "manager/votes",
        "if first_here:",
        "if False:",
    ),
    Mutant(
        "share dealt twice: to the joiner of a first step too",
        "manager/votes",
        "if name not in self.joiners]",
        "]",
    ),
    Mutant(
        "activation before all have promised",
        "lighthouse/changes",
        "if self.recovery.complete:\n            actions += self._activate(now)",
        "if self.recovery.promises:\n            self.recovery.asked = frozenset(self.recovery.promises)\n"
        "            actions += self._activate(now)",
    ),
    Mutant(
        "activation spoken of before it is logged",
        "lighthouse/changes",
        "actions: list[Action] = [Activated(membership), self._activated_note()]",
        "actions: list[Action] = [self._activated_note()]",
    ),
    Mutant(
        "promised numbers forgotten with the log",
        "lighthouse/machine",
        "self.highest = max(self.highest, hello.promised, *numbers, 0)",
        "pass",
    ),
    Mutant(
        "a lighthouse without log leaves out whom it does not hear",
        "lighthouse/job",
        "return self.reigns or self.newest is None",
        "return True",
    ),
    Mutant(
        "majority instead of all for a lighthouse without log",
        "lighthouse/takeover",
        "if self.reigns or self.newest is None or self._unanswered():",
        "if self.reigns or self.newest is None or 2 * len(self._unanswered()) >= len(self.newest.members):",
    ),
    Mutant(
        "a reign not given up to a higher term",
        "lighthouse/takeover",
        "        if not self.reigns:\n            return []\n        self.reigns = False",
        "        if self.newest is None:\n            return []\n        return []\n        self.reigns = False",
    ),
    Mutant(
        "a planned epoch that may be in force is not asked for",
        "lighthouse/changes",
        "if unheard(self.newest, promises) is not None or not self._may_leave_out():",
        "if not self._may_leave_out():",
    ),
    Mutant(
        "prepared epochs not named in the promise",
        "manager/machine",
        "m.Promise(epoch, self.known, tuple(self.prepared), ",
        "m.Promise(epoch, self.known, (), ",
    ),
    Mutant(
        "who lags by two entries stays a member",
        "lighthouse/recovery",
        "if last[group] >= high - 1)",
        "if last[group] >= high - 2)",
    ),
    Mutant(
        "ready flag before the group is formed",
        "manager/votes",
        "built = bool(self.prepared) and len(self.built) == self.settings.ranks",
        "built = bool(self.prepared)",
    ),
    Mutant(
        "first epoch with the minimum of groups",
        "lighthouse/job",
        "return len(joined) >= self.config.groups or (word and ",
        "return len(joined) >= self.config.groups or (True and ",
    ),
    Mutant(
        "who was left out elsewhere heals",
        "lighthouse/takeover",
        "left_out = was is not None and",
        "left_out = False and",
    ),
    Mutant(
        "half a state is gone on from",
        "manager/machine",
        "if self.torn:",
        "if False:",
    ),
    Mutant(
        "a joiner goes on from another entry than it followed",
        "manager/machine",
        "if self.step == activate.first_step and self.last == activate.entry:",
        "if self.step >= activate.first_step:",
    ),
    Mutant(
        "a joiner that lost the entries is waited for",
        "lighthouse/machine",
        "if self.prepared:\n            group.lost_in = ",
        "if False:\n            group.lost_in = ",
    ),
    Mutant(
        "state taken by a rank of a joiner counts for all of them",
        "manager/joins",
        "if len({(v.step, v.entry) for v in self.votes.values()}) > 1:",
        "if False:",
    ),
    Mutant(
        "who waits to join is forgotten with the job",
        "lighthouse/changes",
        "self.config = self.config or group.hello",
        "pass",
    ),
    Mutant(
        "a new incarnation is taken for its leaver",
        "lighthouse/changes",
        "group.incarnation == member.incarnation and self._member(group.name) is None:",
        "self._member(group.name) is None:",
    ),
    Mutant("boundary 0 means that nobody needs a copy", "lighthouse/messages", "RELEASE = 1 << 63", "RELEASE = 0"),
    Mutant(
        "a joiner is named as if it had stood still since its promise",
        "manager/machine",
        "if self.following:\n            followed",
        "if False:\n            followed",
    ),
    Mutant(
        "ranks of a joiner that differ for a moment end it",
        "manager/joins",
        "return self._catch_up()",
        "raise AssertionError('ranks of a joiner differ')",
    ),
    Mutant(
        "the manager's own word does not count for a lighthouse without log",
        "lighthouse/job",
        "if not obeys and not dead and member",
        "if not obeys and member",
    ),
    Mutant(
        "a joiner that has not switched speaks for its epoch",
        "lighthouse/recovery",
        "return promise is not None and (promise.known is not None or membership.base is None)",
        "return promise is not None",
    ),
    Mutant(
        "planned changes that a lost log held come into force unseen",
        "lighthouse/machine",
        "self.foreign = sorted({p.epoch: p for p in told}.values(), key=lambda planned: planned.epoch)",
        "self.foreign = []",
    ),
    Mutant(
        "a lighthouse without all members prepares a change",
        "lighthouse/changes",
        "if self.newest is None or not self.reigns or not all(self._here(member) for member in self.newest.members):",
        "if self.newest is None:",
    ),
    Mutant(
        "a leaver is a joiner when a promise shows the change",
        "lighthouse/changes",
        "learnt = self._planned_is_in_force(mine[0]) if mine else self._learn_newest(top)",
        "learnt = [] if mine else self._learn_newest(top)\n            self.newest = top",
    ),
    Mutant(
        "who leaves is taken for one left out",
        "lighthouse/takeover",
        "return left or any(planned.epoch == newest.epoch for planned in hello.prepared)",
        "return False",
    ),
    Mutant(
        "a hello taken for obedience",
        "lighthouse/job",
        "obeys = mine and group is not None and group.acknowledged == self.term",
        "obeys = mine and group is not None and group.in_touch",
    ),
    Mutant(
        "that another reigned is forgotten with a restart",
        "lighthouse/takeover",
        "return [] if self.newest is None else [Superseded()]",
        "return []",
    ),
    Mutant(
        "groups that wait for a first epoch at several lighthouses stay there",
        "lighthouse/takeover",
        "waited = now - max(here) > self.bounds.lease_s + CALLS_S",
        "waited = False",
    ),
    Mutant(
        "a rank that comes late from the epoch before sends the others back",
        "manager/answers",
        "if rank in self.votes:",
        "if False:",
    ),
    Mutant(
        "a try that is done anew is adopted as the entry",
        "simulator/ranks",
        "self.attempt += 1\n            self.pending = None",
        "self.attempt += 1",
    ),
    Mutant(
        "entry served under the wrong epoch",
        "simulator/holder",
        "self.newest.name != name:",
        "self.newest.name.step != name.step:",
    ),
    Mutant(
        "entries without their predecessor's name",
        "simulator/holder",
        "entry = self._kept.get(name)",
        "entry = next((kept for kept in self._kept.values() if kept.name.step == name.step + 1), None)",
    ),
    Mutant(
        "store key without epoch",
        "simulator/world",
        "key = (plan.epoch, plan.term, plan.lighthouse, index)",
        'key = (0, 0, "", index)',
    ),
    Mutant(
        "store key without term",
        "simulator/world",
        "key = (plan.epoch, plan.term, plan.lighthouse, index)",
        'key = (plan.epoch, 0, "", index)',
    ),
    Mutant(
        "a flag that not all carry activates",
        "simulator/collectives",
        "flags.pop() if len(flags) == 1 else 0,",
        "max(flags),",
    ),
    Mutant(
        "finished before closing",
        "simulator/ranks",
        'self._reduce_bucket("closing", 0)\n            return',
        'self.vote("closed")\n            return',
    ),
)


def named(name: str) -> Mutant:
    """The mutant of this name.

    Raises:
        KeyError: there is none.
    """
    return {mutant.name: mutant for mutant in MUTANTS}[name]


def source_of(mutant: Mutant) -> str:
    """The text of the file that it changes."""
    return files("lightkeeper").joinpath(f"{mutant.module}.py").read_text(encoding="utf-8")


def run(mutant: Mutant, first: int = 0, count: int = HISTORIES_MAX) -> Caught:
    """Runs histories with it, in a fresh interpreter, until one breaks."""
    return _fresh(mutant, "seeds", str(first), str(count))


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


def _seeds(name: str, first: int, count: int) -> Caught:
    from lightkeeper.simulator.history import plan_history, run_history

    for number in range(count):
        outcome = run_history(plan_history(first + number))
        if outcome.invariant:
            return Caught(name, outcome.seed, outcome.invariant, outcome.what, number + 1)
    return Caught(name, None, "", "", count)


def _shrunk(name: str, seed: int, path: Path) -> Caught:
    from lightkeeper.simulator.history import plan_history, run_history
    from lightkeeper.simulator.shrink import shrink, to_json

    plan = plan_history(seed)
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
