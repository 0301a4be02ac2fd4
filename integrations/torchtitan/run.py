"""`Run`: one trainer's part in the job, between torchtitan's trainer and lightkeeper's `Manager`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils

import lightkeeper
from lightkeeper.integrations.torchtitan.data import valid_in
from lightkeeper.integrations.torchtitan.experts import LOADS, ExpertLoads
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.step import Step

if TYPE_CHECKING:
    from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer

TOKENS, LOSS, PARTS, SEEN, CLOCK = "tokens", "logged loss", "logged loss of a part", "tokens seen", "clock"


@dataclass
class Progress:
    """What torchtitan counts of a run, and what travels to a group that returns.

    Attributes:
        step: optimizer steps done.
        ntokens_seen: tokens read by all groups in them.
    """

    step: int = 0
    ntokens_seen: int = 0

    def state_dict(self) -> dict[str, int]:
        """The numbers."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes them over."""
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Standing:
    """Where a trainer's run stands, for what is made before the run is (`lead.Where`).

    Args:
        trainer: whose.
        group: name of its group.
    """

    def __init__(self, trainer: FaultTolerantTrainer, group: str) -> None:
        self._trainer, self.group = trainer, group

    @property
    def live(self) -> bool:
        """Whether the step at hand is one that this group did with the others, not one that it only applies."""
        step = self._at_hand()
        return step is not None and step.live

    @property
    def lead(self) -> bool:
        """Whether this group has the lowest slot: true on all of its ranks."""
        step = self._at_hand()
        return step is not None and step.lead

    @property
    def step(self) -> int:
        """Torchtitan's count: steps done, the one at hand among them."""
        return self._trainer.step

    def expect(self, phase: str) -> AbstractContextManager[None]:
        """See `Manager.expect`; before there is a run nobody looks."""
        run = self._trainer.run
        return contextlib.nullcontext() if run is None else run.manager.expect(phase)

    def _at_hand(self) -> Step | None:
        run = self._trainer.run
        return None if run is None else run.step


class Run:
    """The steps of one trainer.

    Args:
        trainer: built, its checkpoint loaded.
        settings: of its group.
        microbatches: of a step, over all groups.
        alike: what of its config must be the same in all groups, by name.

    Attributes:
        manager: its `lightkeeper.Manager`.
        progress: what is committed.
        experts: what their biases are moved by.
        step: the step at hand; None before the first.
    """

    def __init__(
        self, trainer: FaultTolerantTrainer, settings: Settings, microbatches: int, alike: Mapping[str, str]
    ) -> None:
        config, dims = trainer.config, trainer.parallel_dims
        self.microbatches = microbatches
        self._trainer = trainer
        parts = trainer.model_parts
        self.manager = lightkeeper.Manager(
            parts[0] if len(parts) == 1 else parts,
            list(trainer.optimizers),
            seed=config.debug.seed,
            place=dims.get_mesh("batch") if dims.dp_enabled else (0, 1),
            sync=config.fault_tolerance.sync,
            settings=settings,
        )
        self.places = self.manager.place.count
        self.progress = Progress(trainer.step, trainer.ntokens_seen * self.places)
        self.step: Step | None = None
        manager = self.manager
        manager.extra(TOKENS, dtype=torch.int64, before=trainer.dataloader.tokens)
        manager.extra(LOSS)
        manager.extra(PARTS, (microbatches, self.places))
        manager.extra(SEEN, dtype=torch.int64)
        manager.extra(CLOCK, dtype=torch.int64, agreed=True)
        self.experts = ExpertLoads(parts, dims)
        if self.experts.numel:
            manager.extra(LOADS, (self.experts.numel,), torch.int64)
        manager.register("lr-schedulers", trainer.lr_schedulers)
        manager.register("progress", self.progress)
        manager.register("started", trainer.started)
        for name, value in alike.items():
            manager.alike(name, value)
        trainer.dataloader.bind(manager)
        if self.progress.step:
            manager.resume(self.progress.step)
        self._steps = manager.steps(config.training.steps, microbatches)

    def next(self) -> bool:
        """Ends the step at hand and begins the next one; the first one joins, and heals.

        Returns:
            False if there is none: the run is over, or the group has left.
        """
        step = next(self._steps, None)
        if step is None:
            return False  # `step` stays the last one: who led in it has the run's end to see to
        self.step = step
        step.agree(CLOCK, int(time.time()))
        self.experts.clear()
        return True

    def valid_tokens(self, device: torch.device) -> torch.Tensor:
        """Tokens of the step over all groups, by which its loss is divided: int64[]."""
        assert self.step is not None
        return self.step.before[TOKENS].to(device)

    def computed(self, k: int, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Microbatch `k` has been computed here.

        Args:
            k: its index.
            loss: summed over this rank's tokens of it, divided by those of the step.
            labels: this rank's, any shape, on the CPU.
        """
        assert self.step is not None
        step = self.step
        step.contribute(SEEN, labels.numel())
        self.experts.computed(step)
        if not self._trainer.metrics_processor.should_log(self._trainer.step):
            return  # else the device would have to be waited for
        loss = _plain(loss).detach()
        step.contribute(LOSS, loss)
        part = torch.zeros((self.microbatches, self.places), dtype=torch.float64, device=loss.device)
        part[k, self.manager.place.index] = loss.double() * float(step.before[TOKENS]) / max(valid_in(labels), 1)
        step.contribute(PARTS, part)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the gradients of the step; the same bits in all groups.

        torchtitan's own function gives the bits of a run without this package. It is asked where groups cannot differ
        by it: with one group, and in groups of one rank, which have no collective whose order might be another's.

        Returns:
            The norm before, float[].
        """
        parameters = [p for part in self._trainer.model_parts for p in part.parameters()]
        told = self.manager.settings  # its launcher may have added to what the trainer was told
        if 1 in (told.groups, told.ranks):
            norm: torch.Tensor = dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True)
            return norm
        return lightkeeper.clip_grad_norm_(parameters, max_norm)

    def applied(self) -> None:
        """The optimizer has taken the step: the run has come one further."""
        assert self.step is not None
        self.progress.step = self.step.index + 1
        self.progress.ntokens_seen += int(self.step.reduced[SEEN])
        self._trainer.started.agreed(int(self.step.reduced[CLOCK]))

    def losses(self) -> tuple[float, float]:
        """Of a step that is logged: the mean over all tokens, and the highest of a rank's part of a microbatch."""
        assert self.step is not None
        reduced = self.step.reduced
        return float(reduced[LOSS]), float(reduced[PARTS].max())


def _plain(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
