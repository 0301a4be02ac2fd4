"""Looks at runs again and again. Each look is a thread's: a storage that hangs holds up no other run, and is told."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lightkeeper.supervisor.notify.message import Message
from lightkeeper.supervisor.watch.digest import Facts
from lightkeeper.supervisor.watch.machine import Alert, Watch, at_once, duration
from lightkeeper.supervisor.watch.reading import RunReader

LOOK_S_MAX = 15.0
INTERVAL_S = 10.0
_INCIDENTS = "incidents"

Ask = Callable[[str], tuple[int, str]]
"""From a job's id to the highest step of its groups and what is waited for, by the lighthouse."""

Found = tuple[Path, Facts, Alert | None]
"""A run, what is known of it, and what a person is told of it: None if it goes on."""


class Looker:
    """Looks at one run, in a thread of its own for every look.

    Args:
        run: its folder.
        ask: asks the lighthouse about the job; None: nobody does.
        job: its id; "": the one that the run's events name.
    """

    def __init__(self, run: Path, ask: Ask | None, job: str = "") -> None:
        self.run = run
        self._ask, self._job = ask, job
        self._reader = RunReader(run)
        self._facts = Facts(problem="it was not read yet")
        self._thread: threading.Thread | None = None
        self._begun_s = 0.0
        self._read = False  # the folder, in the look that is under way

    def begin(self) -> None:
        """Begins a look, if the last one has ended."""
        if self._thread is None or not self._thread.is_alive():
            self._begun_s, self._read = time.monotonic(), False
            self._thread = threading.Thread(target=self._look, name="lightkeeper-look", daemon=True)
            self._thread.start()

    def facts(self, until_s: float) -> Facts:
        """What the look found; if it has not ended by then, what was known before, and that it does not answer."""
        assert self._thread is not None
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if not self._thread.is_alive() or self._read:
            return self._facts
        return replace(self._facts, problem=f"it does not answer for {duration(time.monotonic() - self._begun_s)}")

    def _look(self) -> None:
        problem, evidence = self._reader.look(), ""
        with contextlib.suppress(OSError):
            kept = sorted(os.listdir(self.run / _INCIDENTS))
            evidence = str(self.run / _INCIDENTS / kept[-1]) if kept else ""
        digest, before = self._reader.digest, self._facts
        self._facts = digest.facts(problem, before.lighthouse_step, before.lighthouse, evidence)
        self._read = True
        if self._ask is not None:  # afterwards: several that do not answer take longer than a look may
            step, words = self._ask(self._job or max(digest.jobs, default="job"))
            self._facts = replace(self._facts, lighthouse_step=step, lighthouse=words)


def watch(
    runs: Sequence[Path],
    stalled_after_s: float | None,
    tell: Callable[[Message], None],
    ask: Ask | None = None,
    job: str = "",
    interval_s: float = INTERVAL_S,
) -> list[Found]:
    """Looks until all runs have ended.

    Args:
        runs: their folders.
        stalled_after_s: for how long no step may be committed; None: as each run's own pace says.
        tell: gets every message; it must not wait.
        ask: asks the lighthouse.
        job: id of the job; "": as each run's events say.
        interval_s: between two looks.

    Returns:
        How each ended.
    """
    begun_s = time.monotonic()
    watched = [(Looker(run, ask, job), Watch(stalled_after_s, interval_s, begun_s)) for run in runs]
    while True:
        next_s = time.monotonic() + interval_s
        for looker, _ in watched:
            looker.begin()
        until_s = time.monotonic() + LOOK_S_MAX
        found = [(looker.run, looker.facts(until_s)) for looker, _ in watched]
        for (run, facts), (_, machine) in zip(found, watched, strict=True):
            for alert in machine.look(facts, time.monotonic()):
                tell(message_of(run, facts, alert))
        if all(machine.over(time.monotonic()) for _, machine in watched):
            return [(run, facts, at_once(facts, time.time(), stalled_after_s)) for run, facts in found]
        time.sleep(max(0.0, next_s - time.monotonic()))


def look_once(
    runs: Sequence[Path], stalled_after_s: float | None, ask: Ask | None = None, job: str = ""
) -> list[Found]:
    """One look at each, for cron: None beside a run that goes on."""
    lookers = [Looker(run, ask, job) for run in runs]
    for looker in lookers:
        looker.begin()
    until_s = time.monotonic() + LOOK_S_MAX
    found = [(looker.run, looker.facts(until_s)) for looker in lookers]
    return [(run, facts, at_once(facts, time.time(), stalled_after_s)) for run, facts in found]


def message_of(run: Path, facts: Facts, alert: Alert) -> Message:
    """An alert as a person is told of it."""
    return Message(
        what=alert.what,
        job=run.resolve().name,
        summary=alert.summary,
        run=str(run),
        cause=(facts.waiting or facts.lighthouse) if alert.what == "stalled" else "",
        evidence=facts.evidence if alert.what in ("stalled", "failed") else "",
        host=socket.gethostname(),
        wall=time.time(),
    )
