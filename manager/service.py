"""The manager process: the group machine between the lighthouse's stream, the ranks' sockets and the clock."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from lightkeeper.errors import UsageError
from lightkeeper.events.schema import Event, ProcessEnded, ProcessStarted, Unauthorised
from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse.messages import ToManager
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager import exits, local
from lightkeeper.manager.actions import Action, AskMembers, Collect, DropKeys, End, Kill, Note, Tell, ToRanks
from lightkeeper.manager.addresses import Addresses, own_host
from lightkeeper.manager.ends import NO_MANAGER
from lightkeeper.manager.evidence.collector import Collector
from lightkeeper.manager.folders import remove_left_over
from lightkeeper.manager.folding import Said, by_node
from lightkeeper.manager.groupstate import group_state, words_of
from lightkeeper.manager.keystore import RemoteKeys
from lightkeeper.manager.link import LighthouseLink
from lightkeeper.manager.localranks import LocalRanks
from lightkeeper.manager.machine import GroupMachine, RankView
from lightkeeper.manager.nodestreams import NodeService, NodeStreams
from lightkeeper.manager.notice import Notice, watch_notice
from lightkeeper.manager.processes import Watched
from lightkeeper.manager.ranks import END_S
from lightkeeper.manager.settings import Settings
from lightkeeper.wire import SERVER_OPTIONS, join_address, metadata, split_address
from lightkeeper.words import Seldom, say

LOOK_S = 0.1  # between two looks at what the ranks do
FLUSH_S = 1.0


class ManagerService:
    """One group's manager.

    Args:
        settings: what the group was told.
        incarnation: name of this start of the group.
        socket_path: where the ranks' local socket is made.

    Attributes:
        notice_file: watched by this process; empty if a launcher watches it, or nobody.
        launcher: what started the ranks, if not we did, and they end with it.
    """

    def __init__(self, settings: Settings, incarnation: str, socket_path: Path) -> None:
        self.settings, self.incarnation = settings, incarnation
        self.notice_file = ""
        self.launcher: Watched | None = None
        self.events: EventLog | None = None
        self.ended: asyncio.Future[int]
        self.machine: GroupMachine
        self.link: LighthouseLink
        self.local = LocalRanks(socket_path, settings.token, settings.ranks_here, self)
        self.streams = NodeStreams(settings, self)
        self.collector = Collector(
            settings, socket_path.parent, self.local.pids, self.local.views, lambda: self.machine.exits, self._write,
            self.say,
        )  # fmt: skip
        self._ending = False
        self._seldom = Seldom()
        self._asked_again = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serves the group until it ends; returns the exit code."""
        s = self.settings
        remove_left_over()
        self.ended = asyncio.get_running_loop().create_future()
        if s.run_folder:
            self.events = EventLog(
                s.run_folder, f"manager {s.group}", job=s.job, group=s.group, incarnation=self.incarnation
            )
        host = own_host(s.host, s.lighthouse)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.keys = NodeService(s.token, s.job, self.stranger, self._state)
        self.keys.streams = self.streams
        self.keys.add_to(server)
        port = self._listen(server, host)
        self.machine = GroupMachine(s, self.incarnation, join_address(host, port), time.monotonic())
        await server.start()
        self._write(ProcessStarted(command=" ".join(sys.argv)[:1000], listens=self.machine.address))
        self.remote_keys = RemoteKeys(s.token, s.job, self.keys, self.machine)
        self.link = self._new_link()
        if s.groups == 1:
            self.say("one group: it trains, and nothing can heal it")
        await self.local.open()
        if self.notice_file:
            watch_notice(Path(self.notice_file), self.noticed, self.say)
        tasks = [asyncio.create_task(self._run_link()), asyncio.create_task(self._run_ticks())]
        try:
            return await self._until_ended(tasks)
        finally:
            for task in tasks:
                task.cancel()
            self.local.close()
            await self.remote_keys.close()
            await server.stop(grace=0)
            self.local.remove_files()

    async def finish(self) -> None:
        """After `run`: what was kept of the group's end is written; no next start need wait for it."""
        await self.collector.end()
        if self.events is not None:
            self.events.close()

    def _listen(self, server: grpc.aio.Server, host: str) -> int:
        """Where the agents were told to come, or at any port.

        Raises:
            UsageError: if nothing can listen there.
        """
        if not self.settings.manager:
            return server.add_insecure_port(join_address(host, 0))
        named, port = split_address(self.settings.manager)
        everywhere = "::" if ":" in named else "0.0.0.0"  # a host's own name may stand for its loopback interface
        try:
            return server.add_insecure_port(join_address(everywhere, port))
        except RuntimeError as error:
            raise UsageError(
                f"--manager {self.settings.manager}: cannot listen at port {port}, is it in use?"
            ) from error

    def _new_link(self, addresses: Addresses | None = None) -> LighthouseLink:
        s = self.settings
        return LighthouseLink(
            s.lighthouse, s.token, s.job,
            lambda place: self.act(self.machine.connected(time.monotonic(), place)),
            lambda: self.act(self.machine.disconnected(time.monotonic())),
            self._from_lighthouse, self.say, addresses,
        )  # fmt: skip

    async def _until_ended(self, tasks: list[asyncio.Task[None]]) -> int:
        awaited: list[asyncio.Future[Any]] = [self.ended, *tasks]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # a task that ends before the group does so by a bug, which is raised here
        code = await self.ended
        in_touch = self.machine.in_touch
        others_s = self.lease_s + (END_S if code == 0 else 0.0)  # in a group that ends well, ranks may take their time
        taken, _, _ = await asyncio.gather(
            self.link.flush(FLUSH_S), self.streams.close(others_s), self.collector.seen()
        )
        if not (in_touch and taken) and self.machine.owes_word:
            tasks[0].cancel()
            await self._stay_to_tell()
        if self.machine.last_words:
            self.say(self.machine.last_words)
        self._write(ProcessEnded(exit_code=code))
        return code

    async def _stay_to_tell(self) -> None:
        """The members that stand may wait for the word that this group is fenced: no lighthouse has heard it yet."""
        budget_s = self.settings.outage_budget_s
        self.say(f"stays for up to {budget_s:.0f} s to tell a lighthouse that this group is gone")
        self.link = self._new_link(self.link.addresses)
        telling = asyncio.create_task(self.link.run())
        asked = asyncio.create_task(self._asked_again.wait())
        try:
            async with asyncio.timeout(budget_s):
                while not self.machine.death_known and not telling.done() and not asked.done():
                    await asyncio.wait({telling, asked}, timeout=self.machine.beat_s, return_when="FIRST_COMPLETED")
        except TimeoutError:
            self.say("no lighthouse could be told; `lightkeeper fence` is the operator's word for it")
        finally:
            telling.cancel()
            asked.cancel()
            await asyncio.gather(telling, asked, return_exceptions=True)

    # ------------------------------------------------------------ actions

    def act(self, actions: list[Action]) -> None:
        """Carries out what the machine decided."""
        told: list[tuple[int | None, local.ToRank]] = []
        for action in actions:
            if isinstance(action, Tell):
                self.link.put(action.message)
            elif isinstance(action, ToRanks):
                told.append((action.rank, action.message))
                if isinstance(action.message, local.Abort) and action.message.recovery:
                    self._keep_dumps(action.message.recovery)
            elif isinstance(action, Collect):
                self.collector.collect(action)
            elif isinstance(action, Kill):
                self.collector.then(self.local.kill)  # and the agents theirs, since the group ends
            elif isinstance(action, End):
                self._tell_ranks(told)
                self._end(action)
            elif isinstance(action, Note):
                self._write(action.event)
            elif isinstance(action, AskMembers):
                self._start(self._ask_members(action.membership))
            elif isinstance(action, DropKeys):
                self.keys.keys.drop(action.below)
        self._tell_ranks(told)

    def _tell_ranks(self, told: list[tuple[int | None, local.ToRank]]) -> None:
        """Tells ranks something, in one message a node; the list is empty afterwards."""
        if not told:
            return
        s = self.settings
        here, *others = by_node(told, s.nnodes, s.ranks_per_node)
        told.clear()
        for said in here:
            self.local.send(cast(local.ToRank, said.message), said.ranks)
        for node, there in enumerate(others, 1):
            self.streams.tell(node, there)

    async def _ask_members(self, membership: Membership) -> None:
        words = await words_of(membership, self.settings.group, metadata(self.settings.token, self.settings.job))
        self.act(self.machine.members_say(membership, words, time.monotonic()))

    def _keep_dumps(self, epoch: str) -> None:
        """Of the groups that are left after a recovery the first has the dumps of all compared."""

        def compares() -> bool:
            known = self.machine.known
            return known is not None and known.slot_of(self.settings.group, self.incarnation) == 0

        self.collector.keep_dumps(epoch, compares)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, end: End) -> None:
        self._ending = True
        if end.exit_code != 0:
            self.say(f"ends with exit code {end.exit_code}: {end.reason}")
        elif end.reason == NO_MANAGER:  # no failure, but seldom what was meant
            self.say(end.reason)
        self.streams.end(end, self.first_exit, bool(self.machine.leaving))
        if not self.ended.done():
            self.ended.set_result(end.exit_code)

    # ------------------------------------------------------------ lighthouse

    def _from_lighthouse(self, message: ToManager) -> None:
        self.act(self.machine.received(message, time.monotonic()))

    async def _run_link(self) -> None:
        await self.link.run()
        if self.link.denied and not self._ending:
            self.machine.ending = self.link.denied
            self._end(End(exits.REFUSED, self.link.denied))
            self.local.kill()  # who waits for the ranks finds the reason said
        await self.ended

    # ------------------------------------------------------------ ranks

    def rank_registered(self, hello: local.Register) -> local.Registered:
        """A rank's socket stands."""
        self.act(self.machine.register(hello, time.monotonic()))
        s = self.settings
        return local.Registered(job=s.job, group=s.group, incarnation=self.incarnation, pid=os.getpid())

    def ranks_say(self, said: list[Said]) -> None:
        """What ranks said: rendezvous keys, and what the machine decides on, rank by rank."""
        now, actions = time.monotonic(), list[Action]()
        for one in said:
            for rank in one.ranks:
                if isinstance(one.message, local.SetKey | local.GetKey):
                    self.remote_keys.serve(one.message, partial(self._answer_key, rank))
                else:
                    actions += self.machine.rank_says(rank, cast(local.FromRank, one.message), now)
        self.act(actions)

    def _answer_key(self, rank: int, key: local.Key) -> None:
        self._tell_ranks([(rank, key)])

    def rank_ended(self, rank: int, exit_code: int | None, view: RankView | None) -> None:
        """A rank's process ended."""
        self._mind_launcher()
        self.act(self.machine.rank_ended(rank, exit_code, view, time.monotonic()))

    def _mind_launcher(self) -> None:
        """Ranks that the kernel kills since their launcher is gone are not to blame."""
        if self.launcher is not None and (how := self.launcher.how_it_ended()):
            self.node_gone(f"the launcher of the group's ranks, {how}", 0)

    def node_gone(self, cause: str, node: int) -> None:
        """A node is gone, and its ranks with it."""
        self.act(self.machine.node_gone(cause, node * self.settings.ranks_per_node, time.monotonic()))

    def gives_up(self, reason: str) -> None:
        """What is needed for a start did not come."""
        self.act(self.machine.gives_up(reason, time.monotonic()))

    @property
    def lease_s(self) -> float:
        """As the lighthouse has it."""
        return self.machine.lease_s

    @property
    def first_exit(self) -> int | None:
        """What the first rank that ended before the group did ended with, negative for a signal; None if none did."""
        return next(iter(self.machine.exits.values()), None)

    @property
    def why(self) -> str:
        """Why the group ended."""
        return self.machine.ending or ""

    @property
    def ends(self) -> bool:
        """Whether the group is about to end."""
        return self._ending

    def stranger(self, peer: str, what: str) -> None:
        """Somebody without the token was refused."""
        if (line := self._seldom.lets(f"refused {peer}: wrong or missing token")) is not None:
            self.say(line)
            self._write(Unauthorised(peer=peer, what=what))

    def is_complete(self) -> bool:
        """Whether all ranks have come."""
        return len(self.machine.registered) == self.settings.ranks

    def asked_to_leave(
        self, reason: str, by: str = "launcher", deadline_s: float | None = None, notice: bool = False
    ) -> None:
        """The launcher or an agent got a signal, or a node of another agent had notice (then `by` is empty).

        Args:
            reason: which signal, or whose notice.
            by: who got it.
            deadline_s: as in `GroupMachine.asked_to_leave`.
            notice: the signal is one that only gives notice: the next one is not a second one.
        """
        if notice:
            by = ""
        if notice and self._ending:
            return
        if self._ending:
            self._asked_again.set()
            return
        self.act(self.machine.asked_to_leave(reason, time.monotonic(), deadline_s, by))

    def noticed(self, notice: Notice) -> None:
        """The notice file is there."""
        if notice.problem:
            self.say(f"the notice in {self.settings.notice_file}: {notice.problem}")
        reason = f"notice in {self.settings.notice_file}"
        self.act(self.machine.asked_to_leave(reason, time.monotonic(), notice.deadline_s))

    def _state(self) -> Any:
        views = [*self._views().values()]
        phase = next((v.phase for v in views if v.phase == "compute"), views[0].phase if views else "")
        return group_state(self.machine, phase, self.link.welcomed_at, time.monotonic())

    def _views(self) -> dict[int, RankView]:
        return {**self.local.views(), **self.streams.nodes.views()}

    # ------------------------------------------------------------ time and words

    async def _run_ticks(self) -> None:
        while True:
            self.act(self.machine.tick(self._views(), time.monotonic()))
            self.local.look()
            self._mind_launcher()
            self.streams.tick()
            await asyncio.sleep(min(self.machine.beat_s, LOOK_S))

    def _write(self, event: Event) -> None:
        if self.events is not None:
            self.events.write(event)

    def say(self, line: str) -> None:
        """One line for the operator."""
        say(f"manager {self.settings.group}: {line}")


def new_incarnation() -> str:
    """A name that no other start of any group has."""
    return f"{int(time.time()):x}-{secrets.token_hex(4)}"
