"""torchtitan's trainer, as one replica group of a job whose groups may be lost and come back."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from lightkeeper.checkpoint.running import who_trains
from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.alike import alike_in
from lightkeeper.integrations.torchtitan.checkpoint import LeadCheckpointer, Terms
from lightkeeper.integrations.torchtitan.config import FaultTolerance
from lightkeeper.integrations.torchtitan.data import SlotStreams
from lightkeeper.integrations.torchtitan.figures import Started, lead_logger, settle, without_writers
from lightkeeper.integrations.torchtitan.lead import LeadValidator, MarkedProfilerConfig, per_group_folders
from lightkeeper.integrations.torchtitan.patience import comm_of
from lightkeeper.integrations.torchtitan.refusals import refuse_contradictions, refuse_unsupported
from lightkeeper.integrations.torchtitan.run import Run, Standing
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.usererrors import tell_in_one_line


class FaultTolerantTrainer(Trainer):
    """A `Trainer` whose steps are a `lightkeeper.Manager`'s; without `fault_tolerance.enable`, torchtitan's own.

    Attributes:
        run: its part in the job; None while it is built, and without fault tolerance.
        started: when the job began, as its groups have agreed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, and a section of ours."""

        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)

    run: Run | None
    step: int
    ntokens_seen: int
    checkpointer: Any
    validator: Any
    started: Started
    _settings: Settings | None
    _alike: dict[str, str]
    _standing: Standing
    _microbatches: int
    _places: int
    _loaded_step: int | None

    def __init__(self, config: Config) -> None:
        tell_in_one_line()
        self.run = self._settings = None
        refuse_contradictions(config)
        if not config.fault_tolerance.enable or config.checkpoint.create_seed_checkpoint:
            super().__init__(config)
            return
        self._settings = config.fault_tolerance.settings()
        refuse_unsupported(config, ranks=int(os.environ.get("WORLD_SIZE", "1")))
        self._alike = alike_in(config)
        self._standing, self.started = Standing(self, self._settings.group), Started()
        super().__init__(_prepared(config, self._standing))
        self._lead(config)

    def init_distributed(self) -> ParallelDims:
        """The group's own ranks, and what a step has for them."""
        if self._settings is not None:
            self.config.comm = comm_of(self.config.comm, self._settings, int(os.environ.get("WORLD_SIZE", "1")))
        dims = super().init_distributed()
        if self._settings is not None:
            training = self.config.training = dataclasses.replace(self.config.training)
            self._places = dims.dp_replicate * dims.dp_shard
            group_batch = training.local_batch_size * self._places
            self._microbatches = _microbatches(self.config, self._settings, group_batch)
            training.global_batch_size = self._microbatches * group_batch
            self.config.dataloader = SlotStreams.around(
                self.config.dataloader, self._microbatches, self.config.fault_tolerance.stream_state_kb
            )
        return dims

    def _lead(self, given: Config) -> None:
        """What is done once for all groups is done where the run is led.

        Args:
            given: the config as it was before each group got its own.
        """
        settings, standing = self._settings, self._standing
        assert settings is not None and self.config.debug.seed is not None
        terms = Terms(self.config.debug.seed, self._microbatches, self._places)
        self.checkpointer = LeadCheckpointer(self.checkpointer, standing, terms, lambda: who_trains(settings))
        if self.config.validator.enable:
            self.validator = LeadValidator(self.validator, standing)
        self.metrics_processor.logger = lead_logger(
            self.metrics_processor, given.metrics, standing, self.started,
            root=given.dump_folder, job=settings.job, told=given.to_dict(),
        )  # fmt: skip

    # ------------------------------------------------------------ the loop

    def should_continue_training(self) -> bool:
        """Whether there is a further step; it is begun here, and the one before is ended."""
        if self._settings is None:
            return super().should_continue_training()
        if self.run is None:
            self._loaded_step = self.step
            self.run = Run(self, self._settings, self._microbatches, self._alike)
        if not self.run.next():
            self._end()
            return False
        assert self.run.step is not None
        self.step = self.run.step.index  # the loop counts on from here
        settle(self.metrics_processor.logger)
        return True

    def _end(self) -> None:
        """The run is over here; if whoever led was lost while it saved the last step, it is saved anew."""
        steps = self.config.training.steps
        assert self.run is not None
        if self.run.manager.leads and self.run.progress.step == steps:
            self.checkpointer.save_if_lost(steps)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One optimizer step of all groups; this one computes its share of the microbatches."""
        if self.run is None:
            super().train_step(data_iterator)
            return
        run, step = self.run, self.run.step
        assert step is not None
        if self.dataloader.ended(step):
            run.manager.cancel()
            raise DataloaderExhaustedError  # torchtitan's loop ends well with it
        self.optimizers.zero_grad(set_to_none=True)
        lr_metrics = self.lr_schedulers.get_metrics()
        for k in step.microbatches():
            self._microbatch(k)
        grad_norm = run.clip(self.config.training.max_norm)
        self.checkpointer.maybe_wait_for_staging()
        run.experts.committed(step)
        self.optimizers.step()
        self.lr_schedulers.step()
        run.applied()
        self.ntokens_seen = run.progress.ntokens_seen // run.places
        if self.metrics_processor.should_log(self.step):
            self._log(grad_norm, lr_metrics)
        self._shorten_timeouts()

    def _microbatch(self, k: int) -> None:
        """This rank's part of one microbatch, forward and backward."""
        assert self.run is not None and self.run.step is not None
        input_dict, labels = self.dataloader.batch(self.run.step.index, k)
        processor = self.metrics_processor
        processor.ntokens_since_last_log += labels.numel()
        processor.data_loading_times.append(self.dataloader.reading_s())
        inputs = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for key, value in input_dict.items()
        }
        loss = self.forward_backward_step(
            input_dict=inputs,
            labels=labels.to(self.device),
            global_valid_tokens=self.run.valid_tokens(self.device),
        )
        self.run.computed(k, loss, labels)

    def _log(self, grad_norm: torch.Tensor, lr_metrics: dict[str, float]) -> None:
        """The step's figures over all groups; raises for a loss that is not finite, in all of them alike."""
        assert self.run is not None
        mean, highest = self.run.losses()
        if not math.isfinite(mean):
            raise RuntimeError(f"the loss of step {self.step} is not finite: {mean}")
        if not self._standing.live:
            return
        processor = self.metrics_processor
        if not processor.data_loading_times:  # it had no share since the last time
            processor.data_loading_times.append(0.0)
        seen = {"n_tokens_seen": self.run.progress.ntokens_seen, **lr_metrics}
        processor.log(self.step, mean, highest, float(grad_norm), extra_metrics=seen)

    def _shorten_timeouts(self) -> None:
        """After this process's first step; torchtitan does so itself unless a heal moved the step on."""
        loaded, self._loaded_step = self._loaded_step, None
        if loaded is not None and self.step - loaded != 1:
            timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)


def _microbatches(config: Any, settings: Settings, group_batch: int) -> int:
    """Microbatches of a step over all groups.

    Raises:
        UsageError: what is said of them does not fit together.
    """
    given, batch = config.fault_tolerance.microbatches, config.training.global_batch_size
    if batch > 0 and batch % group_batch:
        raise UsageError(
            f"training.global_batch_size {batch} is no multiple of {group_batch}, the batch of one group "
            "(local_batch_size times its data-parallel degree)"
        )
    if given is not None and batch > 0 and given * group_batch != batch:
        raise UsageError(
            f"fault_tolerance.microbatches is {given}, and training.global_batch_size {batch} makes "
            f"{batch // group_batch}: leave one of them out"
        )
    if given is not None and given < 1:
        raise UsageError(f"fault_tolerance.microbatches is {given}: a step has at least one")
    return given or (batch // group_batch if batch > 0 else settings.groups - settings.spares)


def _prepared(config: FaultTolerantTrainer.Config, standing: Standing) -> FaultTolerantTrainer.Config:
    """The config as all groups need it: a copy."""
    config = per_group_folders(config, standing.group)
    if not config.training.disable_cuda_graphs:
        config.training = dataclasses.replace(config.training, disable_cuda_graphs=True)
        logger.info("Fault tolerance: CUDA graphs are off, since they would freeze gradient hooks into the graph")
    if config.debug.seed is None:
        config.debug = dataclasses.replace(config.debug, seed=0)
        logger.info("Fault tolerance: debug.seed is 0, since all groups must begin with the same weights")
    config.profiler = MarkedProfilerConfig(config.profiler, standing)
    config.metrics = without_writers(config.metrics)
    return config
