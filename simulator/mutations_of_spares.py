"""The rules of spares and of groups outside that are undone one by one, as in `mutations`."""

from __future__ import annotations

from lightkeeper.simulator.mutations import Mutant

SPARES = {"groups": 4, "spares": 1, "minimum": 1, "lighthouses": 1}

OF_SPARES: tuple[Mutant, ...] = (
    Mutant(
        "no spare is promoted",
        "lighthouse/spares",
        "working += others[:free]",
        "working += [group for group in others[:free] if group in joined]",
        favoured=("kill_rank", "kill_group"),
        shape=SPARES,
    ),
    Mutant(
        "who comes in takes the place of one that works",
        "lighthouse/spares",
        "working = [group for group in groups if group in worked][:members]",
        "working = list(groups)[-members:]",
        favoured=("kill_rank", "kill_group"),
        shape=SPARES,
    ),
    Mutant(
        "a parked group is not asked in when one is lost",
        "lighthouse/job",
        "joined = (group for group in self._joined() if group.in_touch and not group.leaving)",
        "joined = (g for g in self._joined() if g.in_touch and not g.leaving and not g.parked)",
        favoured=("kill_rank", "kill_group"),
        shape={**SPARES, "surplus": 1},
        seed=3,
    ),
    Mutant(
        "who was outside does not say that a job runs",
        "manager/machine",
        "seen=self.seen if self.known is None else None,",
        "seen=None,",
        favoured=("lose_log", "cut_control", "kill_group"),
        shape={"groups": 2, "spares": 0, "surplus": 2, "minimum": 1, "lighthouses": 1, "start_window_s": 3.0},
        seed=4,
    ),
)
