"""Checkpoints on disk: torchtitan's own manager writes them, in one group, into one folder for all.

Whoever leads when a step is saved writes it, with all ranks of its group; nobody else touches the folder. A save whose
writer is lost stays without ``.metadata`` (torchtitan writes that last), and nobody loads it. Why there are never two
writers of one folder, and what could still go wrong: `docs/decisions/0041-checkpoints-in-place.md`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import LR_SCHEDULER, BaseCheckpointManager, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.lead import Where, leads

ENTRY = "lightkeeper"
_MARKERS = (".metadata", "model.safetensors.index.json")  # torchtitan writes one of them last
_STEP = re.compile(r"step-(\d+)")
_UNKNOWN = -1
CAUSE_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Terms:
    """What must be the same in the run that a checkpoint is of and in the one that goes on from it: it decides which
    samples a step has, and with which random state. The number of groups does not.

    Attributes:
        seed: `debug.seed`.
        microbatches: of a step, over all groups.
        places: data-parallel ranks of a group.
    """

    seed: int
    microbatches: int
    places: int

    def refusal(self, found: Terms) -> str:
        """Why a checkpoint with other terms cannot be gone on from; empty if they are the same."""
        told = (
            ("seed", "debug.seed", found.seed, self.seed),
            ("number of microbatches in a step", "fault_tolerance.microbatches", found.microbatches, self.microbatches),
            ("number of data-parallel ranks in a group", "parallelism.*", found.places, self.places),
        )
        differ = [
            f"its {what} is {there}, and here it is {here} ({o})" for what, o, there, here in told if there != here
        ]
        return "; ".join(differ)


class Origin:
    """The checkpoint's `lightkeeper` entry: the step that it is of, and the run's terms; int64[] each.

    Args:
        terms: of this run.

    Attributes:
        step: whose state is being saved, by torchtitan's count.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.step = terms, 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is written."""
        numbers = {"step": self.step, **dataclasses.asdict(self.terms)}
        return {name: torch.tensor(number) for name, number in numbers.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over the step: the terms were compared before anything was loaded."""
        self.step = int(state["step"])


class LeadCheckpointer(BaseCheckpointManager):
    """The checkpoint manager of a trainer whose run may be led by another group.

    Args:
        inner: the manager that the config built, whatever it saves and loads.
        where: the run.
        terms: of the run.
        running: names another group of the job that trains now, if there is one; asked on rank 0 before a load.

    Raises:
        UsageError: `inner` is no manager that writes in torchtitan's way.
    """

    def __init__(
        self, inner: BaseCheckpointManager, where: Where, terms: Terms, running: Callable[[], str | None]
    ) -> None:
        self.inner, self.enable = inner, inner.enable
        self._where, self._running = where, running
        self._wrote = _UNKNOWN
        if not self.enable:
            return
        if not isinstance(inner, CheckpointManager):
            raise UsageError(
                f"checkpoints of {type(inner).__name__} are not supported with fault tolerance: give a "
                "CheckpointManager.Config, or one of a subclass"
            )
        self._origin = inner.states[ENTRY] = Origin(terms)
        self._keep, inner.keep_latest_k = inner.keep_latest_k, 0  # what is purged is decided here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    @property
    def save_future(self) -> Any:
        """The inner one's."""
        return self.inner.save_future

    # ------------------------------------------------------------ saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if last_step:
            self.inner.maybe_wait_for_saving()  # it may have led before
        if not leads(self._where):
            return False
        return self._write(curr_step, last_step)

    def save_if_lost(self, last: int) -> bool:
        """Saves the last step anew if whoever led was lost while it did.

        Call it when the run has ended well, in the group that leads then: the others have nobody to wait for any more.

        Args:
            last: number of the run's last step, by torchtitan's count.
        """
        if not self.enable or self._wrote == last or self._is_whole(last):
            return False
        return self._write(last, last_step=True)

    def _write(self, step: int, last_step: bool) -> bool:
        inner = self.inner
        if not inner._should_save(step, last_step):
            return False
        with self._where.expect("checkpoint"):
            self._wait_for_the_one_before()
            self._origin.step = step
            self._clear(inner._create_checkpoint_id(step))
            try:
                inner.save(step, last_step)
            except CheckpointException as error:  # on all ranks alike
                if last_step:
                    raise
                self._tell(f"step {step} was not saved", error)
                return False
            self._purge()
        self._wrote = step
        return True

    def _wait_for_the_one_before(self) -> None:
        """An asynchronous save that failed is told where the next one begins."""
        try:
            self.inner.maybe_wait_for_saving()
        except CheckpointException as error:
            self.inner.save_future = None
            self._tell("the save before this one failed", error)

    def _tell(self, what: str, error: CheckpointException) -> None:
        """A disk that is full today may not be so at the next interval: training goes on."""
        causes = sorted({f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()})
        logger.error(f"Fault tolerance: {what}, and training goes on: {'; '.join(causes)[:CAUSE_CHARS_MAX]}")

    def _clear(self, folder: str) -> None:
        """Removes what a lost writer, or an earlier run, left of this step: an old marker must not vouch for new data.

        torch makes the folder on every rank before it agrees on who writes what, and rank 0 does so after this; so no
        file is written before.
        """
        if dist.get_rank() == 0 and filesystem.exists(folder):
            logger.info(f"Fault tolerance: {folder} holds an older save of this step, which is removed")
            filesystem.rmtree(folder)

    def _is_whole(self, step: int) -> bool:
        folder = self.inner._create_checkpoint_id(step)
        return any(filesystem.isfile(filesystem.join(folder, marker)) for marker in _MARKERS)

    def _purge(self) -> None:
        """Removes what is older than the newest `keep_latest_k` checkpoints that are whole.

        torchtitan counts folders, as its last but one save is always whole. That of a writer that was lost is not.
        """
        inner = self.inner
        if self._keep == 0 or dist.get_rank() != 0 or not filesystem.isdir(inner.folder):
            return
        found = [match for match in map(_STEP.fullmatch, filesystem.listdir(inner.folder)) if match]
        steps = sorted(int(match.group(1)) for match in found)
        whole = [step for step in steps if self._is_whole(step)]
        if len(whole) > self._keep:
            for step in steps[: steps.index(whole[-self._keep])]:
                inner.purge_queue.put(inner._create_checkpoint_id(step))

    def _maybe_wait_for_staging(self) -> None:
        self.inner.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self.inner.maybe_wait_for_saving()

    def _close(self) -> None:
        if sys.exc_info()[0] is None:  # else its other ranks may be gone
            self.inner.maybe_wait_for_saving()
        self.inner.close()

    # ------------------------------------------------------------ loading

    def _load(self, step: int = -1) -> bool:
        if other := self._another_trains():
            logger.info(
                f"Fault tolerance: no checkpoint is loaded, since {other} trains already: this group is given its state"
            )
            return False
        if folder := self._source(step):
            self._check(folder)
        loaded = bool(self.inner.load(step))
        if loaded:
            self._set_learning_rates()
        return loaded

    def _another_trains(self) -> str | None:
        """The same answer on all ranks, which load together or not at all."""
        answer = [self._running() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _source(self, step: int) -> str | None:
        """The checkpoint that would be loaded, if it is one of all state and not of a model alone."""
        inner = self.inner
        if filesystem.exists(inner.folder) and (found := inner._find_load_step() if step == -1 else step) >= 0:
            folder = inner._create_checkpoint_id(found)
            return folder if found > 0 and filesystem.isdir(folder) else None
        whole = inner.initial_load_path and not inner.initial_load_model_only
        return inner.initial_load_path if whole and filesystem.isdir(inner.initial_load_path) else None

    def _check(self, folder: str) -> None:
        """Compares the terms, before anything is loaded.

        Raises:
            UsageError: they differ, or the checkpoint has none.
        """
        if ENTRY in self.inner.exclude_from_loading:
            return
        names = [field.name for field in dataclasses.fields(Terms)]
        found = {name: torch.tensor(_UNKNOWN) for name in names}
        dcp.load({ENTRY: found}, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        terms = Terms(**{name: int(value) for name, value in found.items()})
        if terms.microbatches == _UNKNOWN:
            raise UsageError(
                f"the checkpoint {folder} has no entry {ENTRY!r}: it holds a model alone (last_save_model_only), "
                "or was written without fault tolerance and does not say which samples come next; to begin the data "
                f"anew, give --checkpoint.exclude_from_loading {ENTRY} dataloader"
            )
        if why := self._origin.terms.refusal(terms):
            raise UsageError(f"this run cannot go on from the checkpoint {folder}: {why}")

    def _set_learning_rates(self) -> None:
        """A schedule that is loaded knows its rate; the optimizer is told only by a checkpoint of its own."""
        for scheduler in self.inner.states[LR_SCHEDULER].schedulers:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(float(rate))
                else:
                    group["lr"] = rate
