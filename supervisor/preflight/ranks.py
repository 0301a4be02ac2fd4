"""The ranks of this node in an all-reduce that is timed: their processes, and what they answer."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from lightkeeper.supervisor.preflight.collective import GRACE_S
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.wire import own_address_towards

START_S = 25.0  # torch's import, beside that of others
ANSWER_S = 2.0


def longest_s(timeout_s: float) -> float:
    """How long an all-reduce may take before it is given up."""
    return timeout_s + GRACE_S


@dataclass(frozen=True)
class Measured:
    """What came of one all-reduce.

    Attributes:
        gbps: bus bandwidth, 0 if it did not get done.
        error: why it did not.
        silent: whether a rank of this node has not even answered: it hangs here, whoever else may be at fault.
    """

    gbps: float = 0.0
    error: str = ""
    silent: bool = False


class Ranks:
    """Processes of `collective.py`, one a rank. They end with the check that has started them.

    Args:
        request: what is asked of this node.
        count: how many.
    """

    def __init__(self, request: Request, count: int) -> None:
        self._request = request
        self._address = own_address_towards([request.rendezvous]) if request.rendezvous else "127.0.0.1"
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        theirs = [(orders[0], answers[1]) for orders, answers in pipes]
        self._orders = [orders[1] for orders, _ in pipes]
        self._answers = [_Lines(answers[0]) for _, answers in pipes]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightkeeper.supervisor.preflight.collective", str(os.getpid()),
             *(f"{order}:{answer}" for order, answer in theirs)],
            stdin=subprocess.DEVNULL, pass_fds=[one for both in theirs for one in both],
        )  # fmt: skip
        for both in theirs:
            for descriptor in both:
                os.close(descriptor)

    def start(self) -> str:
        """Waits until all have imported torch; why one has not, empty if all have."""
        answers = self._all(time.monotonic() + START_S, "")
        return next((answer["error"] for answer in answers if "error" in answer), "")

    def measure(self, group: str, first: int, size: int, timeout_s: float, file: str = "") -> Measured:
        """Has all ranks of this node take part in an all-reduce.

        Args:
            group: name of the process group, never used before.
            first: rank in it of this node's first rank.
            size: ranks of all nodes in it.
            timeout_s: for forming it, and for each exchange of it.
            file: where it forms if all its ranks are of this node; else they meet at the rendezvous.
        """
        for local, pipe in enumerate(self._orders):
            order = {
                "group": group, "rank": first + local, "local_rank": local, "size": size, "timeout_s": timeout_s,
                "mib": self._request.bandwidth_mib, "file": file, "address": self._address,
                "request": "" if file else self._request.to_json(),
            }  # fmt: skip
            try:
                os.write(pipe, json.dumps(order).encode() + b"\n")
            except BrokenPipeError:
                return Measured(error=f"rank {local} of this node has ended", silent=True)
        answers = self._all(time.monotonic() + longest_s(timeout_s) + ANSWER_S, group)
        for answer in answers:
            if "error" in answer:
                return Measured(error=answer["error"], silent=bool(answer.get("silent")))
        return Measured(min(answer["gbps"] for answer in answers))

    def _all(self, until: float, group: str) -> list[dict[str, Any]]:
        """What each says of a group (of none: that it is ready), or an error if it says nothing in time."""
        found = []
        for local, lines in enumerate(self._answers):
            answer = lines.next(until)
            while answer.get("group", "") != group and "silent" not in answer:
                answer = lines.next(until)  # of an order that was given up
            if "silent" in answer:
                answer["error"] = f"rank {local} of this node {answer['error']}"
            found.append(answer)
        return found

    def end(self) -> None:
        """Ends them; one that hangs is left to whoever ends the check."""
        self._process.kill()


class _Lines:
    """JSON lines from a descriptor, each awaited no longer than is said."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""

    def next(self, until: float) -> dict[str, Any]:
        """The next one; an error, and that it is `silent`, if none comes."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return {"error": "hangs", "silent": True}
            part = os.read(self._descriptor, 4096)
            if not part:
                return {"error": "has ended", "silent": True}
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
