"""Runs the checks: each in a process of its own, side by side, each ended at its limit and all of them at the whole's.

A check may hang in the kernel (a dead storage, a lost GPU), where no signal ends it. So nothing here ever waits for a
process without a bound: one that survives SIGKILL is left behind, and said to be.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightkeeper.manager.exits import describe_exit
from lightkeeper.manager.processes import has_ended, kill_tree, state_of
from lightkeeper.manager.sessions import kill_sessions
from lightkeeper.supervisor.preflight.check import Check
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import OK, Result, failed, from_json, skipped
from lightkeeper.words import shown

TICK_S = 0.25  # at most so late is a limit noticed
KILL_S = 1.0  # SIGKILL ends whatever does not hang in the kernel
ANSWER_BYTES_MAX = 1 << 20
SAID_BYTES_MAX = 4000  # of what a check printed


@dataclass
class _Running:
    check: Check
    process: subprocess.Popen[bytes]
    began: float
    until: float
    answer: bytearray = field(default_factory=bytearray)
    said: bytearray = field(default_factory=bytearray)
    open: int = 2

    def read(self, name: str) -> bool:
        """Takes what there is; whether this was the end of it."""
        stream = self.process.stdout if name == "answer" else self.process.stderr
        assert stream is not None
        part = os.read(stream.fileno(), 1 << 16)
        if name == "answer":
            self.answer += part[: ANSWER_BYTES_MAX - len(self.answer)]
        else:
            self.said[:] = (self.said + part)[-SAID_BYTES_MAX:]
        return not part


class Runner:
    """Runs checks and gathers what they found.

    Args:
        request: what is asked of this node.
        jobs: how many checks run side by side.
        whole_s: seconds after which whatever has not ended is held to hang.
        told: called with each result as it comes.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        request: Request,
        jobs: int,
        whole_s: float,
        told: Callable[[Result], None] = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request, self._jobs, self._told, self._clock = request, jobs, told, clock
        self._began = clock()
        self._whole_until = self._began + whole_s
        self._whole_s = whole_s
        self._running: list[_Running] = []
        self._results: dict[str, Result] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, checks: Sequence[Check]) -> list[Result]:
        """Makes all checks.

        Returns:
            Their results, in the order of the checks.
        """
        waiting = list(checks)
        names = {check.name for check in checks}
        try:
            while waiting or self._running:
                if self._clock() >= self._whole_until:
                    self._give_up(waiting)
                    break
                waiting = self._start_what_may(waiting, names)
                self._wait()
        finally:
            for one in list(self._running):  # interrupted: nothing outlives this
                self._kill(one)
            self._selector.close()
        return [self._results[check.name] for check in checks]

    def _start_what_may(self, waiting: list[Check], names: set[str]) -> list[Check]:
        left: list[Check] = []
        held = False  # somebody who must be alone waits for the others to end: nobody is started before that one
        for check in waiting:
            if any(name in names and name not in self._results for name in check.after):
                left.append(check)
            elif why := self._lacks(check):
                self._done(check, skipped(why), 0.0)
            elif held or len(self._running) >= self._jobs or any(one.check.alone for one in self._running):
                left.append(check)
            elif check.alone and self._running:
                held = True
                left.append(check)
            else:
                self._start(check)
        return left

    def _lacks(self, check: Check) -> str:
        for name in check.requires:
            result = self._results.get(name)
            if result is None:
                return f"it builds on the check {name}, which was not asked for"
            if result.state != OK:
                return f"it builds on the check {name} ({result.state}: {result.reason})"
        return ""

    def _start(self, check: Check) -> None:
        now = self._clock()
        earlier = [self._results[name].fields() for name in check.after if name in self._results]
        told = {"check": check.to_json(), "request": self._request.to_json(), "earlier": earlier, "parent": os.getpid()}
        with open(os.memfd_create("asked"), "w+b") as asked:  # a pipe would hold us up if it started slowly, or never
            asked.write(json.dumps(told).encode() + b"\n")
            asked.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-m", "lightkeeper.supervisor.preflight.child"],
                stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        one = _Running(check, process, now, min(now + check.limit_s, self._whole_until))
        self._running.append(one)
        assert process.stdout is not None and process.stderr is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, (one, "answer"))
        self._selector.register(process.stderr, selectors.EVENT_READ, (one, "said"))

    def _wait(self) -> None:
        """Reads until something can be done anew: a check has ended, or its time is over."""
        for key, _ in self._selector.select(TICK_S):
            one, name = key.data
            if one.read(name):
                self._selector.unregister(key.fileobj)
                one.open -= 1
        now = self._clock()
        for one in list(self._running):
            if one.open == 0 or one.process.poll() is not None:
                self._ended(one, now)
            elif now >= one.until:
                stuck = self._kill(one)
                self._done(one.check, failed(_hung(one, now, stuck), {"printed": _text(one.said)}), now - one.began)

    def _ended(self, one: _Running, now: float) -> None:
        try:
            one.process.wait(TICK_S)  # its pipes are closed: it ends, and how is worth knowing
        except subprocess.TimeoutExpired:
            pass
        for name in ("answer", "said"):
            self._drain(one, name)
        self._kill(one)  # whatever it started
        code = one.process.returncode
        try:
            result = from_json(bytes(one.answer))
        except ValueError:
            printed = _text(one.said).strip()
            last = f": {shown(printed.splitlines()[-1])}" if printed else ""
            result = failed(f"the check {describe_exit(code)} without an answer{last}", {"printed": printed})
        self._done(one.check, result, now - one.began)

    def _drain(self, one: _Running, name: str) -> None:
        """Reads what an ended process has left; a child of its own may hold the pipe open, so never waits."""
        stream = one.process.stdout if name == "answer" else one.process.stderr
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        try:
            while not one.read(name):
                pass
        except BlockingIOError:
            pass

    def _kill(self, one: _Running) -> str:
        """Ends a check and all it started. Returns what it does if even that does not end it, else nothing."""
        self._running.remove(one)
        for stream in (one.process.stdout, one.process.stderr):
            if stream is not None:
                try:
                    self._selector.unregister(stream)
                except (KeyError, ValueError):
                    pass  # its end was read
        killed = kill_tree(one.process.pid) if one.process.returncode is None else []
        killed += kill_sessions([one.process.pid])
        until = self._clock() + KILL_S
        try:
            one.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            return state_of(one.process.pid) or "alive"
        finally:
            for stream in (one.process.stdout, one.process.stderr):
                if stream is not None:
                    stream.close()
        while any(not has_ended(pid) for pid in killed) and self._clock() < until:
            time.sleep(0.01)  # SIGKILL has been sent; what holds a port or memory is gone a moment later
        return ""

    def _give_up(self, waiting: Sequence[Check]) -> None:
        now = self._clock()
        for one in list(self._running):
            stuck = self._kill(one)
            self._done(one.check, failed(_hung(one, now, stuck), {"printed": _text(one.said)}), now - one.began)
        for check in waiting:
            self._done(check, failed(f"no time was left for it within {self._whole_s:g} s: do not join"), 0.0)

    def _done(self, check: Check, result: Result, seconds: float) -> None:
        self._results[check.name] = named = result.named(check.name, seconds)
        self._told(named)


def _hung(one: _Running, now: float, stuck: str) -> str:
    left = f" (and SIGKILL did not end it: {stuck})" if stuck else ""
    return f"hung for {now - one.began:.0f} s{left}: do not join"


def _text(printed: bytearray) -> str:
    return printed.decode(errors="replace")


def figures_of(results: Sequence[Result]) -> Mapping[str, float]:
    """All that was measured."""
    return {name: value for result in results for name, value in result.figures.items()}
