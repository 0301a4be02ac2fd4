"""`lightkeeper chaos inject`: a fault on a job that is not ours, on this machine; and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from lightkeeper.chaos import checkers
from lightkeeper.chaos.acts import ACTS, Hit
from lightkeeper.chaos.faults import FAULTS, OTHER, VICTIM, Fault, Plan, named
from lightkeeper.chaos.run import show, teller
from lightkeeper.chaos.targets import NotHere, Processes, run_folder_at
from lightkeeper.errors import UsageError
from lightkeeper.events import EventLog, lineage, read_run
from lightkeeper.events.schema import Activated, Committed, Event, FaultInjected, GroupLost, kind_of

QUIET_S = 10.0  # after a fault that nobody is to be lost by: so long nobody must be
POLL_S = 0.2


def check_live(name: str) -> Fault:
    """The fault, if it can be done to a job from outside.

    Raises:
        UsageError: it cannot; the line says how it can.
    """
    fault = named(name)
    if fault.live:
        return fault
    if fault.inside:
        kind, phase = fault.inside.split(":")
        raise UsageError(
            f"{name} is what a rank does to itself: start its group with LIGHTKEEPER_FAULT={kind}:GROUP:{phase}:STEP"
        )
    live = ", ".join(each.name for each in FAULTS.values() if each.live)
    raise UsageError(f"{name} needs a job of its own (chaos run {name}); on a live one there are: {live}")


class Injection:
    """A fault on a live job.

    Args:
        fault: one that is `live`.
        folder: the run's.
        group: which is hit.
        rank: of it.

    Raises:
        NotHere: what is to be hit is not on this machine.
    """

    def __init__(self, fault: Fault, folder: Path, group: str, rank: int) -> None:
        self.fault, self.folder = fault, folder
        events = read_run(folder).events
        members = _members(events)
        others = [name for name in members if name != group]
        lighthouse = fault.act == "lighthouse-kill"
        if not lighthouse and group not in members:
            there = ", ".join(members) or "none yet"
            raise NotHere(f"{group or 'no group'} is no member of the run in {folder} (members: {there})")
        if not others:
            raise NotHere(f"{group} is the only member: nobody could go on")
        self.plan = Plan(fault, 0, {VICTIM: group, OTHER: others[0]}, rank)
        self.hit = Hit(Processes(events), group, rank, others[0])
        self.act = ACTS[fault.act]
        self._job = next((event.job for event in events if event.job), "")
        self._check_there()

    def _check_there(self) -> None:
        """Before anything is written down as done."""
        processes, group, act = self.hit.processes, self.hit.group, self.fault.act
        if act == "lighthouse-kill":
            processes.pid("lighthouse")
            return
        if act not in ("manager-kill", "freeze-manager"):
            processes.pid(f"rank {group}/{self.hit.rank}")
        if act not in ("kill", "freeze", "cut-link"):
            processes.pid(f"manager {group}")

    @property
    def target(self) -> str:
        """What is about to be hit, in words."""
        return self.act.target(self.hit)

    def do(self) -> list[checkers.Check]:
        """Does it, waits for what must follow, mends what this process can; the checks."""
        before = events = read_run(self.folder).events
        step = max((event.step for event in lineage.pick(events, Committed)), default=-1) + 1
        about = "" if self.fault.act == "lighthouse-kill" else self.plan.victim
        log = EventLog(self.folder, "chaos", job=self._job)
        log.write(FaultInjected(
            fault=self.fault.name, phase="", step=step, target=self.target, group=about,
            incarnation=self.hit.processes.incarnation(about) if about else "",
        ))  # fmt: skip
        log.close()
        try:
            self.act.strike(self.hit)
            self._await()
        finally:
            self.act.mend(self.hit)
        if self.fault.expected.torn_log:
            self._until(lambda window: not self._missing(window))
        window = self._window()
        rules = (checkers.fired, checkers.blamed, checkers.released, checkers.followed)
        checks = [rule("", self.plan, window) for rule in rules]
        found = checkers.new_incidents(read_run(self.folder).events, before)
        return [*checks, checkers.judged("", self.plan, found)]

    def _await(self) -> None:
        """Until the expected losses are said, or long enough for one that must not be."""
        if self.plan.expects_lost:
            self._until(lambda window: bool(lineage.pick(window, GroupLost)) and not self._missing(window))
        else:
            time.sleep(QUIET_S)

    def _missing(self, window: list[Event]) -> list[str]:
        there = {kind_of(event) for event in window if event.group == self.plan.victim}
        return [kind for kind in self.fault.expected.kinds if kind not in there]

    def _until(self, holds: Callable[[list[Event]], bool]) -> None:
        until = time.monotonic() + self.fault.expected.within_s + QUIET_S
        while not holds(self._window()) and time.monotonic() < until:
            time.sleep(POLL_S)

    def _window(self) -> list[Event]:
        events = read_run(self.folder).events
        places = [i for i, e in enumerate(events) if isinstance(e, FaultInjected) and e.process == "chaos"]
        return events[places[-1] :] if places else []


def _members(events: list[Event]) -> tuple[str, ...]:
    newest = max(lineage.pick(events, Activated), key=lambda event: (event.epoch, event.term), default=None)
    return () if newest is None else newest.members


def find_folder(run: Path | None, lighthouse: str) -> Path:
    """The run's folder: as given, or that of the job at this lighthouse.

    Raises:
        UsageError: neither is given, or both.
    """
    if (run is None) == (not lighthouse):
        raise UsageError("give --run RUN or --lighthouse HOST:PORT, one of them")
    return run if run is not None else run_folder_at(lighthouse)


def inject(injection: Injection, as_json: bool) -> int:
    """Does it and prints the checks; 0 if all hold, else 1."""
    tell = teller(as_json)
    tell(f"{injection.fault.name} of {injection.target}, in {injection.folder}")
    checks = injection.do()
    result = checkers.as_dict(checks)
    if as_json:
        sys.stdout.write(msgspec.json.encode({"chaos": f"inject {injection.fault.name}", **result}).decode() + "\n")
    else:
        show(checks)
    return 0 if result["ok"] else 1
