"""Packs what a command made into one archive within a budget. What is not in it is named, with its size and why."""

from __future__ import annotations

import glob
import os
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

FILES_MAX = 10_000
NAMED_MAX = 20  # in one line; the list beside the archive has all
_BLOCK = 512  # of a tar archive
_END_BYTES = 10_240  # what closes one


@dataclass
class Packed:
    """What became of the artefacts: sizes in bytes by path, and for those left out why."""

    packed: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)  # shrank while they were read; the rest is zeros
    empty_patterns: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """For a person: what was packed, and every one that was left out; "" if nothing was asked for or left out."""
        if not self.left_out and not self.empty_patterns and not self.changed:
            return ""
        named = [f"{path} ({amount(size)}, {why})" for path, (size, why) in self.left_out.items()]
        if len(named) > NAMED_MAX:
            rest = sum(size for size, _ in list(self.left_out.values())[NAMED_MAX:])
            named[NAMED_MAX:] = [
                f"and {len(self.left_out) - NAMED_MAX} more ({amount(rest)}): artefacts.json names them"
            ]
        parts = [f"left out: {', '.join(named)}"] if named else []
        parts += [f"nothing is named {pattern}" for pattern in self.empty_patterns]
        parts += [f"{path} shrank while it was packed" for path in self.changed]
        return f"artefacts: {len(self.packed)} packed ({amount(sum(self.packed.values()))}); {'; '.join(parts)}"


def amount(size: int) -> str:
    """``3 MiB``, ``12 KiB``, ``7 bytes``."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"


def pack(patterns: Sequence[str], archive: str, budget_bytes: int) -> Packed:
    """Packs the files that the patterns name: the patterns in their order, of each the newest first.

    Args:
        patterns: as a shell's, `**` for any folders.
        archive: the tar file to be written; it is never larger than the budget.
        budget_bytes: its limit.

    Returns:
        What is in it, and what is not.

    Raises:
        OSError: the archive cannot be written.
    """
    done, room = Packed(), budget_bytes - _END_BYTES
    found = _found(patterns, done, os.path.abspath(archive))
    if not found:
        return done
    with open(archive, "xb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in found:
            try:
                with open(path, "rb") as file:
                    room -= _add(tar, path, file, room, done)
            except OSError as error:
                done.left_out[path] = (_size(path), error.strerror or str(error))
    with open(archive, "rb") as written:
        os.fsync(written.fileno())
    return done


def _found(patterns: Sequence[str], done: Packed, archive: str) -> list[str]:
    paths: dict[str, None] = {}
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True), key=lambda path: (-_mtime(path), path))
        files = []
        for path in matches:
            if os.path.isdir(path):
                if "**" not in pattern:
                    done.left_out[path] = (0, f"is a folder: name {path.rstrip('/')}/**")
            elif not os.path.isfile(path):
                done.left_out[path] = (_size(path), "is not a regular file")
            elif os.path.abspath(path) != archive:
                files.append(path)
        if not matches:
            done.empty_patterns.append(pattern)
        paths.update(dict.fromkeys(files))
    found = list(paths)
    done.left_out.update({path: (_size(path), f"more than {FILES_MAX} files") for path in found[FILES_MAX:]})
    return found[:FILES_MAX]


def _add(tar: tarfile.TarFile, path: str, file: BinaryIO, room: int, done: Packed) -> int:
    """Adds one file if there is room; returns the bytes that it takes."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        done.left_out[path] = (0, "is not a regular file")
        return 0
    entry = tar.gettarinfo(arcname=path.lstrip("/"), fileobj=file)
    entry.type, entry.size = tarfile.REGTYPE, status.st_size  # a second name of a file is a file here, too
    head = len(entry.tobuf(tar.format, tar.encoding or "utf-8", tar.errors or "surrogateescape"))
    needed = head + -(-entry.size // _BLOCK) * _BLOCK
    if needed > room:
        done.left_out[path] = (entry.size, "beyond the budget")
        return 0
    whole = _Whole(file)
    tar.addfile(entry, whole)  # type: ignore[arg-type]
    done.packed[path] = entry.size
    if whole.short:
        done.changed.append(path)
    return needed


class _Whole:
    """A file that is as long as it was said to be, whoever cuts it meanwhile: a short one would break the archive."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.short = False

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            self.short = True
            data += bytes(size - len(data))
        return data


def _mtime(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
