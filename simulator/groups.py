"""One incarnation of a group: the real group machine in a manager process, its ranks, and its stream."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import AskMembers, End, Kill, Note, Tell, ToRanks
from lightkeeper.manager.folding import Said
from lightkeeper.manager.machine import GroupMachine, RankView
from lightkeeper.manager.progress import STANDING
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.standing import Word
from lightkeeper.simulator.clock import Process
from lightkeeper.simulator.followers import Follower
from lightkeeper.simulator.network import Stream
from lightkeeper.simulator.nodes import Node

if TYPE_CHECKING:
    from lightkeeper.simulator.shape import Shape
    from lightkeeper.simulator.world import World

BACKOFF_S = (0.025, 0.25)
OWN_WORK = ("compute", "apply", "replay")  # in which a rank waits for nobody
PUSH_S = (0.0001, 0.0005)
SEES_EXIT_S = (0.001, 0.01)
SAID_LAST_S = 0.05
NAMED = (m.Welcome, m.Prepare, m.Activate)
NAMED_MAX = 8
WORD_S = (0.001, 0.2)
WORDS_S = 0.25  # by then all that are reached have answered


class GroupProcess(Process):
    """A manager with its ranks; they end together.

    Attributes:
        stream: the one in use, None while there is none.
        named: messages that carry a term or an epoch, taken or come too late: again, they have no effect.
        exit_code: how it ended, None while it has not.
        since: when it ended or was started.
    """

    def __init__(self, world: World, group: str, number: int) -> None:
        super().__init__(world.clock, f"{group}-i{number}")
        self.world, self.group, self.incarnation = world, group, f"{group}-i{number}"
        shape = world.shape
        self.settings = settings_for(group, shape)
        self.form_timeout_s = self.settings.timeouts.form_timeout_s
        self.machine = GroupMachine(self.settings, self.incarnation, f"{self.incarnation}:m", self.now)
        self.stream: Stream | None = None
        self.exit_code: int | None = None
        self.reason = ""
        self.since = self.clock.now
        self.named: deque[m.ToManager] = deque(maxlen=NAMED_MAX)
        self.out_of_memory: set[int] = set()
        self._address = 0
        self._heard = False
        self._stopped_since: dict[int, float] = {}
        self.ranks = [Follower(self, index) for index in range(shape.ranks)]
        size = self.settings.ranks_per_node
        self.nodes = [Node(self, i, range(i * size, (i + 1) * size)) for i in range(shape.nodes)]
        clock = self.clock
        clock.after(clock.uniform(0.0, 0.2), self._connect)
        clock.after(clock.uniform(0.0, 0.2), self._tick)
        for rank in self.ranks:
            clock.after(clock.uniform(0.0, 0.4), self._register, rank)

    def _register(self, rank: Follower) -> None:
        if not self.alive or self.sleeps(self._register, rank):
            return
        register = local.Register(token="t", rank=rank.index, pid=1, transfer=rank.address, progress="")
        self.act(self.machine.register(register, self.now))
        rank.start()

    # ------------------------------------------------------------ the stream

    def _connect(self) -> None:
        if not self.alive or self.sleeps(self._connect) or self.stream is not None:
            return
        self._heard = False
        self.stream = self.world.connect(self, self._address)
        self.act(self.machine.connected(self.now, self.place))

    @property
    def dismissed(self) -> bool:
        """Whether it had asked to leave and is let go of while the others wait: it ends, and the run does not."""
        stopped = self.machine.stopped
        return stopped is not None and stopped.ok and stopped.reason.startswith("asked to leave")

    @property
    def place(self) -> int:
        """Of the lighthouse in the list, from 1; 0 if there is no other (manager/addresses.py)."""
        return self._address + 1 if self.world.shape.lighthouses > 1 else 0

    def take(self, stream: Stream, message: m.ToManager) -> None:
        """A message of the lighthouse."""
        if not self.alive or self.sleeps(self.take, stream, message):
            return
        if stream is not self.stream:
            if isinstance(message, NAMED):
                self.named.append(message)  # it was under way on a stream that is gone
            return
        self._heard = self._heard or not isinstance(message, m.Refused)
        if isinstance(message, NAMED):
            self.named.append(message)
        actions = self.machine.received(message, self.now)
        self.world.checkers.received(self, message, actions)
        self.act(actions)

    def lost(self, stream: Stream) -> None:
        """The stream is over; another is opened, at the next address unless this one took us in."""
        if not self.alive or not stream.at_manager or self.sleeps(self.lost, stream):
            return
        stream.at_manager = False
        if stream is not self.stream:
            return
        self.stream = None
        self.act(self.machine.disconnected(self.now))
        if not self._heard:
            self._address = (self._address + 1) % self.world.shape.lighthouses
        self.clock.after(self.clock.uniform(*BACKOFF_S), self._connect)

    def reconnect(self) -> None:
        """Opens another stream; the old one lingers at the lighthouse for a while, half open."""
        old, self.stream = self.stream, None
        if old is None:
            return
        self.act(self.machine.disconnected(self.now))
        old.at_manager = False
        self.clock.after(self.clock.uniform(0.5, 10.0), old.lost_at_lighthouse)
        self._connect()

    # ------------------------------------------------------------ ranks

    def from_rank(self, index: int, message: local.FromRank) -> None:
        """What a rank says."""
        if len(self.nodes) > 1:
            self._node_of(index).takes(index, message)
        elif self.alive and not self.sleeps(self.from_rank, index, message):
            self.act(self.machine.rank_says(index, message, self.now))

    def ranks_say(self, said: list[Said]) -> None:
        """What ranks of a node said."""
        if self.alive and not self.sleeps(self.ranks_say, said):
            for one in said:
                for index in one.ranks:
                    self.act(self.machine.rank_says(index, cast(local.FromRank, one.message), self.now))

    def _node_of(self, index: int) -> Node:
        return self.nodes[index // self.settings.ranks_per_node]

    def rank_ended(self, index: int, code: int) -> None:
        """A rank's process is gone; its manager, or its node's agent, sees that in a moment."""
        told = self.hear_exit if len(self.nodes) == 1 else self._node_of(index).sees_exit
        self.clock.after(self.clock.uniform(*SEES_EXIT_S), told, index, code)

    def hear_exit(self, index: int, code: int) -> None:
        """The manager sees, or is told, that a rank's process is gone."""
        if self.alive and not self.sleeps(self.hear_exit, index, code):
            rank = self.ranks[index]
            self.act(self.machine.rank_ended(index, code, RankView(rank.shown_phase, rank.step, 0.0, 0.0), self.now))

    # ------------------------------------------------------------ actions

    def _as_watched(self, message: m.ToLighthouse) -> m.ToLighthouse:
        """Where progress is not watched, a beat does not say what is borne: nobody is left out for lagging."""
        if isinstance(message, m.Beat) and not self.world.shape.watched:
            return dataclasses.replace(message, borne_ms=0)
        return message

    def act(self, actions: list[Any]) -> None:
        """Carries out what the machine decided."""
        for action in actions:
            if isinstance(action, Tell):
                if self.stream is not None:
                    self.stream.up.send(self._as_watched(action.message))
            elif isinstance(action, ToRanks):
                for rank in self.ranks if action.rank is None else (self.ranks[action.rank],):
                    if rank.alive and len(self.nodes) > 1:
                        self._node_of(rank.index).tell(rank, action.message)
                    elif rank.alive:
                        self.push(rank, action.message)
            elif isinstance(action, Kill):
                for rank in self.ranks:
                    rank.die(-9)
            elif isinstance(action, End):
                self._end(action)
            elif isinstance(action, AskMembers):
                self._ask_members(action.membership)
            elif isinstance(action, Note) and self.world.traces:
                self.world.say(f"{self.incarnation}: {action.event}")
        self.world.checkers.obeyed(self)

    def push(self, rank: Follower, message: local.ToRank) -> None:
        """Something comes over a rank's socket."""
        rank.last_push_s = max(rank.last_push_s, self.clock.now + self.clock.uniform(*PUSH_S))
        self.clock.at(rank.last_push_s, rank.receive, message)

    def _ask_members(self, membership: Membership) -> None:
        """Each member's manager says its word by itself; all of them are in after a while, or missing."""
        words: dict[str, Word] = {}
        for member in membership.members:
            if member.group != self.group:
                self.clock.after(self.clock.uniform(*WORD_S), self._word_of, member.group, words)
        self.clock.after(WORDS_S, self._members_say, membership, words)

    def _word_of(self, name: str, words: dict[str, Word]) -> None:
        there, network = self.world.groups.get(name), self.world.network
        if there is None or not there.alive or there.frozen or network.apart((self.group, name)) is not None:
            return
        machine = there.machine
        words[name] = Word(there.incarnation, machine.known, machine.promised, machine.ending or "")

    def _members_say(self, membership: Membership, words: dict[str, Word]) -> None:
        if self.alive and not self.sleeps(self._members_say, membership, words):
            self.act(self.machine.members_say(membership, words, self.now))

    def _end(self, end: End) -> None:
        if not self.alive:
            return
        self.alive, self.exit_code, self.reason, self.since = False, end.exit_code, end.reason, self.clock.now
        self.world.say(f"{self.incarnation} ends with {end.exit_code}: {end.reason}")
        told = self.stream is not None and self.machine.in_touch and self.stream.comes_through
        if self.stream is not None:
            self.stream.manager_gone(orderly=True)
        self.clock.after(SAID_LAST_S, self._orphans)
        if self.machine.owes_word and not told:
            LastWords(self, self._address)
        else:
            self.world.ended(self)

    def _orphans(self) -> None:
        for rank in self.ranks:
            rank.die(exits.ORPHANED)

    def leave(self, reason: str) -> None:
        """Its launcher gets a signal."""
        if self.alive and not self.sleeps(self.leave, reason):
            self.act(self.machine.asked_to_leave(reason, self.now, by="launcher"))

    def kill_tree(self) -> None:
        """The host dies: manager and ranks at once, and nobody says anything."""
        if not self.alive:
            return
        self.alive, self.exit_code, self.reason, self.since = False, -9, "killed", self.clock.now
        for rank in self.ranks:
            rank.die(-9)
        if self.stream is not None:
            self.stream.manager_gone(orderly=False)
        self.world.ended(self)

    # ------------------------------------------------------------ time

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.sleeps(self._tick):
            return
        self.clock.after(min(self.machine.beat_s, self.world.shape.beat_s), self._tick)
        self.act(self.machine.tick({r.index: self._view(r) for r in self.ranks if r.alive}, self.now))

    def _view(self, rank: Follower) -> RankView:
        """What is seen of a rank from outside."""
        stalls = self.clock.now < rank.stalled_until
        if rank.frozen and not stalls:
            since = self._stopped_since.setdefault(rank.index, self.now)
        else:
            self._stopped_since.pop(rank.index, None)
            since = self.now
        waiting_s = self.clock.now - rank.since if rank.phase in STANDING else 0.0
        idle_s = self.clock.now - rank.since if rank.phase in OWN_WORK and self.world.shape.watched else 0.0
        return RankView(rank.shown_phase, rank.step, waiting_s, self.now - since, rank.pace.microbatch_us, idle_s)

    @property
    def slowness(self) -> float:
        """By how much a microbatch takes longer here than it might, for now."""
        slow, shape = self.world.shape.slow, self.world.shape
        turn = int(self.clock.now / shape.rotate_s) + self.world.names.index(self.group)
        return slow[turn % len(slow)] if slow else 1.0


class LastWords(Process):
    """A manager whose ranks are dead stays to tell a lighthouse, since members may wait for the word."""

    def __init__(self, process: GroupProcess, address: int) -> None:
        super().__init__(process.clock, process.name)
        self.process, self.group, self.incarnation = process, process.group, process.incarnation
        self._address = address
        self._until = self.clock.now + process.settings.outage_budget_s
        self.clock.after(process.settings.outage_budget_s, self._end)
        self._connect()

    def _connect(self) -> None:
        if self.alive:
            world = self.process.world
            self._stream = world.connect(self, self._address)
            place = self._address + 1 if world.shape.lighthouses > 1 else 0
            self._stream.up.send(self.process.machine.hello(place))

    def take(self, stream: Stream, message: m.ToManager) -> None:
        """A message of the lighthouse: that it knows, or that another is to be told."""
        self.process.machine.received(message, self.now)
        if self.process.machine.death_known:
            self._end()

    def lost(self, stream: Stream) -> None:
        """The stream is over: the next address."""
        if self.alive and stream.at_manager:
            stream.at_manager = False
            self._address = (self._address + 1) % self.process.world.shape.lighthouses
            self.clock.after(self.clock.uniform(*BACKOFF_S), self._connect)

    def _end(self) -> None:
        if self.alive:
            self.alive = False
            self._stream.manager_gone(orderly=True)
            self.process.world.ended(self.process)


def settings_for(group: str, shape: Shape) -> Settings:
    """What a group is told."""
    return Settings(
        group=group, groups=shape.groups, minimum=shape.minimum, ranks=shape.ranks, nnodes=shape.nodes, token="t",
        outage_budget_s=shape.budget_s, start_window_s=shape.start_window_s,
        quorum_wait_s=shape.quorum_wait_s,
        stall_floor_s=None if shape.watched else 0.99 * shape.budget_s,
        deal="speed" if shape.by_speed else "even",
        spares=shape.spares,
        role=shape.role_of(group),
    )  # fmt: skip
