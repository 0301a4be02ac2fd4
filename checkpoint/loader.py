"""Finds the checkpoint that a run begins from: the newest that is whole, of the fastest place that has it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lightkeeper.checkpoint.content import Names
from lightkeeper.checkpoint.manifest import Damaged, Manifest
from lightkeeper.checkpoint.names import STEP_MAX
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.checkpoint.restoring import check_together, restore
from lightkeeper.checkpoint.running import who_trains
from lightkeeper.checkpoint.tier import LOCAL, Tier
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.events.of_checkpoints import CheckpointLoaded, CheckpointSkipped
from lightkeeper.manager.exits import ORPHANED
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.manager.trainer import Manager


class CameForNothing(ToldError):
    """The job whose state this group was to be given is over; started again, it loads a checkpoint."""

    exit_code = ORPHANED


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded: in which tier, and where."""

    tier: int
    path: Path
    manifest: Manifest


Said: TypeAlias = tuple[str, list[Candidate], str]  # who trains; candidates; why nothing may be done


class Loader:
    """Loads into the objects of a manager.

    Args:
        manager: the loop's.
        tiers: the fastest first.
        names: of the objects.
        ranks: of this group.
        fresh: begin anew, whatever there is.
        accept: what may differ from the run that was saved.
    """

    def __init__(
        self, manager: Manager, tiers: list[Tier], names: Names, ranks: Ranks, fresh: bool, accept: tuple[str, ...]
    ) -> None:
        self._manager, self._tiers, self._names, self._ranks, self._fresh = manager, tiers, names, ranks, fresh
        self._accept = accept
        self._trains = ""  # who did when this group came, as long as it has not been given its state

    def load(self, step: int | None) -> Manifest | None:
        """See `Checkpoints.load`; the manifest of what was loaded, or None."""
        if self._manager.started:
            raise UsageError("Checkpoints.load() after the first step began: call it before")
        nothing: Said = ("", [], "")
        trains, candidates, problem = self._ranks.of_first(self._find(step) if self._ranks.first else nothing)
        if problem:
            raise UsageError(problem)
        self._trains = trains
        if trains:
            self._say(
                f"the job trains already ({trains} is a member): its state comes from there, not from a checkpoint"
            )
            return None
        for candidate in candidates:
            self._check_seed(candidate.manifest)
            if self._try(candidate):
                return candidate.manifest
        used: bool = self._ranks.of_first(self._used() if self._ranks.first else False)
        if candidates or used:
            where = ", ".join(str(tier.folder.path) for tier in self._tiers)
            raise UsageError(
                f"there are checkpoints in {where}, and none of them can be loaded (the lines above say why): mend "
                "one, or say Checkpoints(fresh=True) to begin again at step 0"
            )
        self._say(f"no checkpoint in {self._tiers[-1].folder.path}: the run begins at step 0")
        return None

    def _check_seed(self, manifest: Manifest) -> None:
        """Before anything is overwritten; what else must be alike is known at the first step (`facts`)."""
        if manifest.seed != self._manager.seed and "seed" not in self._accept:
            raise UsageError(
                f"the checkpoint of step {manifest.step} is of a run with seed {manifest.seed}, and this one has "
                f"{self._manager.seed}: its data order would be another; give it the former, or if another is meant, "
                "Checkpoints(accept=('seed',))"
            )

    def healed(self) -> None:
        """The state here is the members'."""
        self._trains = ""

    def begins(self) -> None:
        """A step begins here.

        Raises:
            CameForNothing: nothing was loaded, for the job trained; it is over, and there are checkpoints.
        """
        if not self._trains:
            return
        try:
            used = any(tier.folder.was_used() for tier in self._tiers)
        except OSError:
            used = True  # nobody can tell
        if used:
            raise CameForNothing(
                f"the job trained when this group came ({self._trains} was a member), and was over before it had its "
                "state: it would begin at step 0, and there are checkpoints; start it again, and it loads one"
            )
        self._trains = ""

    def _find(self, step: int | None) -> Said:
        """On rank 0: whether there is anything to load, and what, best first."""
        trains = who_trains(self._manager.settings)
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # its launcher has started it again
        fresh, step = (False, None) if again else (self._fresh, step)
        try:
            for tier in self._tiers:
                path = tier.folder.path
                if os.path.lexists(path) and not path.is_dir():
                    return "", [], f"{path} is no folder (a link whose target is not there, or a file): is it mounted?"
            if trains:
                self._put_own_aside(fresh, step)
                return trains, [], ""
            if fresh and trains is None:
                return "", [], "no lighthouse says whether the job trains already: nothing is put aside for a fresh one"
            if fresh:
                for tier in self._tiers:
                    self._put_aside(tier, -1)
                return "", [], ""
            if trains is not None:  # else somebody may be writing
                for tier in self._tiers:
                    tier.folder.sweep(STEP_MAX)
            return "", self._candidates(step), ""
        except OSError as error:
            return "", [], f"checkpoints cannot be read: {error}"
        except UsageError as error:
            return "", [], str(error)

    def _candidates(self, step: int | None) -> list[Candidate]:
        found = []
        for number, tier in enumerate(self._tiers):
            for one in tier.folder.listed():
                if step is not None and one.step != step:
                    continue
                if one.manifest is None:
                    self._skip(tier, one.step, one.path, one.reason)
                else:
                    found.append(Candidate(number, one.path, one.manifest))
        if step is not None:
            if not found:
                there = sorted({one.step for tier in self._tiers for one in tier.folder.listed()})
                raise UsageError(f"there is no checkpoint of step {step}; there are {there or 'none'}")
            for tier in self._tiers:
                self._put_aside(tier, step)
        return sorted(found, key=lambda one: (-one.manifest.step, one.tier))

    def _put_own_aside(self, fresh: bool, step: int | None) -> None:
        """The job trains: what this group has on its own disk of a history that the job was told to give up."""
        after = -1 if fresh else step
        if after is not None:
            for tier in self._tiers:
                if tier.name == LOCAL:
                    self._put_aside(tier, after)

    def _put_aside(self, tier: Tier, after: int) -> None:
        moved = tier.folder.put_aside(after)
        if moved:
            self._say(f"put aside, as asked: {', '.join(path.name for path in moved)} in {tier.folder.path}")

    def _used(self) -> bool:
        return not self._fresh and any(tier.folder.was_used() for tier in self._tiers)

    def _try(self, candidate: Candidate) -> bool:
        tier, path, manifest = self._tiers[candidate.tier], candidate.path, candidate.manifest
        began = time.monotonic()
        problem = check_together(path, manifest, self._ranks)
        if not problem:
            try:
                restored = restore(path, manifest, self._names, self._ranks)
            except Damaged as error:
                problem = str(error)
        if problem:
            if self._ranks.first:
                self._skip(tier, manifest.step, path, problem)
            return False
        tier.folder.was_read(manifest.step)
        seconds = time.monotonic() - began
        self._manager.resume(manifest.step)
        if self._ranks.first:
            self._manager.note(
                CheckpointLoaded(
                    step=manifest.step, tier=tier.name, path=str(path), bytes=manifest.bytes, seconds=seconds,
                    compared=restored.compared, restarts=manifest.restarts + 1,
                )
            )  # fmt: skip
            size = f"{manifest.bytes / (1 << 20):.0f} MiB in {seconds:.1f} s"
            self._say(f"the run goes on at step {manifest.step}, from {path} ({size})")
        return True

    def _skip(self, tier: Tier, step: int, path: Path, reason: str) -> None:
        self._say(f"not loaded: {path}: {reason}")
        self._manager.note(CheckpointSkipped(step=step, tier=tier.name, path=str(path), reason=reason))

    def _say(self, line: str) -> None:
        if self._ranks.first:
            say(f"lightkeeper: {line}")
