"""Files that are on the disk when a call returns, and what they hold."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import xxhash

from lightkeeper.checkpoint.manifest import Damaged, File, Manifest
from lightkeeper.checkpoint.names import MANIFEST, MARKER

_CHUNK = 4 << 20


def fsync_folder(folder: Path) -> None:
    """The names in a folder are on the disk.

    Raises:
        OSError: they are not.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """A file with these bytes, all or nothing, on the disk with its name.

    Raises:
        OSError: it could not be written; what was begun is removed.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # containers on one storage have the same pids
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    fsync_folder(path.parent)


def measured(path: Path) -> File:
    """Size and checksum of a file, read from the storage.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return File(size, digest.hexdigest())


def check_file(folder: Path, name: str, expected: File) -> None:
    """Reads a file of a checkpoint whole.

    Raises:
        Damaged: it is not what the manifest says.
    """
    try:
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        size = (folder / name).stat().st_size
        if size != expected.bytes:
            raise Damaged(f"{name} has {size} bytes instead of {expected.bytes}")
        if measured(folder / name) != expected:
            raise Damaged(f"{name} has other bytes than were written")
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror or error}") from error


def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Reads the files of a checkpoint (these, or all) and compares them with its manifest.

    Raises:
        Damaged: one is not what the manifest says.
    """
    for name in sorted(manifest.files if names is None else names):
        check_file(folder, name, manifest.files[name])


def data_files(folder: Path) -> list[str]:
    """Names of all files of a checkpoint but manifest and marker.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in (MANIFEST, MARKER))
