"""A process per rank that has imported torch already and waits, so that a group that is lost computes again at once.

While the group trains, these import what any trainer imports, when the machine has nothing else to do; then they sleep.
They hold nothing of the group: no socket, no CUDA context, no file. They end with the launcher. One that is dead, does
not answer, or was started with another Python or other variables than a rank would be now, is replaced and never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence

import lightkeeper
from lightkeeper.manager import faults
from lightkeeper.manager.bootstrap import BECOME, PING, READY
from lightkeeper.manager.processes import die_with_parent
from lightkeeper.manager.spawn import SOCKET_VARIABLE

MODULES = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed.fsdp",
    "lightkeeper.manager.trainer",
    "lightkeeper.manager.gloo",
)
AFTER_S = 3.0  # after all ranks are there: a group that fails at once needs none
LOOK_S = 5.0  # between two pings
ANSWER_S = 5.0
ANSWER_NOW_S = 0.25  # when a rank is waited for
IMPORT_S_MAX = 900.0
FAILURES_MAX = 3
OF_A_START = frozenset(
    ("RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
     "TORCHELASTIC_RESTART_COUNT", SOCKET_VARIABLE, faults.VARIABLE)
)  # fmt: skip


class WaitingProcess:
    """A process that can become a rank.

    Args:
        command: the script and its arguments.
        environment: of any rank.
        modules: what it imports.
    """

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.python, self.environment = python_state(), dict(environment)
        self.ready, self.since_s = False, time.monotonic()
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            words = ["wait", str(theirs.fileno()), ",".join(modules), *command]
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "lightkeeper.manager.bootstrap", *words],
                env=self.environment,
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent,
                start_new_session=True,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a rank with these variables, started now, would have imported the same in the same way."""
        return self.python == python_state() and lasting(self.environment) == lasting(environment)

    async def answers(self, within_s: float) -> bool:
        """Whether it lives and answers; takes note of it once it is ready."""
        number = next(self._numbers) % 256
        try:
            self._control.send(bytes((PING, number)))
            async with asyncio.timeout(within_s):
                while answer := await asyncio.get_running_loop().sock_recv(self._control, 16):
                    if answer[1] == number:
                        self.ready = answer[0] == READY
                        return True
        except (TimeoutError, OSError):
            pass
        return False

    def become(
        self, environment: Mapping[str, str], store: int | None, output: tuple[int, int] | None = None
    ) -> subprocess.Popen[bytes]:
        """Makes it the rank with these variables.

        Args:
            environment: all its variables.
            store: descriptor for `bootstrap.serve_store`.
            output: descriptors for its standard output and error from now on.

        Returns:
            Its process. Should it have died just now, that is how the rank has ended.
        """
        told = os.memfd_create("environment")
        try:
            with open(told, "wb", closefd=False) as file:
                file.write(json.dumps(dict(environment)).encode())
            os.lseek(told, 0, os.SEEK_SET)
            with contextlib.suppress(OSError):
                message = bytes((BECOME, store is not None, output is not None))
                descriptors = [told, *(() if store is None else (store,)), *(output or ())]
                socket.send_fds(self._control, [message], descriptors)
        finally:
            os.close(told)
            self._control.close()
        return self.process

    def end(self) -> None:
        """Kills it."""
        self._control.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)


class WarmRanks:
    """Keeps one of them per rank of this node.

    Args:
        count: how many.
        command: the script and its arguments.
        say: takes a line for the operator.
        modules: what they import.
    """

    def __init__(
        self, count: int, command: tuple[str, ...], say: Callable[[str], None], modules: Sequence[str] = MODULES
    ) -> None:
        self.count, self.command, self.modules, self._say = count, command, modules, say
        self.waiting: list[WaitingProcess] = []
        self._failures = 0

    async def keep(self, environment: Mapping[str, str], is_up: Callable[[], bool]) -> None:
        """Once the group is up, starts what is missing and replaces what is broken; until it is cancelled."""
        while not is_up():
            await asyncio.sleep(LOOK_S / 10)
        await asyncio.sleep(AFTER_S)
        told = False
        while self._failures < FAILURES_MAX:
            await self.look(environment)
            if not told and self.waiting and all(waits.ready for waits in self.waiting):
                told = True
                pids = ", ".join(str(waits.process.pid) for waits in self.waiting)
                self._say(f"can be started again at once: torch is imported and waits (pid {pids})")
            await asyncio.sleep(LOOK_S)
        self._say(f"keeps no process ready for a restart: {self._failures} of them broke; what they said is above")

    async def look(self, environment: Mapping[str, str]) -> None:
        """Ends what is broken and starts what is missing."""
        for waits in tuple(self.waiting):
            if why := await self._broken(waits, environment):
                self._drop(waits)
                self._failures += 0 if why == "it is out of date" else 1
                self._say(f"a process kept ready for a restart (pid {waits.process.pid}) is replaced: {why}")
        while len(self.waiting) < self.count and self._failures < FAILURES_MAX:
            self.waiting.append(WaitingProcess(self.command, environment, self.modules))

    async def _broken(self, waits: WaitingProcess, environment: Mapping[str, str]) -> str:
        if waits.process.poll() is not None:
            return f"it ended with {waits.process.returncode}"
        if not waits.fits(environment):
            return "it is out of date"
        if waits.ready:
            return "" if await waits.answers(ANSWER_S) else f"it did not answer for {ANSWER_S:.0f} s"
        if time.monotonic() - waits.since_s > IMPORT_S_MAX:
            return f"its imports took more than {IMPORT_S_MAX:.0f} s"
        if await waits.answers(ANSWER_NOW_S) and waits.ready:  # while it imports, it may have no processor to answer on
            self._failures = 0
        return ""

    async def take(self, environment: Mapping[str, str]) -> list[WaitingProcess]:
        """Those that can become a rank with these variables now; they are the caller's from here on."""
        for waits in self.waiting:
            if not waits.fits(environment):
                waits.ready = False
        ready = [waits for waits in self.waiting if waits.ready]
        answers = await asyncio.gather(*(waits.answers(ANSWER_NOW_S) for waits in ready))
        taken = [waits for waits, lives in zip(ready, answers, strict=True) if lives and waits.ready]
        for waits in ready:
            self.waiting.remove(waits) if waits in taken else self._drop(waits)
        return taken

    def _drop(self, waits: WaitingProcess) -> None:
        self.waiting.remove(waits)
        waits.end()

    def close(self) -> None:
        """Ends them all."""
        for waits in tuple(self.waiting):
            self._drop(waits)


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are alike in all starts and ranks: an import may have read them."""
    return {name: value for name, value in environment.items() if name not in OF_A_START}


def python_state() -> tuple[tuple[int, int] | None, ...]:
    """Changes when Python, or a package that it finds, is installed anew: what is imported already is the old one."""
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(lightkeeper.__file__))
    return tuple(map(_stamp, (sys.executable, os.path.join(sys.prefix, "pyvenv.cfg"), *folders)))


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
