"""What one checkpoint is: the manifest binds all that belongs to one step, the marker says that it counts.

The manifest is written when every file is on the disk, and names each with its size and checksum. The marker is written
last, when the state is final, and names the manifest: a marker beside any other manifest does not count. What stands
there may be anybody's: reading it takes bounded memory, and never waits, as for a pipe that nobody writes to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from lightkeeper.checkpoint.names import MANIFEST, MARKER
from lightkeeper.manager.regular import open_regular

FORMAT = 1
BYTES_MAX = 256 << 20  # of a manifest: it has a line for every file and rank

T = TypeVar("T")


class Damaged(Exception):
    """A checkpoint, or a part of it, is not what was written; one line says what."""


class State(msgspec.Struct, frozen=True):
    """The name of a state: of the entry that was applied last (`lighthouse.names.Entry`).

    Attributes:
        epoch: number of the epoch that committed it.
        term: number of the reign in which that was.
        lighthouse: id of the lighthouse that reigned.
        step: index of the entry, one less than the steps behind the state.
    """

    epoch: int
    term: int
    lighthouse: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of e{self.epoch}/{self.term}@{self.lighthouse}"


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint: its size in bytes and its xxh3_128, 32 hexadecimal digits."""

    bytes: int
    xxh3: str


class RankState(msgspec.Struct, frozen=True):
    """The state as one rank of the group held it: hash of its description, and of that with all its bytes."""

    digest: str
    fingerprint: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that belongs to one step.

    Attributes:
        format: of this file.
        step: how many steps the state has behind it: the index of the next one.
        state: its name.
        job, group, incarnation: who wrote it.
        wall: seconds since the Unix epoch when the state was copied.
        ranks: how many ranks the group had.
        seed: from which random state follows: it is a function of (seed, step, microbatch, place), so there is none to
            be stored.
        microbatches: those consumed by all steps so far.
        samples: those consumed by all steps so far; None if the loop did not say how many a microbatch has.
        code: xxh3_128 of the script; "" if it could not be read.
        config: xxh3_128 of `signature`.
        signature: what all groups have in common, by name: shapes, dtypes, settings.
        held: the state, rank by rank.
        versions: of torch, lightkeeper, python.
        files: name to size and checksum; all files but this one and the marker.
        bytes: of all files together.
        copy_s: seconds for the copy aside.
        stood_s: for which the training thread stood for it.
        write_s: seconds for writing and reading back.
        loaded: whether it was loaded once before it was committed, into fresh tensors, and compared.
        restarts: how often this run was begun from a checkpoint.
        trained_s: seconds for which it has been trained, all starts together.
    """

    format: int = FORMAT
    step: int
    state: State
    job: str
    group: str
    incarnation: str
    wall: float
    ranks: int
    seed: int
    microbatches: int
    samples: int | None = None
    code: str = ""
    config: str = ""
    signature: dict[str, str] = {}
    held: list[RankState] = []
    versions: dict[str, str] = {}
    files: dict[str, File] = {}
    bytes: int = 0
    copy_s: float = 0.0
    stood_s: float = 0.0
    write_s: float = 0.0
    loaded: bool = False
    restarts: int = 0
    trained_s: float = 0.0


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The commit marker.

    Attributes:
        step, state: as in the manifest.
        manifest: xxh3_128 of the manifest's bytes.
        final: by what the state is known to be final.
        by: group and incarnation that say so.
        wall: seconds since the Unix epoch.
    """

    step: int
    state: State
    manifest: str
    final: str
    by: str
    wall: float


class _Format(msgspec.Struct):
    format: int = FORMAT


def encode(value: Manifest | Marker) -> bytes:
    """As it stands in a file: JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def hash_of(data: bytes) -> str:
    """xxh3_128, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint, and the hash of its bytes.

    Raises:
        Damaged: there is none, or it is not one.
    """
    data = _read(folder / MANIFEST, "manifest")
    format = _decode(data, _Format, "manifest").format  # first: another one may have other fields
    if format != FORMAT:
        raise Damaged(f"its manifest has format {format}, and this version reads {FORMAT}")
    return _decode(data, Manifest, "manifest"), hash_of(data)


def read_marker(folder: Path) -> Marker:
    """The commit marker of a checkpoint.

    Raises:
        Damaged: there is none, or it is not one.
    """
    return _decode(_read(folder / MARKER, "commit marker"), Marker, "commit marker")


def read_committed(folder: Path) -> Manifest:
    """The manifest of a checkpoint that counts.

    Raises:
        Damaged: it has no marker, or one of another manifest, or no manifest.
    """
    marker = read_marker(folder)
    manifest, found = read_manifest(folder)
    if marker.manifest != found or marker.state != manifest.state or marker.step != manifest.step:
        raise Damaged(f"its commit marker is that of another manifest (of {marker.state})")
    return manifest


def _read(path: Path, what: str) -> bytes:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise Damaged(f"it has no {what}") from None
    except OSError as error:
        raise Damaged(f"its {what} cannot be read: {error.strerror or error}") from error
    if len(data) > BYTES_MAX:
        raise Damaged(f"its {what} has more than {BYTES_MAX} bytes")
    return data


def _decode(data: bytes, kind: type[T], what: str) -> T:
    if not data:
        raise Damaged(f"its {what} is empty")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # a ValidationError is one; brackets in brackets
        raise Damaged(f"its {what} is none: {error}"[:200]) from error
