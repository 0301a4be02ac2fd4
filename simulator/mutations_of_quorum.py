"""The rules of a job that ends for want of groups that are undone one by one, as in `mutations`."""

from __future__ import annotations

from lightkeeper.simulator.mutations import Mutant

FEW = {"groups": 4, "minimum": 3, "lighthouses": 1, "quorum_wait_s": 1.0, "budget_s": 20.0}
THEY_DIE = ("kill_rank", "kill_group", "kill_several", "kill_donor")

OF_QUORUM: tuple[Mutant, ...] = (
    Mutant(
        "the lowest slot keeps the last step, whatever it holds",
        "lighthouse/endings",
        "return next(name for name in concluded.members if last[name] == concluded.entry)",
        "return concluded.members[0]",
        favoured=THEY_DIE,
        shape=FEW,
        seed=25,
    ),
    Mutant(
        "a job ends below its minimum though an epoch that may be in force is unheard",
        "lighthouse/changes",
        "if unheard(self.newest, promises) is not None or not self._may_leave_out():",
        "enough = self.config is not None and len(recovery.asked) >= self.config.minimum\n"
        "        if (enough and unheard(self.newest, promises) is not None) or not self._may_leave_out():",
        favoured=("leave", "cut_control", "fail_reduces", "kill_group", "freeze_group"),
        shape={**FEW, "groups": 3, "minimum": 2},
        seed=105,
    ),
    Mutant(
        "a lighthouse that does not reign ends a job below its minimum",
        "lighthouse/job",
        "return self.reigns or self.newest is None",
        "few = self.config is not None and len(self._participants()) < self.config.minimum\n"
        "        return self.reigns or self.newest is None or few",
        favoured=("lose_log", "cut_control", "kill_group"),
        shape={**FEW, "groups": 3, "minimum": 2, "lighthouses": 2},
        seed=246,
    ),
)
