"""Saves in the background, one after another, in one folder; a save that is slow, or fails, holds nobody up.

As a notary's clerk: what is given to him is a copy, he writes it out while business goes on, and the seal is put on
when it is known that the matter is settled (the state is final).
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from lightkeeper.checkpoint.content import Names, Tensors
from lightkeeper.checkpoint.files import write_whole
from lightkeeper.checkpoint.folder import KEEP_MIN, Folder
from lightkeeper.checkpoint.manifest import Damaged, Manifest, encode
from lightkeeper.checkpoint.names import MANIFEST
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.checkpoint.writing import SaveFailed, Written, together, write
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.state.snapshot import Snapshot, SnapshotFailed

LOAD_EVERY = 10

Make: TypeAlias = Callable[[Written, Snapshot], Manifest]


@dataclass(frozen=True)
class Outcome:
    """What became of a save.

    Attributes:
        name: of its state.
        problem: why it was not committed, the same on all ranks; "" if it was.
        manifest: of the checkpoint, on rank 0.
        path: where it is, on rank 0.
        why: by what the state is known to be final.
        pruned: how many older ones were deleted.
    """

    name: Entry
    problem: str = ""
    manifest: Manifest | None = None
    path: Path | None = None
    why: str = ""
    pruned: int = 0


@dataclass
class Save:
    """A state that is to be saved.

    Attributes:
        name: of the state.
        take: gives the copy once it is made, held until `give_back`; None if there was no memory for one here.
        wholes, differing: see `writing.write`.
        make: makes the manifest.
    """

    name: Entry
    take: Callable[[], Snapshot] | None
    give_back: Callable[[], None]
    wholes: Tensors
    differing: set[str]
    make: Make
    written: Path | None = field(default=None, init=False)


class Saver:
    """One folder's saves.

    Args:
        folder: where they go.
        names: of the objects that are saved.
        ranks: of this group, for this saver alone.
        keep, keep_every: see `Folder.prune`.
    """

    def __init__(self, folder: Folder, names: Names, ranks: Ranks, keep: int, keep_every: int = 0) -> None:
        self.folder = folder
        self._names, self._ranks, self._keep, self._keep_every = names, ranks, keep, keep_every
        self._jobs: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._finals: dict[Entry, str] = {}
        self._void: set[Entry] = set()
        self._under_way: deque[tuple[Entry, float]] = deque()  # since when
        self._waits = False  # for the word that its state is final
        self._count = 0
        self._began = time.time()
        self._outcomes: deque[Outcome] = deque()
        self._thread = threading.Thread(target=self._run, name=f"saves in {folder.path}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the training thread

    def save(self, save: Save) -> None:
        """Saves a state; on all ranks of the group in the same order."""
        with self._changed:
            self._under_way.append((save.name, time.monotonic()))
        self._jobs.put(save)

    def final(self, name: Entry, why: str) -> None:
        """The state of this name is final; an older one that is not known to be so by now never will be."""
        with self._changed:
            self._finals[name] = why
            names = [other for other, _ in self._under_way]
            self._void |= {other for other in names if other not in self._finals and other.step <= name.step}
            self._finals = {other: how for other, how in self._finals.items() if other in (name, *names)}
            self._changed.notify_all()

    def void(self) -> None:
        """The state here was replaced by another group's: what is not final by now is not of this history."""
        with self._changed:
            self._void |= {other for other, _ in self._under_way if other not in self._finals}
            self._changed.notify_all()

    @property
    def busy_s(self) -> float:
        """For how long the oldest save has been under way; 0 if there is none, or it only waits to be final."""
        with self._changed:
            if not self._under_way or self._waits:
                return 0.0
            return time.monotonic() - self._under_way[0][1]

    @property
    def busy(self) -> bool:
        """Whether a save is under way, one that only waits to be final included."""
        with self._changed:
            return bool(self._under_way)

    def saves(self, name: Entry) -> bool:
        """Whether this state is being saved."""
        with self._changed:
            return any(other == name for other, _ in self._under_way)

    def outcomes(self) -> list[Outcome]:
        """What has ended since this was asked last."""
        found = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        return found

    def wait(self, until_s: float, written: bool = False) -> bool:
        """Waits until no save is under way.

        Args:
            until_s: monotonic seconds at which it gives up.
            written: one that only waits to be final does not count.

        Returns:
            Whether that is so.
        """
        with self._changed:
            ended = lambda: not self._under_way or (written and self._waits)  # noqa: E731
            return self._changed.wait_for(ended, max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """No further save comes; the thread ends after those under way."""
        self._jobs.put(None)

    # ------------------------------------------------------------ the saving thread

    def _run(self) -> None:
        while (save := self._jobs.get()) is not None:
            try:
                outcome = self._done(save)
            except Exception as error:  # a bug, here or in an object's state: it is told, and training goes on
                traceback.print_exc()
                self._clean(save)
                outcome = Outcome(save.name, problem=f"{type(error).__name__}: {error}"[:300])
            with self._changed:
                self._under_way.popleft()
                self._void.discard(save.name)
                self._waits = False
                self._outcomes.append(outcome)
                self._changed.notify_all()

    def _done(self, save: Save) -> Outcome:
        try:
            manifest = self._write(save)
        except SaveFailed as error:
            self._clean(save)
            return Outcome(save.name, problem=str(error))
        finally:
            save.give_back()
        why = self._final(save.name)
        outcomes = []
        try:  # all ranks must hold the same to be saved
            together(self._ranks, lambda: outcomes.append(self._published(save, manifest, why)))
        except SaveFailed as error:
            self._clean(save)
            return Outcome(save.name, problem=str(error))
        return outcomes[0]

    def _published(self, save: Save, manifest: Manifest | None, why: str) -> Outcome:
        if manifest is None or save.written is None:
            return Outcome(save.name)  # rank 0 does it
        if not why:
            raise SaveFailed("its step was done again by others, so this state is nobody's any more")
        try:
            path = self.folder.publish(save.written, why)
        except (OSError, Damaged) as error:
            raise SaveFailed(f"it could not be put in place: {error}") from error
        return Outcome(save.name, "", manifest, path, why, pruned=self._prune(manifest.step))

    def _agree(self, save: Save) -> None:
        """All ranks come to save the same state: who is at an earlier one gives that up, and comes with its next.

        Raises:
            SaveFailed: other ranks are at a later save.
        """
        while True:
            said = self._ranks.all((save.name.step, str(save.name)))
            latest = max(said)
            if said[self._ranks.rank] != latest:
                raise SaveFailed(f"other ranks of this group save {latest[1]} already")
            if all(one == latest for one in said):
                return

    def _write(self, save: Save) -> Manifest | None:
        self._agree(save)
        load = self._count % LOAD_EVERY == 0
        self._count += 1
        taken: list[Snapshot] = []
        made: list[Manifest] = []

        def take() -> str:
            if save.take is None:
                raise SaveFailed("the save before it is still under way")
            try:
                taken.append(save.take())
            except SnapshotFailed as error:
                raise SaveFailed(str(error)) from error
            return str(self._folder_for(save)) if self._ranks.first else ""

        def describe() -> None:
            if self._ranks.first:
                made.append(save.make(written, taken[0]))
                write_whole(path / MANIFEST, encode(made[0]))

        save.written = path = Path(together(self._ranks, take)[0])
        written = write(path, taken[0], save.wholes, self._names, save.differing, self._ranks, load)
        together(self._ranks, describe)
        return made[0] if made else None

    def _folder_for(self, save: Save) -> Path:
        try:
            return self.folder.saving(save.name.step + 1)
        except OSError as error:
            raise SaveFailed(f"{self.folder.path} cannot be written: {error.strerror or error}") from error

    def _final(self, name: Entry) -> str:
        """Waits until it is known whether a state is final; by what it is, or ""."""
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: name in self._finals or name in self._void)
            self._waits = False
            return self._finals.get(name, "")

    def _clean(self, save: Save) -> None:
        if save.written is None or not self._ranks.first:
            return
        try:
            self.folder.drop(save.written)
        except OSError:
            pass  # it is swept away with the next one that is committed

    def _prune(self, step: int) -> int:
        try:
            self.folder.put_aside(step, before=self._began)  # of a history that was given up, or damaged
            gone = self.folder.prune(self._keep, self._keep_every, read=KEEP_MIN)
            self.folder.sweep(step)
        except OSError:
            return 0  # it is tried again after the next one
        return len(gone)
