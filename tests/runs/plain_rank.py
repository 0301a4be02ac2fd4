"""A rank without torch: it votes step after step, as a trainer does whose reduces always succeed.

Run by `lightkeeper launch`. It computes for `delay` seconds a step, follows recoveries, and closes the run after
`steps`; it writes a line for each commit. A child of its own shows whether all that it started is killed, too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightkeeper.manager import local
from lightkeeper.manager.progress import ProgressPage

TOTAL = 12


class PlainRank:
    """One rank.

    Args:
        options: ``trace`` (a file; the rank is appended), ``steps``, ``delay``, ``hurry`` (a file that ends delays),
            ``child``, ``saves`` (seconds that the last rank takes to save the last committed step, where the group is
            to keep it).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.rank, path = int(os.environ["RANK"]), Path(os.environ["LIGHTKEEPER_SOCKET"])
        self.options = options
        self.page = ProgressPage(path.parent / f"progress-{self.rank}")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.trace = os.open(f"{options['trace']}-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.say(
            local.Register(
                token=os.environ["LIGHTKEEPER_TOKEN"], rank=self.rank, pid=os.getpid(),
                transfer=f"127.0.0.1:{29600 + self.rank}", progress=str(self.page.path),
            )
        )  # fmt: skip
        registered = self.hear()
        assert isinstance(registered, local.Registered)
        self.note("registered", pid=os.getpid(), incarnation=registered.incarnation, served_by=registered.pid)

    def note(self, kind: str, **fields: Any) -> None:
        os.write(self.trace, (json.dumps({"kind": kind, **fields}) + "\n").encode())

    def say(self, message: local.FromRank) -> None:
        self.socket.sendall(local.frame(message))

    def hear(self) -> local.ToRank:
        (size,) = local.HEADER.unpack(self._read(local.HEADER.size))
        return local.to_rank.decode(self._read(size))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                sys.exit(107)
            data += part
        return data

    def ask(self, message: local.Ready | local.Vote) -> local.Answer:
        """Waits for the answer; builds whatever epoch is planned meanwhile."""
        self.say(message)
        while not isinstance(heard := self.hear(), local.Answer):
            if isinstance(heard, local.Build) and heard.plan.planned:
                self.say(local.Built(epoch=heard.plan.epoch))
        return heard

    def train(self) -> None:
        """Until the run is closed, or the group leaves."""
        self.page.enter("join", 0)
        answer = self.ask(local.Ready(signature={}, total=TOTAL))
        assert answer.plan is not None
        epoch, step, ready, until = answer.plan.epoch, 0, 0, self.options["steps"]
        self.note("epoch", epoch=epoch)
        while True:
            self.page.enter("compute", step)
            time.sleep(0.002 if os.path.exists(self.options["hurry"]) else self.options["delay"])
            outcome = "closed" if step == until else "reduced"
            self.page.enter("vote", step)
            answer = self.ask(local.Vote(epoch=epoch, step=step, outcome=outcome, next_total=TOTAL, activates=ready))
            if answer.verdict in ("go", "leave"):
                step += 1
                self.note("commit", step=step - 1, epoch=epoch, share=answer.share)
                epoch, ready = answer.epoch, answer.ready
                if answer.verdict == "leave":
                    self.note("left", step=step)
                    return
            elif answer.verdict == "recover":
                assert answer.plan is not None and answer.plan.step == step
                epoch = answer.plan.epoch
                self.note("epoch", epoch=epoch)
            else:
                assert answer.verdict == "stop", answer
                self.note("stop", ok=answer.ok, reason=answer.reason)
                if answer.keep:
                    self._keep(step)
                sys.exit(0 if answer.ok else 1)

    def _keep(self, step: int) -> None:
        """The last rank takes its time, and beats as a real one does."""
        self.page.enter("checkpoint", step, expected_s=300.0)
        last = self.rank == int(os.environ["WORLD_SIZE"]) - 1
        until = time.monotonic() + (self.options["saves"] if last else 0.0)
        while time.monotonic() < until:
            self.page.beat()
            time.sleep(0.1)
        self.note("kept", step=step - 1)


if __name__ == "__main__":
    given = {"steps": 20, "delay": 0.02, "hurry": "", "child": False, "saves": 0.0, **json.loads(sys.argv[1])}
    if given["child"]:
        subprocess.Popen(["sleep", "1000"])
    PlainRank(given).train()
