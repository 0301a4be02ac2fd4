"""One place for checkpoints: when a save there is due, what became of it, and what a person is told of that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightkeeper.checkpoint.cadence import Cadence
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.saver import Outcome, Saver
from lightkeeper.events.header import Event
from lightkeeper.events.of_checkpoints import CheckpointFailed, CheckpointSaved
from lightkeeper.words import say

SHARED, LOCAL = "shared", "local"


@dataclass(frozen=True)
class Told:
    """Whom a tier tells: `note` takes events."""

    note: Callable[[Event], None]
    rank: int


class Tier:
    """One folder of checkpoints, its cadence and its saver.

    Args:
        name: "shared" or "local".
        folder: where.
        saver: who saves there.
        cadence: when.
        told: whom it tells.
        alarm_after: from so many failures in a row on, a person should look.
        patience_s: a save that takes longer is told.
    """

    def __init__(
        self, name: str, folder: Folder, saver: Saver, cadence: Cadence, told: Told, alarm_after: int, patience_s: float
    ) -> None:
        self.name, self.folder, self.saver, self.cadence = name, folder, saver, cadence
        self.ending = False  # nothing is trained any more: a save is waited for
        self.committed = -1  # steps behind the newest checkpoint that this process has seen committed
        self._told, self._alarm_after, self._patience_s = told, alarm_after, patience_s
        self._newest: int | None = None
        self._looking = False
        self._say_after_s = patience_s
        self._missed_step, self._missed_at_s = -1, 0.0

    # ------------------------------------------------------------ when

    def look(self, step: int) -> None:
        """Finds out, in the background, what is there of at most this step: somebody else may have saved last."""
        if self._looking:
            return
        self._looking, self._newest = True, None
        threading.Thread(target=self._look, args=(step,), name=f"looks at {self.folder.path}", daemon=True).start()

    def _look(self, step: int) -> None:
        try:
            self._newest = self.folder.newest(step)
        except OSError:
            self._newest = -1  # the save says what is wrong with it
        self._looking = False

    def due(self, step: int, now: float) -> bool:
        """Whether the state with so many steps behind it is to be saved, and can be.

        Args:
            step: their number.
            now: monotonic seconds.
        """
        if self._newest is not None:
            self.cadence.saved_step = max(self.cadence.saved_step, self._newest)
            self._newest = None
        if self._looking or not self.cadence.due(step, now):
            return False
        if self.saver.busy:
            self._miss(step, now)
            return False
        return True

    def _miss(self, step: int, now: float) -> None:
        """A save is due while the one before it is still under way: told once for each that is missed."""
        every = self.cadence.every
        again = step // every > self._missed_step // every if every else now - self._missed_at_s >= self._patience_s
        if self._missed_step >= 0 and not again:
            return
        self._missed_step, self._missed_at_s = step, now
        self.cadence.failed += 1
        self._failed(step, f"the save before it is under way since {self.saver.busy_s:.0f} s", pending=True)

    # ------------------------------------------------------------ what became of it

    def heed(self, now: float) -> list[Outcome]:
        """Tells what has ended, and what takes long; returns what has ended."""
        ended = self.saver.outcomes()
        for outcome in ended:
            if outcome.problem:
                again_s = self.cadence.fails(now)
                self._failed(outcome.name.step + 1, outcome.problem, again_s=again_s)
                continue
            self.committed = max(self.committed, outcome.name.step + 1)
            if outcome.manifest is not None:
                self._saved(outcome, now)
            else:
                self.cadence.saved(outcome.name.step + 1, 0.0, now)  # not rank 0
        busy_s = self.saver.busy_s
        if busy_s > self._say_after_s:
            self._say_after_s *= 2
            self._failed(0, f"a save is under way since {busy_s:.0f} s: is the storage there?", pending=True)
        elif busy_s < self._patience_s:
            self._say_after_s = self._patience_s
        return ended

    def _saved(self, outcome: Outcome, now: float) -> None:
        manifest = outcome.manifest
        assert manifest is not None
        failed, self._missed_step = self.cadence.failed, -1
        self.cadence.saved(manifest.step, manifest.copy_s + manifest.write_s, now)
        epoch, path = outcome.name.epoch, str(outcome.path)
        self._told.note(
            CheckpointSaved(
                step=manifest.step, epoch=epoch.number, term=epoch.term.number, tier=self.name, path=path,
                bytes=manifest.bytes, copy_s=manifest.copy_s, write_s=manifest.write_s, loaded=manifest.loaded,
                final=outcome.why, pruned=outcome.pruned, stood_s=manifest.stood_s,
            )
        )  # fmt: skip
        again = f", after {failed} that failed" if failed else ""
        if self.name == SHARED or failed:
            size = f"{manifest.bytes / (1 << 20):.0f} MiB in {manifest.write_s:.1f} s"
            say(f"lightkeeper: checkpoint of step {manifest.step} ({size}) in {path}{again}")

    def _failed(self, step: int, reason: str, pending: bool = False, again_s: float = 0.0) -> None:
        if self._told.rank:
            return  # rank 0 tells it for its group
        failures = max(1, self.cadence.failed)
        alarm = failures >= self._alarm_after
        self._told.note(
            CheckpointFailed(
                step=step, tier=self.name, reason=reason, failures=failures, pending=pending, again_s=again_s,
                alarm=alarm,
            )
        )  # fmt: skip
        loud = f"ALARM: {failures} saves in a row came to nothing: " if alarm else ""
        what = f"no checkpoint of step {step}" if step else "no checkpoint"
        again = f"; tried again after {again_s:.0f} s" if again_s and not self.ending else ""
        goes_on = "" if self.ending else "; training goes on"
        newest = f"; the newest is of step {self.committed}" if alarm and self.committed >= 0 else ""
        say(f"lightkeeper: {loud}{what} in {self.folder.path}: {reason}{goes_on}{again}{newest}")

    def wait_until_idle(self, seconds: float, written: bool = False) -> bool:
        """Waits for the save under way; see `Saver.wait`."""
        return self.saver.wait(time.monotonic() + seconds, written)
