"""The quarantine's file: JSON that a person can read, changed under a lock and by one rename: it is never half."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.supervisor.quarantine import Book, BurnIn, Failure, Node

VARIABLE = "LIGHTKEEPER_QUARANTINE"
VERSION = 1
BYTES_MAX = 256 << 20
LOCK_S_MAX, LOOK_S = 10.0, 0.01
DMI = Path("/sys/class/dmi/id")
SERIALS = ("product_serial", "board_serial", "product_uuid")  # the kernel shows them to root alone
_NO_SERIAL = (
    "",
    "none",
    "not specified",
    "default string",
    "system serial number",
    "to be filled by o.e.m.",
    "unknown",
)


class QuarantineFile:
    """The file, and the lock beside it. Several processes, on one file system, may use it at once.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> Book:
        """What is in it; empty if there is no file. Takes no lock: a file is always whole.

        Raises:
            UsageError: it cannot be read, or is not what it should be; the line says where.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(BYTES_MAX + 1)
        except FileNotFoundError:
            return Book()
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror or error}") from None
        if len(data) > BYTES_MAX:
            raise UsageError(f"{self.path}: more than {BYTES_MAX} bytes")
        try:
            return book_of(json.loads(data))
        except ValueError as error:  # also of its JSON and its UTF-8
            raise UsageError(f"{self.path}: {error}; mend it or move it away") from None

    @contextlib.contextmanager
    def change(self) -> Iterator[list[Book]]:
        """Under the lock: a list with the book, whose item is written if it was replaced.

        Raises:
            UsageError: the file cannot be read or written.
            ToldError: somebody else has the lock for too long.
        """
        with self._locked():
            held = [self.read()]
            before = held[0]
            yield held
            if held[0] != before:
                self._write(held[0])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self.path.with_name(self.path.name + ".lock")  # a file of its own: the other one is replaced
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{lock}: {error.strerror or error}") from None
        try:
            until_s = time.monotonic() + LOCK_S_MAX
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise ToldError(f"{lock}: somebody has held it for {LOCK_S_MAX:g} s") from None
                    time.sleep(LOOK_S)
                except OSError as error:
                    raise UsageError(f"{lock}: cannot be locked: {error.strerror or error}") from None
            yield
        finally:
            os.close(handle)

    def _write(self, book: Book) -> None:
        part = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        for old in self.path.parent.glob(f".{self.path.name}.*"):  # of who was killed; the lock is ours
            with contextlib.suppress(OSError):
                old.unlink()
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(json.dumps(plain(book), indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise UsageError(f"{self.path}: {error.strerror or error}") from None


def default_path() -> Path:
    """`LIGHTKEEPER_QUARANTINE`, else a file of this user's; on a cluster it should be one that all nodes see."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lightkeeper" / "quarantine.json"


def own_serial(folder: Path = DMI) -> tuple[str, str]:
    """This machine's serial, or "" and why there is none (only root may read it, a virtual machine may have none)."""
    why = f"{folder} has none"
    for name in SERIALS:
        try:
            with (folder / name).open(encoding="utf-8", errors="replace") as file:
                text = file.read(200).strip()
        except PermissionError:
            why = f"{folder / name}: only root may read it"
            continue
        except OSError:
            continue
        if text.lower() not in _NO_SERIAL and set(text) - set("0-. "):
            return f"{name}:{text}", ""
    return "", why


# ---------------------------------------------------------------- as JSON


def plain(book: Book) -> dict[str, Any]:
    """The book as JSON has it."""
    return {"version": VERSION, "nodes": [asdict(book.nodes[name]) for name in sorted(book.nodes)]}


def book_of(data: Any) -> Book:
    """The other way.

    Raises:
        ValueError: it is not what `plain` makes, up to what a person would write by hand.
    """
    if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data.get("nodes"), list):
        raise ValueError(f"must be an object with version {VERSION} and a list of nodes")
    nodes: dict[str, Node] = {}
    for i, raw in enumerate(data["nodes"]):
        values = _fields(Node, raw, f"nodes[{i}]")
        for name, kind in (("failures", Failure), ("burn_ins", BurnIn)):
            listed = values.get(name, ())
            if not isinstance(listed, list | tuple):
                raise ValueError(f"nodes[{i}].{name} must be a list")
            made = [kind(**_fields(kind, one, f"nodes[{i}].{name}[{j}]")) for j, one in enumerate(listed)]
            values[name] = tuple(made)
        node = Node(**values)
        if node.name in nodes:
            raise ValueError(f"nodes[{i}]: {node.name} stands there twice")
        nodes[node.name] = node
    return Book(nodes)


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def _fields(kind: type[Any], raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be an object")
    known = {field.name: str(field.type) for field in fields(kind)}
    for name, value in raw.items():
        if name not in known:
            raise ValueError(f"{where} has no {name!r} (there are: {', '.join(known)})")
        allowed = _TYPES.get(known[name])
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and known[name] != "bool")):
            raise ValueError(f"{where}.{name} must be of type {known[name]}, is {value!r}")
    try:
        kind(**raw)
    except TypeError as error:  # one that has no default is missing
        raise ValueError(f"{where}: {str(error).partition(') ')[2] or error}") from None
    return dict(raw)
