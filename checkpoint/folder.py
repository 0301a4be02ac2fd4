"""A folder of checkpoints: what there is, how one becomes one of them, and how old ones go.

A checkpoint is written under a name that nobody reads. When it is whole, checked and final it gets its marker there,
and then its own name by one `rename`. So a reader never sees half of one, no writer touches what stands under a name,
and one that is killed leaves nothing that has to be repaired. Nothing is deleted before what takes its place is
committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.checkpoint.files import check_files, fsync_folder, write_whole
from lightkeeper.checkpoint.manifest import (
    Damaged,
    Manifest,
    Marker,
    encode,
    read_committed,
    read_manifest,
)
from lightkeeper.checkpoint.names import (
    MARKER,
    STEP_MAX,
    Found,
    aside_name,
    dropped_name,
    found,
    saving_name,
    step_name,
)

KEEP_MIN = 2
PLACES_MAX = 3  # how often the name is taken anew, when another writer takes it in between
Note = Callable[[str], None]


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a folder.

    Attributes:
        path: where it is.
        step: how many steps its state has behind it.
        manifest: what it is; None if it does not count.
        reason: why not.
    """

    path: Path
    step: int
    manifest: Manifest | None
    reason: str = ""


class Folder:
    """One folder of checkpoints.

    Args:
        path: where it is; it need not be there yet.
        by: who writes here, different for every process that may: group and incarnation.
    """

    def __init__(self, path: Path, by: str = "") -> None:
        self.path = path
        self.by = by or f"{os.uname().nodename}-{os.getpid()}"
        self._read: set[int] = set()  # steps of those that were read whole here

    # ------------------------------------------------------------ reading

    def entries(self) -> list[Found]:
        """All that stands there, newest checkpoints first.

        Raises:
            OSError: it cannot be read (that it is not there is no error).
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted((found(name) for name in names), key=lambda one: (-one.step, one.name))

    def listed(self) -> list[Listed]:
        """The checkpoints, newest first, those that do not count with the reason; their files are not read.

        Raises:
            OSError: the folder cannot be read.
        """
        return [self.look(one.step) for one in self.entries() if one.kind == "step"]

    def look(self, step: int) -> Listed:
        """One of them."""
        path = self.path / step_name(step)
        try:
            manifest = read_committed(path)
            if manifest.step != step:
                raise Damaged(f"its manifest is that of step {manifest.step}")
        except Damaged as error:
            return Listed(path, step, None, str(error))
        return Listed(path, step, manifest)

    def _made(self, name: str) -> float:
        """When a checkpoint was made, in seconds since the Unix epoch, as far as it says so."""
        try:
            return read_manifest(self.path / name)[0].wall
        except Damaged:
            return (self.path / name).stat().st_mtime

    def newest(self, upto: int = STEP_MAX) -> int:
        """Steps behind the newest that is committed, of at most so many; -1 if there is none.

        Raises:
            OSError: the folder cannot be read.
        """
        steps = (one.step for one in self.entries() if one.kind == "step" and one.step <= upto)
        return next((step for step in steps if self.look(step).manifest is not None), -1)

    def was_used(self) -> bool:
        """Whether a checkpoint was ever committed here, whatever has become of it.

        Raises:
            OSError: the folder cannot be read.
        """
        return any(one.kind in ("aside", "step") for one in self.entries())

    # ------------------------------------------------------------ writing

    def make(self) -> None:
        """Makes the folder itself, unless it is there.

        Raises:
            OSError: it cannot be made.
        """
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            fsync_folder(self.path.parent)

    def saving(self, step: int) -> Path:
        """Where the checkpoint of a step is written; what is there of an earlier try is removed.

        Raises:
            OSError: it cannot be made.
        """
        path = self.path / saving_name(step, self.by)
        self.make()
        if path.exists():
            self.drop(path)
        path.mkdir()
        return path

    def publish(self, written: Path, final: str, wall: float | None = None) -> Path:
        """Gives a checkpoint that is whole, checked and final its marker and its name.

        If one of the same state is there already, committed and whole, or one of another state that was copied later,
        that one counts, and this one is dropped. What else stands under the name (a broken one, or one of steps that
        were done again since) makes place.

        Args:
            written: where it was written.
            final: by what its state is known to be final.
            wall: seconds since the Unix epoch; now.

        Returns:
            Where it is, or the other one.

        Raises:
            Damaged: what was written is not a checkpoint.
            OSError: it could not be published.
        """
        manifest, hashed = read_manifest(written)
        marker = Marker(
            step=manifest.step, state=manifest.state, manifest=hashed, final=final, by=self.by,
            wall=time.time() if wall is None else wall,
        )  # fmt: skip
        write_whole(written / MARKER, encode(marker))
        path = self._take_place(written, manifest)
        self.was_read(manifest.step)
        return path

    def _take_place(self, written: Path, manifest: Manifest) -> Path:
        target = self.path / step_name(manifest.step)
        for _ in range(PLACES_MAX):
            try:
                written.rename(target)
            except OSError as error:  # an empty folder makes place by itself
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                fsync_folder(self.path)
                return target
            if self._counts_before(target, manifest):
                self.drop(written)
                return target
            self._out_of_the_way(target)
        raise OSError(errno.EEXIST, f"another writer takes the name again and again: {target.name}")

    def _counts_before(self, target: Path, manifest: Manifest) -> bool:
        """Whether what stands under the name stays there, whatever this one is."""
        try:
            there = read_committed(target)
            same = there.state == manifest.state and there.held == manifest.held
            if there.step != manifest.step or not (same or there.wall > manifest.wall):
                return False
            check_files(target, there)
        except Damaged:
            return False
        return True

    def _out_of_the_way(self, target: Path) -> None:
        away = self.path / dropped_name(target.name, secrets.token_hex(8))
        try:
            target.rename(away)
        except FileNotFoundError:
            return
        _remove(away)

    def was_read(self, step: int) -> None:
        """The committed checkpoint of this step was read here, and is whole."""
        self._read.add(step)

    # ------------------------------------------------------------ deleting

    def drop(self, path: Path) -> None:
        """Deletes one, so that nobody takes it for a checkpoint meanwhile; what cannot be deleted stays behind.

        Raises:
            OSError: it cannot even be renamed.
        """
        if found(path.name).kind == "dropped":
            _remove(path)
        else:
            self._out_of_the_way(path)

    def prune(self, keep: int, keep_every: int = 0, read: int = 0) -> list[Path]:
        """Deletes old checkpoints.

        The newest `keep` that are committed and have all their files stay, and at least two such; so does what is newer
        than these, and every one whose step is a multiple of `keep_every`. What is older goes, marker or not.

        Args:
            keep: so many.
            keep_every: 0: none for this reason.
            read: nothing is deleted before so many of those that stay were read whole by this process.

        Returns:
            What was deleted.

        Raises:
            OSError: the folder cannot be read, or something in it not be renamed.
        """
        going = self.superfluous(keep, keep_every, read)
        for path in going:
            self.drop(path)
        return going

    def superfluous(self, keep: int, keep_every: int = 0, read: int = 0) -> list[Path]:
        """What `prune` would delete, oldest first.

        Raises:
            OSError: the folder cannot be read.
        """
        listed = self.listed()
        stays: list[Listed] = []
        for one in listed:
            if len(stays) < max(keep, KEEP_MIN) and one.manifest is not None and _has_its_files(one.path, one.manifest):
                stays.append(one)
        if len(stays) < max(keep, KEEP_MIN) or sum(one.step in self._read for one in stays) < read:
            return []
        oldest = stays[-1].step
        going = [one for one in listed if one.step < oldest and not (keep_every and one.step % keep_every == 0)]
        return [one.path for one in reversed(going)]

    def sweep(self, step: int, mine: bool = True) -> list[Path]:
        """Deletes what broke off: half-written ones of at most this step, and what is being deleted.

        Args:
            step: a newer one may still be written by somebody else.
            mine: whether those of this process go too.

        Raises:
            OSError: the folder cannot be read, or something in it not be renamed.
        """
        gone = self.broken_off(step, mine)
        for path in gone:
            self.drop(path)
        return gone

    def broken_off(self, step: int, mine: bool = True) -> list[Path]:
        """What `sweep` would delete.

        Raises:
            OSError: the folder cannot be read.
        """
        return [
            self.path / one.name
            for one in self.entries()
            if one.kind == "dropped" or (one.kind == "saving" and one.step <= step and (mine or one.by != self.by))
        ]

    def put_aside(self, after: int, before: float | None = None) -> list[Path]:
        """Renames the checkpoints of later steps: they count no more.

        Args:
            after: the run has come to this step, or goes on from it.
            before: seconds since the Unix epoch; only those that were made before, in an earlier life of the run. None:
                all of them, by a person's wish to go on from an earlier one.

        Raises:
            OSError: one of them cannot be renamed.
        """
        moved = []
        for one in self.entries():
            if one.kind != "step" or one.step <= after or (before is not None and self._made(one.name) >= before):
                continue
            target = self.path / aside_name(one.name)
            number = 1
            while target.exists():
                number += 1
                target = self.path / f"{aside_name(one.name)}.{number}"
            try:
                (self.path / one.name).rename(target)
            except FileNotFoundError:
                continue  # another group was faster
            moved.append(target)
        if moved:
            fsync_folder(self.path)
        return moved


def _has_its_files(path: Path, manifest: Manifest) -> bool:
    """Whether all files are there with their sizes, which costs no reading of them."""
    try:
        return all((path / name).stat().st_size == file.bytes for name, file in manifest.files.items())
    except OSError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
