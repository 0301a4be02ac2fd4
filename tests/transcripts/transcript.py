"""Protocol situations as text: a script of what happens, and under each line what is said because of it.

The machines are the real ones: one lighthouse and a manager per group; ranks speak by script. A message arrives as soon
as it is sent, in order. Lines that begin with ``#`` and empty lines are for the reader, indented ones are what came of
the command above. ``LIGHTKEEPER_REWRITE=1`` writes them anew: read the difference before committing it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wording import worded

from lightkeeper.lighthouse.actions import Activated, Close, Ended, Note, Promised, Rise, Send
from lightkeeper.lighthouse.log import JobHistory
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.names import Term
from lightkeeper.manager import local
from lightkeeper.manager.actions import End, Kill, Tell, ToRanks
from lightkeeper.manager.machine import GroupMachine, RankView
from lightkeeper.manager.settings import Settings

BEAT_S = 0.2
LEASE_S = 2.0
INDENT = "    "


class Group:
    """One incarnation of a group: its manager's machine, and a rank by script."""

    def __init__(self, name: str, incarnation: str, settings: Settings, now: float) -> None:
        self.name, self.incarnation = name, incarnation
        self.machine = GroupMachine(settings, incarnation, f"{name}:1", now)
        self.connection: int | None = None
        self.there = True
        self.frozen = False
        self.missed: list[Any] = []  # what arrived while it was frozen
        self.phase, self.since = "compute", now
        self.epoch = 0  # in which its rank reduces
        self.microbatch_us = 0

    @property
    def title(self) -> str:
        """Its name, with the incarnation if it is not the first."""
        return self.name if self.incarnation == "i1" else f"{self.name}/{self.incarnation}"


class Play:
    """Runs the commands of one transcript."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.disk, self.starts, self.name = JobHistory(), 0, "A"
        self.lighthouse: JobMachine | None = None
        self.groups: dict[str, Group] = {}
        self.settings: dict[str, Any] = {}
        self.microbatches = 6
        self._connections: dict[int, Group] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._next = 0

    def run(self, command: str) -> list[str]:
        """What is said because of it."""
        word, *words = command.split()
        if word == "quietly":  # what another transcript shows
            self.run(" ".join(words))
            return []
        self.lines = []
        getattr(self, f"do_{word}")(*words)
        self._settle()
        return self.lines

    # ------------------------------------------------------------ commands

    def do_job(self, *words: str) -> None:
        """``job g0 g1 g2 minimum=1 spares=1 microbatches=6``: the job, with a lighthouse and nobody there yet."""
        options = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        self.microbatches = int(options.pop("microbatches", 6))
        self.settings = {"groups": len(names), **{name: int(value) for name, value in options.items()}}
        self._start("A", JobHistory())

    def do_arrives(self, *words: str) -> None:
        """``arrives g0 g1 step=7``: the groups start; of a group that was there, the next incarnation. With a step,
        each has loaded a checkpoint, which has so many steps behind it.
        """
        options = dict(word.split("=") for word in words if "=" in word)
        resumed = int(options.pop("step", 0))
        for name in (word for word in words if "=" not in word):
            before = self.groups.get(name)
            number = 1 if before is None else int(before.incarnation[1:]) + 1
            settings = Settings(group=name, token="t", **self.settings)
            group = self.groups[name] = Group(name, f"i{number}", settings, self.now)
            register = local.Register(token="t", rank=0, pid=1, transfer=f"{name}:2", progress="")
            self._act(group, group.machine.register(register, self.now))
            self._connect(group)
            fingerprint = f"before {resumed}" if resumed else "same"
            ready = local.Ready(signature={}, total=self.microbatches, fingerprint=fingerprint, step=resumed)
            self._act(group, group.machine.rank_says(0, ready, self.now))
            self._settle()

    def do_commits(self, *names: str, activates: int = 0) -> None:
        """``commits g0 g1``: the reduce of their next step completed on them; without names on all members."""
        for name in names or self._members():
            self._vote(self.groups[name], "reduced", activates=activates)

    def do_switches(self, number: str, *names: str) -> None:
        """``switches 2 g0 g1``: their next step completed, and every member's flag for that epoch is in its entry."""
        self.do_commits(*names, activates=int(number))

    def do_fails(self, name: str, *suspects: str) -> None:
        """``fails g0 g2``: the reduce broke on g0, on its connection to g2."""
        self._vote(self.groups[name], "failed", error="connection closed by peer", suspects=suspects)

    def do_adopts(self, name: str) -> None:
        """``adopts g1``: it fetched the entry that it missed."""
        self._vote(self.groups[name], "adopted")

    def do_closes(self, *names: str) -> None:
        """``closes g0 g1``: the empty reduce after the last step completed on them."""
        for name in names or self._members():
            self._vote(self.groups[name], "closed")

    def do_heals(self, name: str, step: str, of: str) -> None:
        """``heals g2 5 1``: it has taken the state before step 5, whose last entry is of epoch 1."""
        self._joiner_vote(name, "healed", int(step), int(of))

    def do_follows(self, name: str, step: str, of: str, activates: str = "0") -> None:
        """``follows g2 6 1``: it has applied the entry before step 6, of epoch 1."""
        self._joiner_vote(name, "followed", int(step), int(of), int(activates))

    def do_loses(self, name: str, *reason: str) -> None:
        """``loses g2 no donor is left``: the joiner cannot go on from what it has."""
        self._vote(self.groups[name], "lost", error=" ".join(reason))

    def do_built(self, number: str, *names: str) -> None:
        """``built 2 g0 g1``: their process groups of that epoch stand."""
        for name in names:
            self._act(
                self.groups[name], self.groups[name].machine.rank_says(0, local.Built(epoch=int(number)), self.now)
            )

    def do_unbuilt(self, number: str, name: str, *error: str) -> None:
        """``unbuilt 2 g0 timed out``: its process group of that epoch could not be built."""
        failed = local.BuildFailed(epoch=int(number), error=" ".join(error))
        self._act(self.groups[name], self.groups[name].machine.rank_says(0, failed, self.now))

    def do_killed(self, name: str) -> None:
        """``killed g2``: SIGKILL of its rank; its manager sees it."""
        group = self.groups[name]
        view = RankView(group.phase, group.machine.step, 0.0, 0.0)
        self._act(group, group.machine.rank_ended(0, -9, view, self.now))

    def do_vanishes(self, name: str) -> None:
        """``vanishes g2``: its host is gone; the stream breaks."""
        group = self.groups[name]
        group.there = False
        self._break(group)

    def do_cut(self, *names: str) -> None:
        """``cut g1``: its stream to the lighthouse breaks."""
        for name in names:
            self._break(self.groups[name])

    def do_connects(self, *names: str) -> None:
        """``connects g1``: it has a stream to the lighthouse again."""
        for name in names:
            self._connect(self.groups[name])
            self._settle()

    def do_freezes(self, name: str) -> None:
        """``freezes g2``: all of it stands still, its connections stay open."""
        self.groups[name].frozen = True

    def do_thaws(self, name: str) -> None:
        """``thaws g2``: it goes on; what came meanwhile arrives now."""
        group = self.groups[name]
        group.frozen = False
        for message in group.missed:
            self._act(group, group.machine.received(message, self.now))
        group.missed.clear()

    def do_impostor(self, name: str) -> None:
        """``impostor g1``: another incarnation of a group that runs asks to be it."""
        running = self.groups[name]
        self.do_arrives(name)
        self._settle()
        self.groups[name] = running

    def do_leaves(self, *names: str) -> None:
        """``leaves g1``: SIGTERM."""
        for name in names:
            self._act(self.groups[name], self.groups[name].machine.asked_to_leave("SIGTERM", self.now, by="launcher"))

    def do_exits(self, *names: str) -> None:
        """``exits g1``: its rank ends with 0."""
        for name in names:
            self._act(self.groups[name], self.groups[name].machine.rank_ended(0, 0, None, self.now))

    def do_stand(self, *names: str) -> None:
        """``stand g0 g1``: from now on they stand in a reduce."""
        for name in names:
            self.groups[name].phase, self.groups[name].since = "reduce", self.now

    def do_paces(self, *words: str) -> None:
        """``paces g0 10 g1 20``: so many milliseconds they take for a microbatch from now on."""
        for name, milliseconds in zip(words[::2], words[1::2], strict=True):
            self.groups[name].microbatch_us = 1000 * int(milliseconds)

    def do_steps(self, count: str) -> None:
        """``steps 20``: so many steps are committed by all members, a beat after each."""
        for _ in range(int(count)):
            self.do_commits()
            self.do_pass("0.2")

    def do_pass(self, seconds: str, *unit: str) -> None:
        """``pass 3 s``: managers beat, the lighthouse ticks."""
        for _ in range(round(float(seconds) / BEAT_S)):
            self.now += BEAT_S
            for group in list(self.groups.values()):
                if group.there and not group.frozen:
                    waits_s = self.now - group.since if group.phase == "reduce" else 0.0
                    view = RankView(group.phase, group.machine.step, waits_s, 0.0, group.microbatch_us)
                    self._act(group, group.machine.tick({0: view}, self.now))
            self._settle()
            if self.lighthouse is not None:
                self._do(self.lighthouse.tick(self.now))
            self._settle()

    def do_lighthouse(self, *words: str) -> None:
        """``lighthouse dies``, ``lighthouse starts with its log``, ``lighthouse starts with an empty disk``."""
        if words == ("dies",):
            self.lighthouse = None
            for group in list(self._connections.values()):
                self._break(group)
        elif words == ("starts", "with", "its", "log"):
            self._start(self.name, self.disk)
        else:
            assert words == ("starts", "with", "an", "empty", "disk"), words
            self.starts = 0
            self._start(chr(ord(self.name) + 1), JobHistory())

    # ------------------------------------------------------------ inside

    def _members(self) -> list[str]:
        memberships = [g.machine.known for g in self.groups.values() if g.there and g.machine.known is not None]
        newest = max(memberships, key=lambda membership: membership.epoch)
        return [name for name in newest.groups if self.groups[name].there and self.groups[name].machine.ending is None]

    def _vote(self, group: Group, outcome: str, **more: Any) -> None:
        group.phase, group.since = "vote", self.now
        step, total = group.machine.step, self.microbatches
        vote = local.Vote(epoch=group.epoch, step=step, outcome=outcome, next_total=total, **more)
        self._act(group, group.machine.rank_says(0, vote, self.now))
        self._settle()

    def _joiner_vote(self, name: str, outcome: str, step: int, of: int, activates: int = 0) -> None:
        group = self.groups[name]
        term = next(
            (g.machine.known.epoch.term for g in self.groups.values() if g.machine.known is not None), Term(1, "A")
        )
        vote = local.Vote(
            epoch=0, step=step, outcome=outcome, next_total=self.microbatches, activates=activates,
            entry=(of, term.number, term.lighthouse),
        )  # fmt: skip
        self._act(group, group.machine.rank_says(0, vote, self.now))
        group.phase = "compute" if group.epoch else "follow"

    def _start(self, name: str, disk: JobHistory) -> None:
        self.starts += 1
        self.name, self.disk = name, disk
        known = disk.copy()
        self.lighthouse = JobMachine("job", Term(self.starts, name), known, Bounds(LEASE_S, BEAT_S), self.now)

    def _connect(self, group: Group) -> None:
        assert self.lighthouse is not None and group.connection is None
        self._next += 1
        group.connection = self._next
        self._connections[self._next] = group
        self._act(group, group.machine.connected(self.now))

    def _break(self, group: Group) -> None:
        number, group.connection = group.connection, None
        if number is None:
            return
        self._connections.pop(number)
        if group.there:
            self._act(group, group.machine.disconnected(self.now))
        if self.lighthouse is not None:
            self._do(self.lighthouse.disconnected(number, self.now))

    def _settle(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _say(self, line: str) -> None:
        if self.lines and self.lines[-1] == line:
            return
        self.lines.append(line)

    def _do(self, actions: list[Any]) -> None:
        """What the lighthouse does."""
        said: dict[str, list[str]] = {}

        def flush() -> None:
            for words, names in said.items():
                self._say(f"lighthouse > {', '.join(names)}: {words}")
            said.clear()

        for action in actions:
            if isinstance(action, Send):
                group = self._connections.get(action.connection)
                if group is not None:
                    if (words := worded(action.message)) is not None:
                        said.setdefault(words, []).append(group.title)
                    self._queue.append(lambda g=group, n=action.connection, x=action.message: self._arrive(g, n, x))
                continue
            flush()
            if isinstance(action, Close):
                group = self._connections.get(action.connection)
                if group is not None:
                    self._queue.append(lambda g=group: self._break(g))
            elif isinstance(action, Promised | Activated | Ended):
                self.disk.apply(action)
                self._say(f"lighthouse logs {worded(action)}")
            elif isinstance(action, Rise):
                self.starts = max(self.starts, action.term.number)
                self._say(f"lighthouse takes term {action.term}")
            elif isinstance(action, Note) and (words := worded(action)) is not None:
                self._say(f"lighthouse notes {words}")
        flush()

    def _arrive(self, group: Group, number: int, message: Any) -> None:
        if group.connection == number and group.frozen:
            group.missed.append(message)
        elif group.connection == number and group.there:
            self._act(group, group.machine.received(message, self.now))

    def _act(self, group: Group, actions: list[Any]) -> None:
        """What a manager does."""
        for action in actions:
            if isinstance(action, Tell):
                if group.connection is not None and self.lighthouse is not None:
                    if (words := worded(action.message)) is not None:
                        self._say(f"{group.title} > lighthouse: {words}")
                    self._queue.append(lambda n=group.connection, g=group, x=action.message: self._hear(n, g, x))
            elif isinstance(action, ToRanks):
                if isinstance(action.message, local.Answer) and action.message.verdict in ("go", "recover"):
                    group.phase, group.epoch = "compute", action.message.epoch
                if (words := worded(action.message)) is not None:
                    self._say(f"{group.title} > rank: {words}")
            elif isinstance(action, Kill):
                self._say(f"{group.title} kills its rank: {action.reason}")
            elif isinstance(action, End):
                self._say(f"{group.title} ends with {action.exit_code}: {action.reason}")
                self._queue.append(lambda g=group: self._leave(g))

    def _hear(self, number: int, group: Group, message: Any) -> None:
        if self.lighthouse is not None and self._connections.get(number) is group:
            self._do(self.lighthouse.received(number, group.name, message, self.now))

    def _leave(self, group: Group) -> None:
        group.there = False
        self._break(group)


def replay(path: Path) -> tuple[list[str], list[str]]:
    """The lines of a transcript as they stand, and as they come out now."""
    play = Play()
    lines = path.read_text(encoding="utf-8").splitlines()
    now: list[str] = []
    for line in lines:
        if line.startswith(INDENT):
            continue
        now.append(line)
        if line and not line.startswith("#"):
            try:
                now += [INDENT + said for said in play.run(line)]
            except Exception as error:
                error.add_note("\n".join([*now, *play.lines]))
                raise
    return lines, now
