"""What must hold in every history, checked after every event; apart from the world, so that neither hides the other."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated, Promised
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.names import Entry, Epoch

if TYPE_CHECKING:
    from sim_job import GroupProcess, Job
    from sim_rank import Rank


class Checkers:
    """I1, I3, I4, I5 by name."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.commits: dict[int, dict[str, Entry]] = defaultdict(dict)
        self.memberships: dict[Epoch, tuple[str, ...]] = {}
        self.known: dict[str, Epoch] = {}
        self.promised: dict[str, int] = {}
        self.highest = 0
        self.last_commit_s = 0.0
        self.adopted = 0

    # ------------------------------------------------------------ while it runs

    def committed(self, rank: Rank) -> None:
        assert rank.newest is not None
        entry, total = rank.newest
        self.last_commit_s = self.job.clock.now
        self.job.say(f"{rank.group}/{rank.index} commits {entry}")
        summed = [k for _, k in total.microbatches]
        wanted = list(range(self.job.total(rank.step)))
        assert sorted(summed) == wanted, f"I5: {entry} summed {total.microbatches}"
        assert entry.step == rank.step, f"{rank.group} commits {entry} as its step {rank.step}"
        if rank.index:
            before = self.commits[rank.step].get(rank.group, entry)
            assert before == entry, f"I4: ranks of {rank.group} committed {before} and {entry}"
        if rank.plan is not None and rank.plan.epoch != entry.epoch.number:
            self.adopted += 1
        self.commits[rank.step][rank.group] = entry

    def obeyed(self, process: GroupProcess) -> None:
        """A manager has taken an event."""
        group, machine = process.group, process.machine
        assert machine.promised >= self.promised.get(group, 0), (
            f"I3: {group} promised {machine.promised} after {self.promised[group]}"
        )
        self.promised[group] = machine.promised
        if machine.known is None:
            return
        epoch = machine.known.epoch
        if group in self.known:
            before = self.known[group]
            assert epoch.number >= before.number and epoch.term >= before.term, (
                f"I3: {group} goes from {before} to {epoch}"
            )
        members = self.memberships.setdefault(epoch, machine.known.groups)
        assert members == machine.known.groups, f"I3: {epoch} means {members} and {machine.known.groups}"
        self.known[group] = epoch

    def logged(self, record: Any) -> None:
        if isinstance(record, Promised):
            assert record.number > self.highest, f"I3: epoch {record.number} after {self.highest}"
            self.highest = record.number
        elif isinstance(record, Activated):
            self.highest = max(self.highest, record.membership.epoch.number)

    def spoken(self, disk: JobHistory, message: m.ToManager) -> None:
        if isinstance(message, m.Prepare):
            assert message.epoch.number <= disk.highest, f"{message.epoch} is spoken of but not logged"
        elif isinstance(message, m.Activate):
            assert disk.membership == message.membership, f"{message.membership.epoch} is spoken of but not logged"

    # ------------------------------------------------------------ at the end

    def at_the_end(self) -> list[str]:
        """Groups that reached the end of the run; their histories must be one and the same."""
        job = self.job
        good = [g for g in job.groups.values() if g.exit_code == 0 and g.ranks[0].step == job.until]
        states = {rank.state for g in good for rank in g.ranks}
        assert len(states) <= 1, f"I4: {len(states)} different states at the end"
        for state in states:
            for step, (entry, _) in enumerate(state):
                assert entry.step == step, f"I1: step {step} is {entry}"
        for g in job.groups.values():  # who left, or died, committed the same but perhaps for its newest entry
            for rank in g.ranks:
                for state in states:
                    common = rank.state[: max(0, len(rank.state) - 1)]
                    assert state[: len(common)] == common, f"I1: {g.group} committed other final entries"
        return [g.group for g in good]
