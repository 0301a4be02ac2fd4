"""Carries out what the machine says, and tells it what happens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from lightkeeper.checkpoint.files import write_whole
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.events.of_checkpoints import CheckpointLoaded
from lightkeeper.events.of_supervisor import KINDS_OF_SUPERVISOR
from lightkeeper.events.reader import follow
from lightkeeper.events.schema import Committed, GroupLost, Joined, ProcessStarted
from lightkeeper.events.writer import EventLog
from lightkeeper.supervisor import actions as a
from lightkeeper.supervisor.aside import Aside
from lightkeeper.supervisor.clusters.interface import (
    CannotStart,
    Cluster,
    Exited,
    Happening,
    NodeCame,
    NodeLeaving,
    NodeLost,
)
from lightkeeper.supervisor.jobfile import JobFile
from lightkeeper.supervisor.jobshape import check_shape, shape_of
from lightkeeper.supervisor.lighthouse import MISSING_LONG_S, LighthouseProcess
from lightkeeper.supervisor.lighthouse import NAME as LIGHTHOUSE
from lightkeeper.supervisor.machine import Supervisor
from lightkeeper.supervisor.nodechecks import NodeChecks
from lightkeeper.supervisor.notify.message import Message
from lightkeeper.supervisor.places import AT_WORK
from lightkeeper.supervisor.requeue import requeue
from lightkeeper.supervisor.runfiles import STATE, TOKEN, damaged, read_state, token_of
from lightkeeper.supervisor.saying import sentence
from lightkeeper.supervisor.starts import Starts
from lightkeeper.words import say

TICK_S = 0.5
PROGRESS_S = 60.0
ONE_WORD_S = 1.0
GONE_S_MAX = 10.0  # for what is killed at the start to be gone


Seen: TypeAlias = CheckpointLoaded | Committed | GroupLost | Joined | ProcessStarted  # what it looks for in the log


class Service:
    """One job's supervisor.

    Args:
        job: what the job file says.
        folder: of the run, absolute.
        cluster: where it runs.
        names: of the nodes.
        aside: who is in quarantine, and who goes there.
        tell: tells a human.
    """

    def __init__(
        self, job: JobFile, folder: Path, cluster: Cluster, names: Sequence[str],
        aside: Aside, tell: Callable[[Message], None],
    ) -> None:  # fmt: skip
        self.job, self.folder, self.cluster = job, folder, cluster
        self.machine = Supervisor(job, names, aside.excluded(names), time.monotonic())
        self._aside, self._tell = aside, tell
        self._log = EventLog(folder, "supervisor", job=job.name)
        self._log.write(ProcessStarted(command=shlex.join(sys.argv)))
        self._token, self._token_is_new = token_of(folder)
        self._lighthouse = LighthouseProcess(
            job.lighthouse, job.name, self._token, folder, cluster, self._environment(), self._node_for_lighthouse,
            lambda: not self._starts.running,
        )  # fmt: skip
        self._starts = Starts(job, folder, cluster, self._environment())
        self._lost: dict[str, str] = {}  # nodes, and why
        self._checks = NodeChecks(job, folder, cluster, self._environment())
        self._stamp, self._changes = aside.stamp(), 0  # of the quarantine: as it was read, and by us
        self._keeping = asyncio.Lock()
        self._loaded = (-1, -1)  # the newest checkpoint that was loaded, and in which start of the run
        self._said_s, self._said_step = time.monotonic(), -1  # when it was said how far the run has come
        self._term_s = float("-inf")
        self._terms = 0  # how often an operator has asked for an end
        self._over: asyncio.Future[a.Over] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_ends: set[tuple[str, str]] = set()  # before the first order of this supervisor
        self._begun = asyncio.Event()  # what an earlier supervisor left is taken up
        self._happened: asyncio.Queue[Happening] = asyncio.Queue()
        self._reading = threading.Event()

    async def run(self) -> int:
        """Until the run is over; the exit code."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        for path in (self.job.checkpoints, "logs"):
            (self.folder / path).mkdir(parents=True, exist_ok=True)  # preflight looks for room in the first
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self._signalled, number)
        nodes = len(self.machine.pool.nodes)
        say(f"lightkeeper: {self.job.name}: {self.job.groups} groups on {nodes} nodes, in {self.folder}")
        ends = not (self.folder / STATE).exists()  # whether nothing can run of it that is to go on
        try:
            running = await self.cluster.open(self._told)
            ends = not running
            await self._take_up(running)
        except BaseException as error:
            await self.cluster.close(end=ends)
            if isinstance(error, OSError):
                raise ToldError(f"{error.filename or self.folder}: {error.strerror or error}") from error
            raise
        threading.Thread(target=self._read, args=(loop,), name="events", daemon=True).start()
        self._spawn(self._hear())
        self._spawn(self._ticks())
        self._spawn(self._lighthouse.mind())
        ends = True
        try:
            await self._do(self.machine.start(time.monotonic()))
            self._begun.set()
            over = await self._over
        except Exception as error:
            ends = isinstance(error, ToldError)
            if not ends:
                say("lightkeeper: a bug in the supervisor; the job goes on, and the same command takes it up")
            raise
        finally:
            self._reading.set()
            for task in list(self._tasks):
                task.cancel()
            await self._keep()
            await self.cluster.close(end=ends)
        say(f"lightkeeper: {over.reason}")
        return over.code

    async def _take_up(self, running: Sequence[tuple[str, str]]) -> None:
        """What an earlier supervisor left goes on; what has ended since is judged; what it did not know is ended."""
        if running and self._token_is_new:
            raise ToldError(
                f"{self.folder / TOKEN} is gone, and what runs knows it: put it back, or wait until all has ended "
                f"({self.job.budget.orphan_s:g} s)"
            )
        state = read_state(self.folder / STATE)
        known: dict[str, list[str]] = {}
        if state is not None:
            try:
                check_shape(self.job, state["shape"], running)
                if running and state["token"] != self._token_mark():
                    raise ToldError(
                        f"{self.folder / TOKEN} is not the one that what runs was told: put that back, or wait until "
                        f"all has ended ({self.job.budget.orphan_s:g} s)"
                    )
                self.machine.take_up(state["machine"], time.monotonic())
                known = {name: list(one.nodes) for name, one in self.machine.groups.items() if one.state == AT_WORK}
                self._starts.take_up(state, known)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise damaged(self.folder / STATE, error) from error
        strangers = []
        for node, name in running:
            if name == LIGHTHOUSE and self._lighthouse.own and self._lighthouse.taken_up(node):
                continue
            if node not in known.get(name, []):
                say(f"lightkeeper: {name} on {node} is ended: {self.folder / STATE} does not tell of it")
                await self.cluster.kill(node, name)
                strangers.append((node, name))
        until = time.monotonic() + GONE_S_MAX
        while not self._told_ends.issuperset(strangers) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for node, name in set(self._starts.running) - set(running) - self._told_ends:
            self._starts.unseen(name)  # its host, which would know, is another one
            self._happened.put_nowait(Exited(node, name, None))
        if running:
            alive = sorted({name for node, name in running if node in known.get(name, [])})
            say(f"lightkeeper: goes on with what runs already: {', '.join(alive) or 'the lighthouse alone'}")

    async def _keep(self) -> None:
        """For the next supervisor; a disk that is full ends no run."""
        async with self._keeping:
            known = {"job": self.job.name, "shape": shape_of(self.job), "token": self._token_mark()}
            data = msgspec.json.encode({**known, "machine": self.machine.state(), **self._starts.state()})
            try:
                await asyncio.to_thread(write_whole, self.folder / STATE, data)
            except OSError as error:
                say(f"lightkeeper: cannot write {self.folder / STATE}: {error.strerror or error}")

    def _token_mark(self) -> str:
        """By which another token is told from this one."""
        return hashlib.sha256(self._token.encode()).hexdigest()[:16]

    def _hung_up(self) -> None:
        """The terminal is gone; the run is not."""
        with (self.folder / "logs" / "supervisor.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        say("lightkeeper: the terminal is gone; goes on, and says so here")

    def _signalled(self, number: int) -> None:
        notice = number == signal.SIGUSR1
        now = time.monotonic()
        if not notice and now - self._term_s < ONE_WORD_S:
            return  # to the process and to its group: one word
        self._terms += not notice
        self._term_s = self._term_s if notice else now
        if self._terms > 1:
            assert self._over is not None
            if not self._over.done():
                self._over.set_result(a.Over(128 + number, "ended at once, as asked twice"))
            return
        why = "notice (SIGUSR1)" if notice else signal.Signals(number).name
        self._spawn(self._stop(why, notice))

    async def _stop(self, why: str, notice: bool) -> None:
        """Once it is known what runs: that is asked to leave."""
        await self._begun.wait()
        await self._do(self.machine.stop(why, time.monotonic(), again=notice))

    # ------------------------------------------------------------ what happens

    def _told(self, happening: Happening) -> None:
        if isinstance(happening, Exited) and not self._begun.is_set():
            self._told_ends.add((happening.node, happening.name))
        self._happened.put_nowait(happening)

    async def _hear(self) -> None:
        while True:
            happening = await self._happened.get()
            now = time.monotonic()
            if isinstance(happening, NodeLost):
                self._lost[happening.node] = happening.why
                self._checks.lost(happening.node)
                await self._do(self.machine.node_lost(happening.node, happening.why, now))
                if happening.node == self._lighthouse.node:
                    await self._lighthouse_ended()
                for node, group in self._starts.running:
                    if node == happening.node:
                        self._exited(node, group, None)
            elif isinstance(happening, NodeCame):
                self._lost.pop(happening.node, None)
                await self._do(self.machine.node_came(happening.node, now))
            elif isinstance(happening, NodeLeaving):
                await self._do(self.machine.node_leaving(happening.node, happening.why, now))
            else:
                await self._heard_end(happening)

    async def _heard_end(self, exited: Exited) -> None:
        if exited.name == LIGHTHOUSE:
            await self._lighthouse_ended()
            return
        self._checks.exited(exited)
        self._exited(exited.node, exited.name, exited.code)

    async def _lighthouse_ended(self) -> None:
        self._lighthouse.ended()
        await self._do(self.machine.lighthouse_ended(time.monotonic()))

    def _exited(self, node: str, name: str, code: int | None) -> None:
        """Perhaps a part of a group; its end is told when all parts have ended."""
        if self._starts.exited(node, name, code):
            self._spawn(self._judge(name))

    async def _judge(self, group: str) -> None:
        end = await self._starts.judge(group, self._lost)
        await self._do(self.machine.ended(group, end, time.monotonic()))
        await self._keep()

    def _message(self, tell: a.Tell) -> Message:
        """With the last lines of the group that it is about."""
        lines = self._starts.last_lines(tell.group)
        evidence = str(self.folder / tell.evidence) if tell.evidence else ""
        return Message(
            tell.kind, self.job.name, tell.text, run=str(self.folder), cause=tell.cause, evidence=evidence, lines=lines,
            host=socket.gethostname(), wall=time.time(),
        )  # fmt: skip

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._read_quarantine()
            await self._do(self.machine.tick(time.monotonic()))
            self._say_progress()

    def _say_progress(self) -> None:
        """Once a minute, if there was any."""
        now, step = time.monotonic(), self.machine.step
        if now - self._said_s >= PROGRESS_S and step > self._said_step:
            self._said_s, self._said_step = now, step
            at_work = sum(group.state == AT_WORK for group in self.machine.groups.values())
            say(f"lightkeeper: step {step} is committed; {at_work} of {self.job.groups} groups run")

    async def _read_quarantine(self) -> None:
        """Somebody may put a node aside, or release one, while the run goes on."""
        stamp, changes = self._aside.stamp(), self._changes
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            reasons = await asyncio.to_thread(self._aside.excluded, self.job.nodes)
        except ToldError as error:
            say(f"lightkeeper: {error}")
            return
        if changes == self._changes:  # what was read is not older than what we ourselves have just changed
            await self._do(self.machine.quarantine_is(reasons, time.monotonic()))

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: how far the run has come, and whom the job goes on without."""
        for event in follow(self.folder, stop=self._reading.is_set, poll_s=0.5, from_start=False):
            if isinstance(event, Seen):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._seen, event)

    def _seen(self, event: Seen) -> None:
        if event.group not in self.machine.groups:
            return
        if isinstance(event, GroupLost):
            if self._starts.is_of_newest(event.group, event.incarnation):
                self.machine.left_out(event.group, time.monotonic())
            return
        if self._starts.spoke(event.group, event.incarnation):
            self.machine.came_back(event.group)
        if isinstance(event, Committed):
            self.machine.committed(event.step)
        elif isinstance(event, CheckpointLoaded) and (event.step, event.restarts) != self._loaded:
            self._loaded = (event.step, event.restarts)
            say(f"lightkeeper: goes on from the checkpoint of step {event.step} ({event.path})")

    # ------------------------------------------------------------ what is to be done

    async def _do(self, actions: Sequence[a.Action]) -> None:
        for action in actions:
            if isinstance(action, a.StartLighthouse):
                self._spawn(self._start_lighthouse())
            elif isinstance(action, a.Check):
                self._spawn(self._check(action))
            elif isinstance(action, a.Launch):
                self._starts.begin(action.group, action.nodes, action.start)
                self._spawn(self._launch(action.group))
            elif isinstance(action, a.BurnIn):
                self._spawn(self._burn_in(action.node))
            elif isinstance(action, a.Requeue):
                if problem := await self._requeue(action.why):
                    ended = a.Note("run_ended", {"code": 1, "reason": problem})
                    await self._do([a.Tell("failed", problem), ended, a.Over(1, problem)])
                    return
            elif isinstance(action, a.Finish):
                say(f"lightkeeper: {action.group} is ended: {action.why}")
                await self._starts.kill(action.group)
            elif isinstance(action, a.Ask):
                await self._starts.ask(action.group)
            elif isinstance(action, a.Exclude):
                await self._exclude(action)
            elif isinstance(action, a.Tell):
                await asyncio.to_thread(self._tell, self._message(action))
            elif isinstance(action, a.Note):
                self._log.write(KINDS_OF_SUPERVISOR[action.kind](**action.fields))
                if words := sentence(action.kind, action.fields):
                    say(f"lightkeeper: {words}")
            elif isinstance(action, a.Over):
                assert self._over is not None
                if not self._over.done():
                    self._over.set_result(action)

    async def _start_lighthouse(self) -> None:
        async def missing(why: str) -> None:
            since = f"there has been none for {MISSING_LONG_S:g} s"
            await self._do([a.Tell("no_lighthouse", f"the lighthouse does not come up, and {since}: {why}")])

        try:
            await self._lighthouse.start(missing)
        except ToldError as error:
            await self._do([a.Tell("failed", str(error))])
            raise

    async def _exclude(self, action: a.Exclude) -> None:
        self._changes += 1
        try:
            await asyncio.to_thread(self._aside.exclude, action.node, action.reason, action.evidence)
        except ToldError as error:
            say(f"lightkeeper: {action.node} gets no work in this run, but {error}")
        self._changes += 1

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._over is None or self._over.done():
            return
        self._over.set_exception(error)

    def _node_for_lighthouse(self) -> str:
        """The last one that can be used: a spare has it, if there is one, so that it does not die with a group."""
        nodes = self.machine.pool.nodes
        there = [name for name, node in nodes.items() if node.fit]
        return (there or list(nodes))[-1]

    async def _check(self, check: a.Check) -> None:
        start = self.machine.groups[check.group].starts + 1
        try:
            problem, evidence = await self._checks.preflight(check.node, check.group, start)
        except CannotStart as error:
            say(f"lightkeeper: {error}")
            await self._do(self.machine.not_checked(check.node, check.group, time.monotonic()))
            return
        except UsageError as error:
            await self._do(self.machine.misasked(str(error), time.monotonic()))
            return
        await self._do(self.machine.checked(check.node, check.group, problem, evidence, time.monotonic()))

    async def _burn_in(self, node: str) -> None:
        try:
            count, why = await asyncio.to_thread(self._aside.before_burn_in, node)
        except ToldError as error:
            count, why = 0, str(error)
        returns = False
        if not why:
            result = await self._checks.burn_in(node)
            if result is None:
                await self._do(self.machine.burn_in_broke_off(node, time.monotonic()))
                return
            try:
                returns, why = await asyncio.to_thread(self._aside.burned_in, node, result, count)
            except ToldError as error:
                why = str(error)
        await self._do(self.machine.burned_in(node, returns, why, time.monotonic()))

    async def _requeue(self, why: str) -> str:
        """Puts the run back where it came from; why that failed, "" if it did not."""
        if not self.job.requeue:
            return ""
        problem = await requeue(self.job.requeue, self.folder / "logs" / "requeue.log")
        if not problem:
            say(f"lightkeeper: {shlex.join(self.job.requeue)}: the run is put back ({why})")
        return problem

    async def _launch(self, group: str) -> None:
        while not (self._lighthouse.address or self._starts.is_called_off(group)):
            await asyncio.sleep(0.05)
        await self._keep()
        for node in await self._starts.launch(group, self._lighthouse.address):
            self._exited(node, group, None)

    def _environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
        return {**clean, **self.job.environment, "LIGHTKEEPER_TOKEN": self._token, "PYTHONUNBUFFERED": "1"}
