"""What a training loop holds to be saved and begun again: `Checkpoints`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from lightkeeper.checkpoint.cadence import Cadence
from lightkeeper.checkpoint.content import Names, wholes
from lightkeeper.checkpoint.copies import Copies
from lightkeeper.checkpoint.facts import Facts
from lightkeeper.checkpoint.folder import KEEP_MIN, Folder
from lightkeeper.checkpoint.loader import Loader
from lightkeeper.checkpoint.manifest import Manifest
from lightkeeper.checkpoint.polled import Polled
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.checkpoint.requests import Asked
from lightkeeper.checkpoint.saver import Save, Saver
from lightkeeper.checkpoint.tier import LOCAL, SHARED, Tier, Told
from lightkeeper.checkpoint.writing import Written
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.events.of_checkpoints import StopRequested
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.state.codec import StateRefused
from lightkeeper.manager.state.snapshot import Snapshot
from lightkeeper.manager.watch import Watcher
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.manager.trainer import Manager

EXTRA = "lightkeeper-checkpoint"
_SAVE, _STOP = 0, 1  # places in it: how many groups wish for it
ALARM_AFTER = 3
KEEP_SHARE = 0.9  # of the time that a group has which keeps the job's last step; the rest is for its end


class NotSaved(ToldError):
    """The run is finished, and its last state is on no disk."""


class Checkpoints(Watcher):
    """Saves the run's state, and begins it again from what was saved.

    Made after `Manager` and all `Manager.register`, on every rank and alike in all groups. Saving goes by itself: the
    group that leads writes, all its ranks together, in the background, and a checkpoint counts once its state is final.
    The state after the last step is always saved.

    Args:
        manager: the loop's.
        folder: on storage that all groups reach; by default ``checkpoints`` in the run's folder.
        every: a save after so many steps.
        every_s: or after so many seconds; with neither, as often as it pays by what a save costs and how often the run
            had to be begun again (`cadence`).
        keep: so many of the newest are kept, at least 2.
        keep_every: also kept is every one whose step is a multiple of this; 0: none.
        local: a folder on the node's own disk, where every group saves as well, in a folder with its name.
        local_every: a save there after so many steps.
        samples: gives the samples of all steps before one, for the manifest: ``sampler.consumed_before``.
        mtbf_s: how often the run is held to need a checkpoint, in seconds, before it ever did.
        time_limit_s: the run saves and ends in time for this many seconds from now on; 0: no limit. (When
            Slurm's time for a group is over, that group leaves.)
        alarm_after: from so many failed saves in a row on, a person should look.
        accept: names of what may differ from the run that was saved, of ``seed`` and ``microbatches of step 0``.
        fresh: begin at step 0 although there are checkpoints; they are put aside.

    Raises:
        UsageError: for what cannot be right.
    """

    def __init__(
        self,
        manager: Manager,
        folder: str | Path | None = None,
        *,
        every: int = 0,
        every_s: float = 0.0,
        keep: int = 3,
        keep_every: int = 0,
        local: str | Path | None = None,
        local_every: int = 0,
        samples: Callable[[int], int] | None = None,
        mtbf_s: float = 8 * 3600.0,
        time_limit_s: float = 0.0,
        alarm_after: int = ALARM_AFTER,
        accept: tuple[str, ...] = (),
        fresh: bool = False,
    ) -> None:
        _check(every, every_s, keep, keep_every, local, local_every, mtbf_s, time_limit_s, alarm_after, manager)
        self._manager = manager
        place = _folder_of(manager, folder)
        by = f"{manager.settings.group}-{manager.incarnation}"
        registry, left_out = manager.registry.whole()
        if left_out and manager.rank == 0:
            say(f"lightkeeper: not in checkpoints, since it cannot be copied exactly: {', '.join(left_out)}")
        self._registry, self._names, self._copies = registry, Names(registry), Copies(registry)
        self._facts = Facts(manager, samples, accept)
        told = Told(manager.note, manager.rank)
        budget_s = manager.settings.timeouts.outage_budget_s

        def tier(name: str, path: Path, cadence: Cadence, kept: int, kept_every: int) -> Tier:
            at = Folder(path, by)
            saver = Saver(at, self._names, Ranks(manager.settings.ranks), kept, kept_every)
            return Tier(name, at, saver, cadence, told, alarm_after, budget_s)

        now = time.monotonic()
        self._shared = tier(
            SHARED, place, Cadence(every, every_s, mtbf_s, saved_at=now, began_at=now), keep, keep_every
        )
        self._local: Tier | None = None
        if local is not None:
            self._local = tier(LOCAL, Path(local) / manager.settings.group, Cadence(local_every), KEEP_MIN, 0)
        self._ranks = Ranks(manager.settings.ranks)
        self._loader = Loader(manager, self._tiers, self._names, self._ranks, fresh, accept)
        self._polled = Polled(place, time_limit_s) if manager.rank == 0 else None
        self._applied: Entry | None = None
        self._wish = torch.zeros(2, dtype=torch.int64)
        self._led = False
        self._began_s: float | None = None
        self._stop_said = ""
        self._leaves = False
        self._tried: Entry | None = None  # of which the shared tier was to hold a checkpoint last
        self._asked_save: Asked | None = None  # of which a save was begun
        self._budget_s = budget_s
        manager.extra(EXTRA, (2,), torch.int64)
        manager.watch(self)

    # ------------------------------------------------------------ before the first step

    def load(self, step: int | None = None) -> int:
        """Loads the newest checkpoint that is whole, here and on every rank alike, and calls `Manager.resume`.

        If the job trains already nothing is loaded: the others' state is newer, and comes from them. If groups find
        different ones, those that are furthest on begin the run and the others take their state.

        Args:
            step: the checkpoint of this step and no other: later ones are put aside.

        Returns:
            How many steps the state has behind it: 0 if nothing was loaded.

        Raises:
            UsageError: there are checkpoints, and none of them can be loaded; or there is none of this step.
        """
        found = self._loader.load(step)
        if found is None:
            return 0
        self._facts.loaded(found)
        for tier in self._tiers:
            cadence = tier.cadence
            cadence.saved_step, cadence.failures, cadence.trained_s = found.step, found.restarts + 1, found.trained_s
        return found.step

    # ------------------------------------------------------------ what the loop does

    def begins(self, index: int) -> None:
        """See `Watcher`."""
        now = time.monotonic()
        self._loader.begins()
        self._facts.check(index)
        if self._began_s is not None:
            self._shared.cadence.cost.step(now - self._began_s, self._shared.saver.busy)
        self._began_s = now
        self._heed(now)
        leads = self._manager.leads
        if leads and not self._led:
            self._shared.look(index)
        self._led = leads
        wish = self._wishes(index, now) if self._manager.rank == 0 else (0, 0)
        if any(wish):
            self._manager.contribute(EXTRA, torch.tensor(wish, dtype=torch.int64))

    def _wishes(self, index: int, now: float) -> tuple[int, int]:
        """What this group asks all groups for in this step: to save the state after it, and to end the run there."""
        assert self._polled is not None
        usual = self._shared.cadence.cost.usual
        asked = self._polled.poll(2 * max(usual, default=0.0) + 2 * self._shared.cadence.write_s)
        save = self._led and self._shared.due(index + 1, now)
        if self._led and asked.save and not self._shared.saver.busy and not self._shared.cadence.rests(now):
            save, self._asked_save = True, asked
        if asked.leave and not self._leaves:
            self._leaves = True
            self._manager.leave(asked.leave)
        if asked.stop and not self._stop_said:
            self._stop_said = asked.stop
            say(f"lightkeeper: the run ends after step {index}, as asked by {asked.stop}")
        return int(save), int(bool(asked.stop))

    def committed(self, index: int, reduced: Mapping[str, torch.Tensor]) -> None:
        """See `Watcher`: the state is about to change, and the one before is final."""
        self._copies.settle()
        if self._applied is not None:
            self._final(self._applied, f"step {index} was reduced")
        self._wish = reduced[EXTRA]

    def applied(self, index: int) -> None:
        """See `Watcher`: the state stands until the next step is committed."""
        name = self._applied = self._manager.state_name
        tiers = []
        if self._manager.leads and int(self._wish[_SAVE]):
            tiers.append(self._shared)
        if self._local is not None and self._local.cadence.by_steps(index + 1):
            self._local.cadence.saved_step = index + 1  # by steps alone, so that all ranks do it in the same ones
            tiers.append(self._local)
        if tiers:
            self._save(name, tiers)
        if self._manager.alone:
            self._final(name, "this group was alone in its epoch")
        if int(self._wish[_STOP]):
            self._ends(index + 1)

    def _ends(self, step: int) -> None:
        self._manager.ends = True
        self._manager.note(StopRequested(step=step, reason=self._stop_said))

    def healed(self) -> None:
        """See `Watcher`: what is being saved is not of this history."""
        self._loader.healed()
        self._copies.settle()
        self._applied = None
        for tier in self._tiers:
            tier.saver.void()

    # ------------------------------------------------------------ the ends

    def closing(self) -> None:
        """See `Watcher`: whoever leads saves the last state before the others go."""
        name = self._manager.state_name
        if not name.made or not self._manager.leads or self._shared.committed == name.step + 1:
            return
        self._copies.settle()
        self._save_and_wait(name, self._manager.settings.timeouts.first_step_s)

    def closed(self) -> None:
        """See `Watcher`."""
        name = self._manager.state_name
        self._final(name, "the run was closed")
        with self._manager.expect("checkpoint"):
            for tier in self._tiers:
                tier.wait_until_idle(self._budget_s)
        self._heed(time.monotonic())
        self._close()
        step = name.step + 1
        if name.made and self._manager.leads and self._manager.total(step) == 0 and self._shared.committed != step:
            newest = self._shared.committed
            less = f"the newest checkpoint is of step {newest}" if newest >= 0 else "there is no checkpoint"
            raise NotSaved(f"the run has ended, and its last state, of step {step}, is not saved: {less}")

    def keeps(self, reason: str) -> None:
        """See `Watcher`: too few groups are left, or all were asked to leave."""
        name = self._manager.state_name
        if not name.made:
            return
        self._copies.settle()
        until_s = time.monotonic() + KEEP_SHARE * self._manager.settings.timeouts.stop_deadline_s
        self._final(name, f"the job ended, and this group was to keep its state: {reason.partition(':')[0]}"[:200])
        self._save_and_wait(name, until_s - time.monotonic())
        self._shared.wait_until_idle(until_s - time.monotonic())
        self._heed(time.monotonic())
        step = name.step + 1
        if self._manager.rank == 0:
            kept = self._shared.committed == step
            how = "kept" if kept else "NOT kept"
            say(f"lightkeeper: the state of step {step} is {how} in {self._shared.folder.path}")
        self._close()

    def _save_and_wait(self, name: Entry, seconds: float) -> None:
        """Saves a state while nothing else is done; tries again for as long as that makes sense."""
        until_s, step = time.monotonic() + seconds, name.step + 1
        fails_until_s, pause_s = time.monotonic() + min(seconds, self._budget_s), 1.0
        for tier in self._tiers:
            tier.ending = True
        with self._manager.expect("checkpoint", seconds):
            while self._shared.wait_until_idle(until_s - time.monotonic(), written=True):
                self._heed(time.monotonic())
                if self._shared.saver.saves(name) or self._shared.committed == step:
                    return
                if self._tried == name:
                    left_s = fails_until_s - time.monotonic()
                    if left_s < pause_s:
                        return
                    if self._manager.rank == 0 and pause_s == 1.0:
                        say(
                            f"lightkeeper: nothing is left to do but to save step {step}: it is tried again for "
                            f"{left_s:.0f} s; mend the storage, or signal twice to end without it"
                        )
                    time.sleep(pause_s)
                    pause_s *= 2
                self._save(name, [self._shared])

    def _close(self) -> None:
        for tier in self._tiers:
            tier.saver.close()
        if self._polled is not None:
            self._polled.end(stopped=self._manager.ends)

    # ------------------------------------------------------------ small helpers

    @property
    def _tiers(self) -> list[Tier]:
        """The fastest first."""
        return [tier for tier in (self._local, self._shared) if tier is not None]

    def _save(self, name: Entry, tiers: list[Tier]) -> None:
        """Begins to copy the state here, for each of these tiers whose last save has ended."""
        free = [tier for tier in tiers if not tier.saver.busy]
        held = None
        if free:
            try:
                held = self._copies.begin(name, len(free))
            except StateRefused as error:
                say(f"lightkeeper: no checkpoint of step {name.step + 1}: {error}")
        if self._shared in tiers:
            self._tried = name
        facts = self._facts.of(name)

        def make(written: Written, snapshot: Snapshot) -> Manifest:
            return msgspec.structs.replace(facts(written, snapshot), stood_s=0.0 if held is None else held.stood_s)

        distributed = wholes(self._registry)
        differing = self._registry.differing()
        for tier in tiers:
            mine = held if tier in free else None
            tier.cadence.begins(name.step + 1, time.monotonic())
            tier.saver.save(
                Save(
                    name,
                    None if mine is None else mine.take,
                    _nothing if mine is None else mine.give_back,
                    distributed,
                    differing,
                    make,
                )
            )

    def _final(self, name: Entry, why: str) -> None:
        for tier in self._tiers:
            tier.saver.final(name, why)

    def _heed(self, now: float) -> None:
        """Tells what became of saves."""
        for tier in self._tiers:
            for outcome in tier.heed(now):
                if tier is self._shared and outcome.manifest is not None and self._polled is not None:
                    if self._asked_save is not None:
                        self._polled.saved(self._asked_save)
                    self._asked_save = None


def _nothing() -> None:
    pass


def _check(
    every: int, every_s: float, keep: int, keep_every: int, local: str | Path | None, local_every: int,
    mtbf_s: float, time_limit_s: float, alarm_after: int, manager: Manager,
) -> None:  # fmt: skip
    numbers = {
        "every": every, "every_s": every_s, "keep_every": keep_every, "local_every": local_every,
        "time_limit_s": time_limit_s,
    }  # fmt: skip
    for name, value in numbers.items():
        if not 0 <= value < 1e12:
            raise UsageError(f"Checkpoints: {name} {value}: it is not negative (0: not)")
    if every and every_s:
        raise UsageError("Checkpoints: every and every_s are both given: give one of them")
    if keep < KEEP_MIN:
        raise UsageError(f"Checkpoints: keep {keep}: at least {KEEP_MIN} are kept")
    if alarm_after < 1 or not 1 <= mtbf_s < 1e12:
        raise UsageError("Checkpoints: alarm_after and mtbf_s are at least 1")
    if (local is None) != (local_every == 0):
        raise UsageError("Checkpoints: local and local_every belong together: give both, or neither")
    if local is not None and manager.settings.nnodes > 1:
        raise UsageError("Checkpoints: local is for groups of one node: of several, each would have a part of it")
    if manager.started:
        raise UsageError("Checkpoints after the first step began: make them before")


def _folder_of(manager: Manager, folder: str | Path | None) -> Path:
    if folder:
        return Path(folder)
    if not manager.settings.run_folder:
        raise UsageError("Checkpoints: name a folder, or give the run one (--run-folder)")
    return Path(manager.settings.run_folder) / "checkpoints"
