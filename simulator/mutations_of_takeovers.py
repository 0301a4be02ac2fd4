"""The rules of who changes lighthouses, or comes in meanwhile, that are undone one by one, as in `mutations`."""

from __future__ import annotations

from lightkeeper.simulator.mutations import Mutant

LOSSES = ("lose_log", "restart_lighthouse", "kill_rank")
JOINS = {"groups": 3, "ranks": 2, "minimum": 1, "lighthouses": 1, "restart_s": (0.3, 1.5), "copy_s": (0.1, 1.0)}
RESERVES = {"groups": 2, "spares": 1, "surplus": 2, "last_to_work": 1, "minimum": 1, "lighthouses": 2}

OF_TAKEOVERS: tuple[Mutant, ...] = (
    Mutant(
        "a reserve that obeyed an earlier lighthouse ends the reign of the next",
        "lighthouse/takeover",
        "return acknowledged > self.term or self._needs(hello) or not settled",
        "return True",
        favoured=("cut_control", "lose_log", "kill_rank"),
        shape=RESERVES,
        seed=257,
    ),
    Mutant(
        "a joiner that copies while it is a member already promises when it has copied",
        "manager/machine",
        "if self.fetching and prepare.base is not None and self.known is None:",
        "if False:",
        favoured=LOSSES,
        shape=JOINS,
        seed=1648,
    ),
    Mutant(
        "who takes itself for a member heals",
        "lighthouse/job",
        "if self._member(group.name) is None and not was_member(group)]",
        "if self._member(group.name) is None]",
        favoured=("restart_lighthouse", "cut_control", "freeze_manager", "cut_up"),
        shape={"groups": 2, "ranks": 2, "minimum": 1, "lighthouses": 2, "microbatch_s": (0.1, 0.3), "spares": 1},
        seed=235,
    ),
    Mutant(
        "who comes during a recovery does not learn that a job runs",
        "lighthouse/changes",
        "            actions += self._park(now)\n            if self.recovery.complete:",
        "            if self.recovery.complete:",
        favoured=("lose_log", "suspend_group", "kill_rank"),
        shape={"groups": 3, "minimum": 1, "lighthouses": 1, "start_window_s": 3.0},
        seed=159,
    ),
)
