"""A job under `lightkeeper run`: its supervisor starts what is started, and nobody else does.

What a fault leaves is mended by the supervisor alone; only the supervisor itself is started again from here, as cron or
a person would.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from lightkeeper.chaos.faults import Shape
from lightkeeper.chaos.targets import NotHere
from lightkeeper.chaos.watched import (
    END_S_MAX,
    GONE_S_MAX,
    JOB,
    OUTAGE_BUDGET_S,
    POLL_S,
    START_S_MAX,
    STEP_S_MAX,
    TOY,
    Watched,
)
from lightkeeper.manager.processes import die_with_parent, is_stopped
from lightkeeper.supervisor.logs import last_lines

SAVE_EVERY = 20  # steps
NODES_EACH = 4  # for each group: those that are suspected twice, and then burned in, are out for a while
SUPERVISOR = "supervisor"


class Supervised(Watched):
    """One job. A context manager: leaving it ends all its processes.

    Args:
        folder: the run's.
        shape: of the job.
        seed: of its weights and its order of samples.
    """

    def __init__(self, folder: Path, shape: Shape, seed: int) -> None:
        super().__init__(folder, shape, seed)
        self._child: subprocess.Popen[bytes] | None = None
        self._ends_well = False

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None and self._child.poll() is None:
            for _ in range(2):  # at once, as asked twice
                self._child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(GONE_S_MAX)
        for process in self._own():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._log.close()

    # ------------------------------------------------------------ starting

    def start(self) -> None:
        """Writes the job file, starts its supervisor, and returns once all groups train."""
        self._job_file.write_text(self._job_text())
        self.start_supervisor()
        self.until(lambda: set(self._newest) >= set(self.shape.names), "all groups train", START_S_MAX)

    def start_supervisor(self) -> str:
        """Starts it, for the first time or again; says what was done."""
        again = self._child is not None
        if self._child is not None:
            self._child.wait(GONE_S_MAX)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
        with (self.folder / "supervisor.txt").open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "lightkeeper", "run", str(self._job_file)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=clean,
                start_new_session=True, preexec_fn=partial(die_with_parent),
            )  # fmt: skip
        self._ends_well = False
        return "the supervisor is started again" if again else "the supervisor is started"

    def start_again(self, name: str) -> str:
        """See `Watched`."""
        return f"{name} is left to the supervisor"

    def restart_lighthouse(self) -> str:
        """See `Watched`."""
        self.until(self._has_lighthouse, "the supervisor starts the lighthouse again", STEP_S_MAX)
        return "the supervisor has started the lighthouse again"

    def ends_so(self, name: str) -> None:
        """See `Watched`; of launchers the supervisor knows."""
        self._ends_well = self._ends_well or name == SUPERVISOR

    # ------------------------------------------------------------ ending

    def finish(self) -> dict[str, int | None]:
        """See `Watched`."""
        self._stop_file.touch()
        child = self._child
        assert child is not None
        self._ends_well = True
        self.until(lambda: child.poll() is not None, "the supervisor has ended", END_S_MAX)
        self.look()
        return self.exit_codes()

    def exit_codes(self) -> dict[str, int | None]:
        """See `Watched`."""
        return {SUPERVISOR: None if self._child is None else self._child.poll()}

    def leftovers(self) -> list[str]:
        """See `Watched`: all that names the run's folder, or was told it."""
        until = time.monotonic() + GONE_S_MAX
        while (left := self._own()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return [f"{process.pid} {_words(process)}" for process in left]

    def _own(self) -> list[psutil.Process]:
        mark, own = str(self.folder.absolute()), {os.getpid(), *(one.pid for one in psutil.Process().parents())}
        found = []
        for process in psutil.process_iter():
            if process.pid in own:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                told = process.environ().get("LIGHTKEEPER_RUN_FOLDER", "")
                if (mark in _words(process) or told == mark) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _has_lighthouse(self) -> bool:
        try:
            return not is_stopped(self.processes.pid("lighthouse"))
        except NotHere:
            return False

    def _failed(self) -> str:
        child = self._child
        if child is None or child.poll() is None or self._ends_well:
            return ""
        said = last_lines(self.folder / "supervisor.txt")
        return f"the supervisor ended with {child.returncode}: {said[-1] if said else 'it printed nothing'}"

    # ------------------------------------------------------------ the job

    @property
    def _job_file(self) -> Path:
        return self.folder / "job.toml"

    def _job_text(self) -> str:
        words = [
            str(TOY), "--stop", str(self._stop_file.absolute()), "--seed", str(self.seed),
            "--checkpoints", "{checkpoints}", "--every", str(SAVE_EVERY), "--takes-orders",
            "--moments", str(self.folder.absolute()),
        ]  # fmt: skip
        groups = self.shape.groups
        return f"""\
name = "{JOB}"
command = {json.dumps(words)}
run_folder = "."
groups = {groups}
minimum = {max(1, groups - 1)}
outage_budget_s = {OUTAGE_BUDGET_S}
[options]
fingerprint-every = 1
[cluster]
nodes = {NODES_EACH * groups}
[preflight]
options = ["--only", "memory,disk"]
[burn_in]
rounds = 1
for_s = 0.0
[budget]
attempts = 1000
job_restarts = 1000
pause_s_max = 10.0
"""


def _words(process: psutil.Process) -> str:
    return " ".join(process.cmdline())[-200:]
