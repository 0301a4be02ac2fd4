"""Takes the evidence of the ranks of one node: in order, bounded, and in nobody's way.

What can still be looked into is asked first; what lies on disk comes after it. Whoever waits in order to kill waits for
that, and never for more than `--evidence-s` (a thirtieth of the outage budget); what did not come by then is named as
missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightkeeper.events.schema import Event
from lightkeeper.manager.actions import Collect
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.evidence import stacks
from lightkeeper.manager.evidence.compare import RECOVERY
from lightkeeper.manager.evidence.folder import Incident, folder_name
from lightkeeper.manager.evidence.gpu import gpu_counters, has_nvml
from lightkeeper.manager.evidence.handler import kept_path
from lightkeeper.manager.evidence.kernel import kernel_lines
from lightkeeper.manager.evidence.logclass import log_class
from lightkeeper.manager.evidence.recorder import NoDump, as_file, compared, dump_of
from lightkeeper.manager.exits import describe_exit
from lightkeeper.manager.processes import has_ended, is_stopped
from lightkeeper.manager.ranklogs import RankLogs
from lightkeeper.manager.settings import Settings

T = TypeVar("T")

WRITE_S_MAX = CLASSIFY_S_MAX = 20.0  # nobody who kills waits for these: a busy machine has time
COMPARE_S_MAX = 5.0  # nobody waits for it but the end of the manager's own process
AT_END_S_MAX = 2.0  # which waits for no longer than this
ONCE_S = 5.0  # of one state of affairs evidence is taken once
KEPT_S_MAX = 1.0  # for ranks to write down what they took before an abort
TOGETHER_S = 1.5  # for the other groups to do the same
RECENT_S = 60.0  # an incident that a recovery may be about
STACKS_BYTES_MAX = 4 << 20
LOG = "log-rank"
WORDS_S, WORDS_S_MAX = 0.05, 0.5  # logs that have not grown for so long are whole; for how long that is waited for


class Collector:
    """The evidence of one start of the group, on one node.

    Args:
        settings: what the group was told.
        folder: the group's own folder, with what its ranks hold ready.
        pids: pid by rank, of those that have registered.
        views: what they do, as seen from outside.
        exits: exit codes of those that have ended, negative for a signal, None if nobody could tell.
        note: takes the event.
        say: takes a line for the operator.

    Attributes:
        started: pid by rank, where we started them ourselves.
        logs: what they printed, where we see it.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        pids: Mapping[int, int],
        views: Callable[[], Mapping[int, RankView]],
        exits: Callable[[], Mapping[int, int | None]],
        note: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.settings, self._folder, self._pids, self._views = settings, folder, pids, views
        self._exits, self._note, self._say = exits, note, say
        self.started: Mapping[int, int] = {}
        self.logs: RankLogs | None = None
        self._since_s = time.monotonic()
        self._began_s = -ONCE_S
        self._seen = asyncio.Event()  # all that a kill would take away
        self._seen.set()
        self._told = False
        self._ends = asyncio.Event()
        self._lethal: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[None]] = set()

    @property
    def bound_s(self) -> float:
        """How long a kill may be put off."""
        return self.settings.timeouts.evidence_s

    def collect(self, collect: Collect) -> None:
        """Begins to take evidence; returns at once."""
        if not self.settings.run_folder:
            if not self._told:
                self._say("no evidence is kept of what ends this group: there is no run folder (--run-folder)")
            self._told = True
            return
        now = time.monotonic()
        if now - self._began_s < ONCE_S:
            return
        self._began_s = now
        pids = {**self.started, **self._pids}
        running = {rank: pid for rank, pid in pids.items() if rank not in self._exits() and not has_ended(pid)}
        asked = {rank: stacks.ask(pid, rank, self._folder) for rank, pid in running.items()}
        self._seen.clear()
        self._start(self._take(collect, pids, running, asked, now), self._lethal)

    def then(self, do: Callable[[], None]) -> None:
        """Does something once what was begun has seen all that it wants of the ranks; at once if nothing was."""
        if self._seen.is_set():
            do()
        else:
            self._start(self._do(do), self._lethal)

    async def _do(self, do: Callable[[], None]) -> None:
        await self.seen()
        do()

    async def seen(self) -> None:
        """Returns once what was begun has seen all that it wants of the ranks."""
        await self._seen.wait()

    async def end(self) -> None:
        """Waits until what was begun is written; other groups are not waited for any more."""
        self._ends.set()
        if tasks := {*self._lethal, *self._others}:
            await asyncio.gather(*tasks)

    def _start(self, coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # ------------------------------------------------------------ an incident of this group

    async def _take(
        self, collect: Collect, pids: dict[int, int], running: dict[int, int], asked: dict[int, bool], began_s: float
    ) -> None:
        s, until_s = self.settings, began_s + self.bound_s
        name = folder_name(time.time(), s.group, collect.step, collect.why)
        incident = Incident(Path(s.run_folder), f"{name}-node{s.node_rank}" if s.node_rank else name, collect.reason)
        found: dict[str, tuple[bytes, str]] = {}
        try:
            self._look_at_ranks(incident, pids, found)
            await asyncio.gather(
                *(self._stacks(rank, pid, asked[rank], until_s, incident, found) for rank, pid in running.items()),
                *(self._dump(rank, pid, until_s, incident, found) for rank, pid in running.items()),
                self._node(until_s, incident, found),
            )
        finally:
            self._seen.set()
        put_off_s = time.monotonic() - began_s
        await self._tails(incident, found)
        if await in_thread(lambda: _write(incident, found), time.monotonic() + WRITE_S_MAX):
            await self._compare(incident, sorted(incident.path.glob("recorder-rank*.json")))
        else:
            incident.given_up(f"the run's folder did not answer within {WRITE_S_MAX:g} s")
        await self._classify(incident, found)
        event = incident.event(time.monotonic() - began_s)
        self._note(event)
        parts = f"{len(event.taken)} parts, {len(event.missing)} missing, {event.seconds:.2f} s"
        self._say(f"kept of it: {incident.kept_in_words()} ({parts}; a kill waits for {put_off_s:.2f} s of that)")

    def _look_at_ranks(self, incident: Incident, pids: dict[int, int], found: dict[str, tuple[bytes, str]]) -> None:
        """What needs no waiting: what each rank does, or how it ended."""
        views, exits, told = self._views(), self._exits(), []
        for rank in self.settings.ranks_here:
            doing = "has no process yet" if rank not in pids else "runs"
            if rank in exits:
                doing = describe_exit(exits[rank])
            elif rank in pids and has_ended(pids[rank]):
                doing = "has ended"
            elif rank in pids and is_stopped(pids[rank]):
                doing = "is stopped"
            if not doing.startswith(("runs", "is stopped")):
                incident.missing[f"stacks-rank{rank}"] = incident.missing[f"recorder-rank{rank}"] = f"it {doing}"
            told.append(f"rank {rank} (pid {pids.get(rank, 'none')}) {doing}; {_in_words(views.get(rank))}\n")
        found["ranks"] = "".join(told).encode(), ".txt"

    async def _tails(self, incident: Incident, found: dict[str, tuple[bytes, str]]) -> None:
        """The last words of the ranks, once those of one that has just ended have come."""
        if self.logs is not None:
            until_s, size = time.monotonic() + WORDS_S_MAX, -1
            while size != (size := self.logs.size) and time.monotonic() < until_s:
                await asyncio.sleep(WORDS_S)
        for rank in self.settings.ranks_here:
            self._tail(rank, incident, found)

    def _tail(self, rank: int, incident: Incident, found: dict[str, tuple[bytes, str]]) -> None:
        what = f"{LOG}{rank}"
        if self.logs is None:
            incident.missing[what] = "its output is not captured here: it goes where its launcher sends it"
            return
        try:
            found[what] = self.logs.tail(rank), ".txt"
        except OSError as error:
            incident.missing[what] = error.strerror or str(error)

    async def _stacks(
        self, rank: int, pid: int, asked: bool, until_s: float, incident: Incident, found: dict[str, tuple[bytes, str]]
    ) -> None:
        what = f"stacks-rank{rank}"
        taken = await stacks.stacks_of(pid, rank, self._folder, asked, until_s)
        if taken is None:
            incident.missing[what] = "it ended before it could be looked into"
        elif taken.missing:
            incident.missing[what] = taken.missing
            found[f"kernel-view-rank{rank}"] = taken.text[-STACKS_BYTES_MAX:], ".txt"
        else:
            found[what] = taken.text[-STACKS_BYTES_MAX:], ".txt"

    async def _dump(
        self, rank: int, pid: int, until_s: float, incident: Incident, found: dict[str, tuple[bytes, str]]
    ) -> None:
        what = f"recorder-rank{rank}"
        if is_stopped(pid):
            incident.missing[what] = "it is stopped"
            return
        try:
            found[what] = await dump_of(self.settings.group, rank, self._folder, until_s), ".json"
        except NoDump as why:
            incident.missing[what] = str(why)

    async def _node(self, until_s: float, incident: Incident, found: dict[str, tuple[bytes, str]]) -> None:
        """What the node says: its kernel and its GPUs."""
        lines, why = kernel_lines(self._since_s)
        if why:
            incident.missing["kernel"] = why
        if lines:
            found["kernel"] = "".join(f"{line}\n" for line in lines).encode(), ".txt"
        if not has_nvml():
            return
        answer = await in_thread(gpu_counters, until_s)
        if answer is None or answer[1]:
            incident.missing["gpu"] = answer[1] if answer else "NVML did not answer in time"
        else:
            found["gpu"] = json.dumps(answer[0], indent=1).encode(), ".json"

    async def _classify(self, incident: Incident, found: Mapping[str, tuple[bytes, str]]) -> None:
        """What the logs say of the cause; they are in memory, so it needs no storage."""
        tails = {int(what.removeprefix(LOG)): data for what, (data, _) in found.items() if what.startswith(LOG)}
        told = await in_thread(lambda: log_class(tails), time.monotonic() + CLASSIFY_S_MAX)
        if told is None:
            incident.missing["log_class"] = f"the logs were not looked through within {CLASSIFY_S_MAX:g} s"
        incident.log_class = told or ""

    async def _compare(self, incident: Incident, files: list[Path], within_s: float = COMPARE_S_MAX) -> None:
        if not files:
            return
        try:
            incident.recorder, text = await compared(files, time.monotonic() + within_s)
        except NoDump as why:
            incident.missing["recorder"] = str(why)
            return
        said = f"{incident.recorder or 'no rank stands in a collective that others have not begun'}\n\n{text}"
        await in_thread(lambda: incident.put("recorder", said.encode()), time.monotonic() + WRITE_S_MAX)

    # ------------------------------------------------------------ a recovery

    def keep_dumps(self, epoch: str, compares: Callable[[], bool] = lambda: False) -> None:
        """Puts what the ranks of this node took before they abort into the recovery's folder, which all groups share.

        Args:
            epoch: name of the one that is being prepared.
            compares: asked a little later: whether this is who compares the dumps of all.
        """
        if self.settings.run_folder:
            self._start(self._keep_dumps(epoch, compares, time.time()), self._others)

    async def _keep_dumps(self, epoch: str, compares: Callable[[], bool], since: float) -> None:
        began_s = time.monotonic()
        name = RECOVERY + re.sub(r"[^A-Za-z0-9.]+", "-", epoch)
        s, incident = self.settings, Incident(Path(self.settings.run_folder), name, f"a recovery prepared {epoch}")
        dumps: dict[str, tuple[bytes, str]] = {}
        while len(dumps) < len(s.ranks_here) and time.monotonic() < began_s + KEPT_S_MAX:
            ends = await self._pause(KEPT_S_MAX / 10)
            for rank in s.ranks_here:
                if f"recorder-{s.group}-rank{rank}" not in dumps:
                    dumps |= self._kept(rank, since, incident)
            if ends:
                break
        if not dumps:
            return  # there was nothing to abort
        if not await in_thread(lambda: _write(incident, dumps, joint=True), time.monotonic() + WRITE_S_MAX):
            return
        ends = await self._pause(TOGETHER_S)
        if compares():
            await self._compare(incident, _recent(incident.path), AT_END_S_MAX if ends else COMPARE_S_MAX)
            self._note(incident.event(time.monotonic() - began_s))

    async def _pause(self, seconds: float) -> bool:
        """So long, or until the group ends; whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ends.wait()
        return self._ends.is_set()

    def _kept(self, rank: int, since: float, incident: Incident) -> dict[str, tuple[bytes, str]]:
        path, what = kept_path(self._folder, rank), f"recorder-{self.settings.group}-rank{rank}"
        try:
            if path.stat().st_mtime < since - 0.1:  # the clock of a file system may lag
                return {}
            return {what: (as_file(self.settings.group, rank, self._folder, path.read_bytes()), ".json")}
        except OSError:
            return {}
        except NoDump as why:
            incident.missing[what] = str(why)
            return {}


def _recent(folder: Path) -> list[Path]:
    """The dumps in a recovery's folder, and in those of incidents that it may be about."""
    found = list(folder.glob("recorder-*.json"))
    for path in folder.parent.glob("*/recorder-rank*.json"):
        if time.time() - path.stat().st_mtime < RECENT_S:
            found.append(path)
    return sorted(found)


def _write(incident: Incident, found: dict[str, tuple[bytes, str]], joint: bool = False) -> bool:
    """The smallest first: a large one that does not fit costs no other."""
    if incident.make(joint):
        for what, (data, suffix) in sorted(found.items(), key=lambda one: len(one[1][0])):
            incident.put(what, data, suffix)
    return True


def _in_words(view: RankView | None) -> str:
    if view is None:
        return "it has shown no phase yet"
    waits = f", stands in it for {view.waiting_s:.1f} s" if view.waiting_s else ""
    stopped = f", stopped for {view.stopped_s:.1f} s" if view.stopped_s else ""
    return f"phase {view.phase}, step {view.step}{waits}{stopped}"


async def in_thread(function: Callable[[], T], until_s: float) -> T | None:
    """What it returns; None if it has not returned by then, and nobody waits for it any more.

    It may hang in the kernel for ever, on a storage that does not answer, and this process must end all the same.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            _hand_over(loop, done, lambda error=error: done.set_exception(error))  # type: ignore[misc]
        else:
            _hand_over(loop, done, lambda: done.set_result(result))

    threading.Thread(target=run, name="evidence", daemon=True).start()
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            return await asyncio.shield(done)
    except TimeoutError:
        return None


def _hand_over(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], hand: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if done.done() else hand())
