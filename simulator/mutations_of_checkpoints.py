"""The rules of a job that begins from checkpoints that are undone one by one, as in `mutations`."""

from __future__ import annotations

from lightkeeper.simulator.mutations import Mutant

DIFFERENT = {"groups": 3, "minimum": 1, "lighthouses": 1, "resumed": (5, 7, 7)}
SAVED = {"groups": 3, "minimum": 1, "lighthouses": 1, "saves": 1}
ALL_DIE = ("kill_rank", "kill_group", "kill_several", "kill_donor")

OF_CHECKPOINTS: tuple[Mutant, ...] = (
    Mutant(
        "the first of the checkpoints begins a job, whatever its step",
        "lighthouse/recovery",
        "brought = max((entry for entry in last.values() if not entry.made), key=lambda e: e.step, default=None)",
        "brought = next((entry for entry in last.values() if not entry.made), None)",
        shape=DIFFERENT,
    ),
    Mutant(
        "an entry that a joiner holds is preferred to a later checkpoint",
        "lighthouse/recovery",
        "newest = made if brought is None or (made is not None and made.step >= brought.step) else brought",
        "newest = made or brought",
        favoured=ALL_DIE,
        shape={**SAVED, "resumed": (5, 7, 7)},
        seed=22,
    ),
    Mutant(
        "checkpoints of one step are taken for one state",
        "lighthouse/recovery",
        "return [group for group in begin if state[group] == state[begin[0]]]",
        "return begin",
        shape={"groups": 3, "unlike": 1},
    ),
    Mutant(
        "the joins choose who is asked to begin a job",
        "lighthouse/job",
        "return sorted(self._seated(self._ticked_s), key=lambda group: group.name)",
        "joined = sorted(self._seated(self._ticked_s), key=lambda group: group.name)\n"
        "            return [g for g in joined if g.join and joined[0].join and "
        "g.join.fingerprint == joined[0].join.fingerprint]",
        favoured=ALL_DIE,
        shape=SAVED,
    ),
    Mutant(
        "a group does not say at which step it begins",
        "manager/machine",
        "self.last = origin(first) if first else None",
        "self.last = None",
        shape=DIFFERENT,
    ),
)
