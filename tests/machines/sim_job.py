"""A lighthouse and groups in one simulated network: the world of a history, without faults and without checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim_checkers import Checkers
from sim_clock import Clock, Way
from sim_rank import Rank
from sim_reduce import Net, Sum

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated, Close, Ended, Promised, Rise, Send, Superseded
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.names import Entry, Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import End, Kill, Tell, ToRanks
from lightkeeper.manager.machine import GroupMachine, RankView
from lightkeeper.manager.settings import Settings

LEASE_S = 2.0


class Stream:
    """Both ways between a manager and the lighthouse; `break_it` loses what is under way."""

    def __init__(self, job: Job, process: GroupProcess, number: int) -> None:
        self.job, self.process, self.number, self.open = job, process, number, True
        self.up = Way(job.clock, lambda message: job.lighthouse.take(self, message))
        self.down = Way(job.clock, lambda message: process.take(self, message))

    def break_it(self) -> None:
        self.up.broken = self.down.broken = True
        clock = self.job.clock
        clock.after(clock.uniform(0.001, 0.05), lambda: self.job.lighthouse.lost(self))
        clock.after(clock.uniform(0.001, 0.05), lambda: self.process.lost(self))

    def close(self) -> None:
        """In order: what was sent before still arrives."""
        self.up.finish(lambda: self.job.lighthouse.lost(self))
        self.down.finish(lambda: self.process.lost(self))


class Lighthouse:
    """The machine with its disk; a restart keeps the disk or starts with an empty one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.starts = 0
        self.up = False
        self.frozen_until = 0.0
        self._waiting: list[Any] = []
        self.start(JobHistory(), "lh0")
        job.clock.after(0.1, self._tick)

    def start(self, disk: JobHistory, name: str) -> None:
        self.starts += 1
        self.disk, self.name, self.up = disk, name, True
        self.streams: dict[int, Stream] = {}
        copy = JobHistory(disk.highest, disk.membership, list(disk.prepared), disk.reigns)
        self.machine = JobMachine("job", Term(self.starts, name), copy, Bounds(LEASE_S, 0.2), self.job.clock.now)

    def stop(self) -> None:
        self.up = False
        for stream in list(self.streams.values()):
            stream.break_it()
        self.streams.clear()

    def accept(self, stream: Stream) -> None:
        self.streams[stream.number] = stream

    def take(self, stream: Stream, message: m.ToLighthouse) -> None:
        if self._defer(lambda: self.take(stream, message)) or stream.number not in self.streams:
            return
        name = stream.process.group
        self.act(self.machine.received(stream.number, name, message, self.job.clock.now))

    def lost(self, stream: Stream) -> None:
        if self._defer(lambda: self.lost(stream)):
            return
        if self.streams.pop(stream.number, None) is not None:
            self.act(self.machine.disconnected(stream.number, self.job.clock.now))

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.job.checkers.spoken(self.disk, action.message)
                if (stream := self.streams.get(action.connection)) is not None:
                    stream.down.send(action.message)
            elif isinstance(action, Close):
                if (stream := self.streams.get(action.connection)) is not None:
                    stream.close()
            elif isinstance(action, Promised | Activated | Ended | Superseded):
                self.disk.apply(action)
                self.job.checkers.logged(action)
                self.job.say(f"lighthouse logs {action}")
            elif isinstance(action, Rise):
                self.starts = max(self.starts, action.term.number)
            else:
                self.job.say(f"lighthouse: {action.kind} {action.fields}")

    def _defer(self, event: Any) -> bool:
        """While it is frozen, what arrives is kept for later."""
        if self.job.clock.now < self.frozen_until:
            self.job.clock.at(self.frozen_until, event)
            return True
        return False

    def _tick(self) -> None:
        self.job.clock.after(0.1, self._tick)
        if self.up and self.job.clock.now >= self.frozen_until:
            self.act(self.machine.tick(self.job.clock.now))


class GroupProcess:
    """One incarnation of a group: its manager and its ranks."""

    def __init__(self, job: Job, group: str) -> None:
        self.job, self.group = job, group
        settings = Settings(
            group=group, groups=len(job.names), minimum=1, ranks=job.width, token="t", outage_budget_s=60,
        )  # fmt: skip
        self.machine = GroupMachine(settings, f"{group}-i1", f"{group}:1", job.clock.now)
        self.alive = True
        self.stream: Stream | None = None
        self.exit_code: int | None = None
        self.reason = ""
        self.frozen_until = 0.0
        self.ranks: list[Rank] = []
        for index in range(job.width):
            self.ranks.append(
                Rank(job, group, index, lambda x, i=index: self._from_rank(i, x), lambda c, i=index: self._ended(i, c))
            )
        clock = job.clock
        clock.after(clock.uniform(0, 0.3), self._connect)
        clock.after(clock.uniform(0, 0.2), self._tick)
        for rank in self.ranks:
            clock.after(clock.uniform(0, 0.5), lambda r=rank: self._register(r))

    def _register(self, rank: Rank) -> None:
        register = local.Register(token="t", rank=rank.index, pid=1, transfer=f"{self.group}:{rank.index}", progress="")
        self.act(self.machine.register(register, self.job.clock.now))
        self._from_rank(rank.index, local.Ready(signature={}, total=self.job.total(0)))

    def _connect(self) -> None:
        if not self.alive:
            return
        if not self.job.lighthouse.up:
            self.act(self.machine.connected(self.job.clock.now))
            self.act(self.machine.disconnected(self.job.clock.now))
            self.job.clock.after(self.job.clock.uniform(0.05, 1.0), self._connect)
            return
        self.stream = self.job.stream(self)
        self.act(self.machine.connected(self.job.clock.now))

    def take(self, stream: Stream, message: m.ToManager) -> None:
        if self._defer(lambda: self.take(stream, message)):
            return
        if self.alive and stream is self.stream:
            self.act(self.machine.received(message, self.job.clock.now))

    def lost(self, stream: Stream) -> None:
        if self._defer(lambda: self.lost(stream)):
            return
        if self.alive and stream is self.stream:
            self.stream = None
            self.act(self.machine.disconnected(self.job.clock.now))
            self.job.clock.after(self.job.clock.uniform(0.02, 0.5), self._connect)

    def _from_rank(self, index: int, message: local.FromRank) -> None:
        if self._defer(lambda: self._from_rank(index, message)):
            return
        if self.alive:
            self.act(self.machine.rank_says(index, message, self.job.clock.now))

    def _ended(self, index: int, code: int) -> None:
        def tell() -> None:
            if self.alive and not self._defer(tell):
                view = RankView(self.ranks[index].phase, self.ranks[index].step, 0, 0)
                self.act(self.machine.rank_ended(index, code, view, self.job.clock.now))

        self.job.clock.after(self.job.clock.uniform(0.001, 0.01), tell)

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                if self.stream is not None:
                    self.stream.up.send(action.message)
            elif isinstance(action, ToRanks):
                for rank in self.ranks if action.rank is None else [self.ranks[action.rank]]:
                    delay = self.job.clock.uniform(0.0001, 0.0002)
                    self.job.clock.after(delay, lambda r=rank, x=action.message: r.receive(x))
            elif isinstance(action, Kill):
                for rank in self.ranks:
                    rank.die(-9)
            elif isinstance(action, End):
                self.alive, self.exit_code, self.reason = False, action.exit_code, action.reason
                self.job.say(f"{self.group} ends with {action.exit_code}: {action.reason}")
                if self.stream is not None:
                    self.stream.close()
        self.job.checkers.obeyed(self)

    def leave(self, reason: str) -> None:
        self.act(self.machine.asked_to_leave(reason, self.job.clock.now))

    def kill_tree(self) -> None:
        self.alive = False
        for rank in self.ranks:
            rank.die(-9)
        if self.stream is not None:
            self.stream.break_it()

    def _defer(self, event: Any) -> bool:
        if self.job.clock.now < self.frozen_until:
            self.job.clock.at(self.frozen_until, event)
            return True
        return False

    def _tick(self) -> None:
        if not self.alive:
            return
        self.job.clock.after(0.2, self._tick)
        if self.job.clock.now < self.frozen_until:
            return
        now = self.job.clock.now
        views = {
            r.index: RankView(r.phase, r.step, now - r.since if r.phase in ("reduce", "closing") else 0.0, 0.0)
            for r in self.ranks
            if r.alive
        }
        self.act(self.machine.tick(views, now))


class Job:
    """Everything of one history.

    Args:
        seed: of all its randomness.
        groups: number of groups.
        width: ranks per group.
        until: steps of the run.
        microbatches: of each step.
    """

    def __init__(self, seed: int, groups: int = 3, width: int = 1, until: int = 12, microbatches: int = 6) -> None:
        self.clock = Clock(seed)
        self.seed, self.width, self.until, self.microbatches = seed, width, until, microbatches
        self.names = tuple(f"g{i}" for i in range(groups))
        self.again = 0.02
        self.failing = 0.0
        self.slowness = 1.0
        self.checkers = Checkers(self)
        self.nets: dict[tuple[int, str, int], Net] = {}
        self.trace: list[str] = []
        self._streams = 0
        self.lighthouse = Lighthouse(self)
        self.groups = {name: GroupProcess(self, name) for name in self.names}

    def total(self, step: int) -> int:
        """A ramp, so that a wrong total shows."""
        return 0 if step >= self.until else self.microbatches + step % 2

    def net(self, plan: local.Plan, index: int) -> Net:
        key = (plan.epoch, f"{plan.term}@{plan.lighthouse}", index)
        if key not in self.nets:
            self.nets[key] = Net(self.clock, plan.members)
        assert self.nets[key].members == plan.members, f"epoch {plan.epoch} has two memberships"
        return self.nets[key]

    def stream(self, process: GroupProcess) -> Stream:
        self._streams += 1
        stream = Stream(self, process, self._streams)
        self.lighthouse.accept(stream)
        return stream

    def fetch(self, donor: str, index: int, name: Entry) -> tuple[Entry, Sum] | None:
        rank = self.groups[donor].ranks[index]
        return rank.newest if rank.alive and rank.newest is not None and rank.newest[0] == name else None

    def reduce_fails(self) -> bool:
        return self.failing > 0 and self.clock.random.random() < self.failing

    def say(self, line: str) -> None:
        self.trace.append(f"{self.clock.now - 100:8.3f}  {line}")

    def run_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Until something is so, which must happen within so long."""
        until = self.clock.now + seconds
        while not condition():
            assert self.clock.now < until and self.clock.step(), "it did not happen"

    def run(self, seconds: float) -> bool:
        """Until every group has ended, or so long; returns whether all have."""
        until = self.clock.now + seconds
        while self.clock.now < until and any(g.alive for g in self.groups.values()):
            self.clock.step()
        return not any(g.alive for g in self.groups.values())
