"""A job of real processes on this machine: one lighthouse, one `lightkeeper launch` per replica group.

What the processes print goes to `<run folder>/output/NAME.txt`. Nothing outlives the job: the children get a
signal when this process dies, and whatever they left is found and killed at the end.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from lightkeeper.errors import ToldError
from lightkeeper.events.writer import tail_text
from lightkeeper.manager.processes import die_with_parent

LISTENING = re.compile(r"listening on (\S+?),?\s")
START_S_MAX = 30.0
STOP_S_MAX = 10.0
ASKED_S_MAX = 3.0


@dataclass
class LocalJob:
    """Starts, watches and ends the processes of one job. A context manager: leaving it ends them all.

    Attributes:
        folder: the run's folder.
        groups: names of the replica groups.
        name: the job's id.
        settings: more options for `lightkeeper launch`, e.g. {"fingerprint-every": "1"}.
        lighthouse: its address, once started.
        children: what was started, by name.
        token: the job's token, made here and handed on in the environment.
    """

    folder: Path
    groups: tuple[str, ...]
    name: str = "job"
    settings: Mapping[str, str] = field(default_factory=dict)
    lighthouse: str = ""
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    _seen: dict[int, psutil.Process] = field(default_factory=dict, repr=False)

    def __enter__(self) -> LocalJob:
        (self.folder / "output").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start_lighthouse(self, bind: str = "127.0.0.1:0") -> str:
        """Start the lighthouse and wait until it listens.

        Args:
            bind: where; by default on a free port.

        Returns:
            Its address.

        Raises:
            ToldError: it ended, or did not say that it listens, in time.
        """
        words = ["lighthouse", "--bind", bind, "--run-folder", str(self.folder)]
        path = self.folder / "output" / "lighthouse.txt"
        said = path.stat().st_size if path.exists() else 0  # by one before it
        child = self._start("lighthouse", [*words, "--log", str(self.folder / "lighthouse-log")])
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            found = LISTENING.search(path.read_bytes()[said:].decode(errors="replace"))
            if found:
                self.lighthouse = found.group(1)
                return self.lighthouse
            if child.poll() is not None:
                raise ToldError(f"the lighthouse ended with {child.returncode}: {self.last_line('lighthouse')}")
            time.sleep(0.02)
        raise ToldError(f"the lighthouse did not listen within {START_S_MAX:g} s: {self.last_line('lighthouse')}")

    def start_group(
        self,
        group: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
        name: str = "",
        prefix: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start one replica group of one rank, or what one node has of a group.

        Args:
            group: its name.
            command: the script and its arguments.
            environment: more variables for this group.
            more: further options of `lightkeeper launch`; they override the job's.
            name: under which the launcher is known here, if not the group's.
            prefix: words before the command: another network namespace.
        """
        words = [
            "launch",
            "--group",
            group,
            "--ranks",
            "1",
            "--lighthouse",
            self.lighthouse,
            "--job",
            self.name,
        ]
        words += ["--groups", str(len(self.groups)), "--run-folder", str(self.folder)]
        for option, value in self.settings.items():
            words += [f"--{option}", value]
        return self._start(name or group, [*words, *more, "--", *command], environment, prefix)

    def _start(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("LIGHTKEEPER_")}
        with (self.folder / "output" / f"{name}.txt").open("ab") as output:
            child = subprocess.Popen(
                [*prefix, sys.executable, "-m", "lightkeeper", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **clean,
                    "LIGHTKEEPER_TOKEN": self.token,
                    "PYTHONUNBUFFERED": "1",
                    **(environment or {}),
                },
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        self.children[name] = child
        return child

    def running(self) -> list[str]:
        """Groups whose processes have not ended; also takes note of all their descendants."""
        self._note_descendants()
        return [group for group in self.groups if group in self.children and self.children[group].poll() is None]

    def failed(self, but: str = "") -> str:
        """The first group that has ended with anything but 0, `but` not counted; empty if there is none."""
        codes = {group: self.children[group].poll() for group in self.groups if group in self.children}
        return next((group for group, code in codes.items() if group != but and code not in (0, None)), "")

    def exit_codes(self) -> dict[str, int | None]:
        """Exit code of everything; None: still running. Negative: by this signal."""
        return {name: child.poll() for name, child in self.children.items()}

    def output(self, name: str) -> str:
        """The end of what a process has printed so far."""
        try:
            return tail_text((self.folder / "output" / f"{name}.txt").read_text(errors="replace"))
        except FileNotFoundError:
            return ""

    def last_line(self, name: str) -> str:
        """The last line a process has printed."""
        lines = [line for line in self.output(name).splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"

    def stop_lighthouse(self) -> int | None:
        """Ask the lighthouse to end; its exit code, None if it did not."""
        child = self.children.get("lighthouse")
        if child is None:
            return None
        if child.poll() is None:
            child.terminate()
        try:
            return child.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            return None

    def stop_group(self, group: str) -> None:
        """Ask a group that waits for nobody any more to end; kill it with all below it if it does not."""
        child = self.children[group]
        self._note_descendants()
        if child.poll() is None:
            child.terminate()
        try:
            child.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(STOP_S_MAX)

    def leftovers(self) -> list[str]:
        """Descendants of ended groups that are still there, as "pid name"."""
        self._note_descendants()
        ended = {child.pid for child in self.children.values() if child.poll() is not None}
        return [f"{p.pid} {p.name()}" for p in self._alive() if p.pid not in self._own_pids() - ended]

    def end(self) -> None:
        """End everything that is left: first asked, then killed. Idempotent."""
        self._note_descendants()
        asked = [child for child in self.children.values() if child.poll() is None]
        for child in asked:
            child.terminate()
        _, left = psutil.wait_procs(self._alive(), timeout=ASKED_S_MAX if asked else 0.0)
        for process in left:
            try:
                process.kill()  # also ends what is stopped
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(left, timeout=STOP_S_MAX)
        for child in self.children.values():
            child.wait(STOP_S_MAX)

    def _own_pids(self) -> set[int]:
        return {child.pid for child in self.children.values()}

    def _note_descendants(self) -> None:
        for child in self.children.values():
            if child.poll() is not None:
                continue
            try:
                parent = psutil.Process(child.pid)
                for process in [parent, *parent.children(recursive=True)]:
                    self._seen.setdefault(process.pid, process)
            except psutil.NoSuchProcess:
                continue

    def _alive(self) -> list[psutil.Process]:
        alive = []
        for process in self._seen.values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.NoSuchProcess:
                continue
        return alive
