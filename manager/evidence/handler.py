"""What a rank holds ready, so that it can be looked into from outside even if it holds the interpreter lock for ever.

Two things, both of which need nothing of Python when they are asked: a C-level handler of a signal that writes the
stacks of all threads into a file (`faulthandler`), and torch's worker server, which serves the flight recorder's dump
over a socket in the group's own folder. They are made where the group has a run folder.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightkeeper.words import say

PREFIX = "evidence-"
BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
BUFFER_ENTRIES = 256  # a dump of torch's own 2000 costs a survivor 50 to 150 ms, of these 3 to 13
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # the second where torch is built with NCCL
SIGNALS = range(signal.SIGRTMIN + 7, signal.SIGRTMIN + 15)  # nobody's by default; the first that is free is taken

Members = Mapping[str, tuple[str, ...]]


def stacks_path(folder: Path, rank: int, number: int) -> Path:
    """Where the handler of this signal writes."""
    return folder / f"{PREFIX}stacks-{rank}-{number}"


def handler_of(folder: Path, rank: int) -> tuple[int, Path] | None:
    """The signal that a rank's handler hears, and where it writes; None if there is no handler."""
    for path in folder.glob(f"{PREFIX}stacks-{rank}-*"):
        number = int(path.name.rpartition("-")[2])
        return number, path
    return None


def server_path(folder: Path, rank: int) -> Path:
    """The socket of torch's worker server."""
    return folder / f"{PREFIX}server-{rank}"


def kept_path(folder: Path, rank: int) -> Path:
    """The flight recorder's dump that was taken before the rank's last abort."""
    return folder / f"{PREFIX}recorder-{rank}"


def groups_path(folder: Path, rank: int) -> Path:
    """Which ranks each process group in a dump has."""
    return folder / f"{PREFIX}groups-{rank}"


def set_buffer_size(environment: dict[str, str] | os._Environ[str]) -> None:
    """A small flight recorder, unless the user has said how large; of effect before the first process group is made."""
    if not any(name in environment for name in BUFFER_VARIABLES):
        environment[BUFFER_VARIABLES[0]] = str(BUFFER_ENTRIES)


class RankEvidence:
    """The rank's end.

    Args:
        folder: the group's own folder, which the socket to its manager is in; None: nothing is held ready.
        rank: this rank's index in its group.
        members: groups in slot order by name of an epoch's process group.
    """

    def __init__(self, folder: Path | None, rank: int, members: Callable[[], Members]) -> None:
        self._folder, self._rank, self._members = folder, rank, members
        self._written: dict[str, Any] = {}
        if folder is not None:
            self._hear_signal(folder)
            self._serve(folder)
            self.note_groups()

    def _hear_signal(self, folder: Path) -> None:
        number = next((number for number in SIGNALS if not handles(os.getpid(), number)), 0)
        if not number:
            return
        path, flags = stacks_path(folder, self._rank, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o600)  # open for as long as the handler is there: for ever
        except OSError as error:
            say(f"lightkeeper: rank {self._rank} cannot be asked for its stacks: {path}: {error.strerror or error}")
            return
        faulthandler.register(number, file=file, all_threads=True, chain=False)

    def _serve(self, folder: Path) -> None:
        try:
            from torch._C._distributed_c10d import _WorkerServer

            server = _WorkerServer(str(server_path(folder, self._rank)))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))  # never taken down: it would log that as warnings
        except (ImportError, RuntimeError) as error:  # another torch, or a path too long for a socket
            say(f"lightkeeper: no flight recorder can be asked of rank {self._rank}: {error}")

    def note_groups(self) -> None:
        """Writes down which ranks each process group has, where that has changed: no dump says so for gloo."""
        if self._folder is None:
            return
        found = {"own": own_groups(), "epochs": {name: list(groups) for name, groups in self._members().items()}}
        if found != self._written:
            self._written = found
            _replace(groups_path(self._folder, self._rank), json.dumps(found).encode())

    def recorded(self) -> bytes:
        """The flight recorder's dump; empty where none is kept. Takes milliseconds."""
        if self._folder is None:
            return b""
        from torch._C import _distributed_c10d as c10d

        dump = b""
        for name in RECORDERS:
            if (taken := getattr(c10d, name, None)) is not None and not has_entries(dump):
                dump = bytes(taken(True, False))
        return dump

    def keep(self, dump: bytes) -> None:
        """Writes a dump where the manager looks for it."""
        if dump and self._folder is not None:
            self.note_groups()
            _replace(kept_path(self._folder, self._rank), dump)


def has_entries(dump: bytes) -> bool:
    """Whether anything is recorded in a dump."""
    return b'"entries":[{' in dump


def handles(pid: int, number: int) -> bool:
    """Whether a process handles or ignores a signal; one that does neither would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = re.findall(r"^Sig(?:Cgt|Ign):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in found)


def own_groups() -> dict[str, list[int]]:
    """The ranks of each process group that the script has made, by the name that a dump has for it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    groups = list(world.pg_names.items())  # the script may be making one just now
    return {name: sorted(world.pg_group_ranks.get(group, {})) for group, name in groups}


def _replace(path: Path, data: bytes) -> None:
    """A full disk costs the evidence, never the rank."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(data)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
