"""Everything of one history: clock, network, lighthouses, groups and who starts them again. No faults, no checks."""

from __future__ import annotations

from collections.abc import Callable

from lightkeeper.lighthouse.names import Epoch
from lightkeeper.manager import exits, local
from lightkeeper.simulator.checkers import Checkers
from lightkeeper.simulator.checkpoints import Checkpoints
from lightkeeper.simulator.clock import Clock
from lightkeeper.simulator.collectives import Net
from lightkeeper.simulator.groups import GroupProcess, LastWords
from lightkeeper.simulator.lighthouses import Lighthouse
from lightkeeper.simulator.network import Network, Stream
from lightkeeper.simulator.ranks import Rank
from lightkeeper.simulator.shape import Shape
from lightkeeper.simulator.state import Arithmetic

AWAY_S = (5.0, 15.0)  # until a group that was asked to leave comes back


class World:
    """One history.

    Args:
        seed: of all its randomness.
        shape: what it is run with.
        traces: whether it keeps a transcript, which makes it slow.

    Attributes:
        transfers: a living rank by the address of its transfer server.
        failing: probability that a reduce fails on a rank now.
        form_failing: probability that a process group does not form now, half of them by hanging.
        copy_failing: probability that a transfer breaks off now.
        done: whether a group has ended the run in good order, or said that the job must stop: nothing starts again.
        stopped: why the job must stop.
        restarts: how often a person had to start the job anew.
        words: how often a person said who is gone.
        longest_still_s: the longest time for which a fault has something stand still.
    """

    def __init__(self, seed: int, shape: Shape, traces: bool = False) -> None:
        self.clock = Clock(seed)
        self.seed, self.shape, self.traces = seed, shape, traces
        self.trace: list[str] = []
        self.network = Network(self.clock)
        self.arithmetic = Arithmetic()
        self.failing = self.form_failing = self.copy_failing = 0.0
        self.transfers: dict[str, Rank] = {}
        self.nets: dict[tuple[int, int, str, int], Net] = {}
        self.done = False
        self.stopped = ""
        self.restarts = self.words = 0
        self.longest_still_s = 0.0
        self.after_event: Callable[[], None] | None = None
        self._serials: dict[tuple[Epoch, int, int], int] = {}
        self._stream_number = 0
        self.checkers = Checkers(self)
        self.names = tuple(f"g{i}" for i in range(shape.groups + shape.surplus))
        self.lighthouses = [Lighthouse(self, index) for index in range(shape.lighthouses)]
        self.incarnations = dict.fromkeys(self.names, 0)
        self.checkpoints = Checkpoints(self)
        self.groups: dict[str, GroupProcess] = {}
        late = self.names[shape.groups - 1]
        for name in self.names:
            if name != late:
                self.start_group(name)
        self.clock.after(shape.late_s, self.start_group, late)

    # ------------------------------------------------------------ what happens

    def start_group(self, name: str) -> None:
        """Starts a group, as a new incarnation, unless it runs or the job is over."""
        running = self.groups.get(name)
        if self.done or (running is not None and running.alive):
            return
        self.incarnations[name] += 1
        self.say(f"{name} is started, for the {self.incarnations[name]}. time")
        self.groups[name] = GroupProcess(self, name, self.incarnations[name])

    def operator_speaks(self) -> bool:
        """A person tells every lighthouse whose processes are gone, which is so; returns whether there was a word."""
        alive = {process.incarnation for process in self.groups.values() if process.alive}
        spoke = False
        for lighthouse in self.lighthouses:
            machine = lighthouse.machine
            asked = () if machine.newest is None else (machine.newest, *machine.prepared, *machine.foreign)
            for member in (one for epoch in asked if lighthouse.up and not lighthouse.frozen for one in epoch.members):
                if member.incarnation not in alive and member.incarnation not in lighthouse.machine.dead:
                    spoke = lighthouse.fence(member.group) or spoke
        self.words += spoke
        return spoke

    def start_all_again(self) -> None:
        """A person gives the job up as it stands, and starts all of its groups anew."""
        self.say("all groups are ended by hand")
        self.restarts += 1
        for process in list(self.groups.values()):
            process.kill_tree()

    def ended(self, process: GroupProcess) -> None:
        """A group's processes are gone: whoever watches the nodes starts it again, unless its work is done."""
        dismissed, word = process.dismissed, process.machine.stopped
        stopped = word is not None and not word.quorum_lost  # else whoever watches starts the whole job again
        finished = process.exit_code == 0 and process.ranks[0].step == self.shape.until and not dismissed
        if finished or (stopped and not dismissed) or process.exit_code == exits.STOPPED:
            self.done = True
            self.stopped = "" if finished else process.reason
        if not self.done:
            left = process.exit_code in (0, exits.ASKED)
            seconds = self.clock.uniform(*(AWAY_S if left else self.shape.restart_s))
            self.clock.after(seconds, self.start_group, process.group)

    def connect(self, process: GroupProcess | LastWords, address: int) -> Stream:
        """A stream from a manager to the lighthouse at this place of the list (which is a ring)."""
        self._stream_number += 1
        lighthouse = self.lighthouses[address % len(self.lighthouses)]
        return Stream(self.network, process, lighthouse, self._stream_number)

    def run(self, seconds: float) -> bool:
        """Until every group has ended for good, or so long; returns whether all have."""
        until = self.clock.now + seconds
        while self.clock.now < until and not self.over:
            self.clock.step()
            if self.after_event is not None:
                self.after_event()
        return self.over

    @property
    def over(self) -> bool:
        """Whether nothing will happen any more."""
        return self.done and not any(g.alive for g in self.groups.values() if g.machine.known is not None)

    # ------------------------------------------------------------ what is so

    def total(self, step: int) -> int:
        """Microbatches of a step; none after the last."""
        return 0 if step >= self.shape.until else self.shape.microbatches + step % 2

    def net(self, plan: local.Plan, index: int) -> Net:
        """The process group of an epoch and a rank index."""
        key = (plan.epoch, plan.term, plan.lighthouse, index)
        net = self.nets.get(key)
        if net is None:
            net = self.nets[key] = Net(self, self.checkers.epoch_of(plan), plan.members)
        self.checkers.one_membership(plan, net.members)
        return net

    def reaches(self, here: Rank, there: Rank) -> bool:
        """Whether one rank can fetch from another."""
        a, b = here.group.group, there.group.group
        return there.alive and not there.frozen and not self.network.is_cut(a, b) and not self.network.is_cut(b, a)

    def serial_of(self, epoch: Epoch, step: int, attempt: int) -> int:
        """A number for the try at a step, the same for every rank index."""
        return self._serials.setdefault((epoch, step, attempt), len(self._serials) + 1)

    def forming(self) -> str:
        """What becomes of a process group all of whose members are there: ``forms``, ``breaks`` or ``hangs``."""
        if not self.form_failing or not self.clock.chance(self.form_failing):
            return "forms"
        return "hangs" if self.clock.chance(0.3) else "breaks"

    def reduce_fails(self) -> bool:
        """Whether this rank's reduce fails now."""
        return self.failing > 0 and self.clock.chance(self.failing)

    def copy_breaks(self) -> bool:
        """Whether this transfer breaks off now."""
        return self.copy_failing > 0 and self.clock.chance(self.copy_failing)

    def say(self, line: str) -> None:
        """A line of the transcript."""
        if self.traces:
            self.trace.append(f"{self.clock.now:9.3f}  {line}")
