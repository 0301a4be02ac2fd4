"""TensorBoard and Weights & Biases, once for all groups: whoever leads writes, into one folder and one W&B run.

Every group says its figures here, as torchtitan's `MetricsProcessor` does; only the lead's are written. Its writers are
made when it first writes, and closed as soon as it no longer leads. Whoever takes over goes on in the same folder and
run, whose name the groups have agreed on (`Started`).

No step is there twice, and none is missing. A writer that is lost may have written the step before, or not: so a small
file says up to which step was written, and every group keeps the last figures that it did not write itself. A step that
was done again after its writer was lost is hidden by TensorBoard's own means (a new writer says from which step on
it replaces what was there), and not taken by W&B, which refuses a step below its last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, TensorBoardLogger, WandBLogger
from torchtitan.tools.logging import logger

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.lead import Where, leads

WRITTEN = "written"  # the file that says up to which step
_DIGITS_MAX = 20
_FORKS = ("WANDB_RESUME_FROM", "WANDB_FORK_FROM")


class Started:
    """When the job began, by the clock of the group that led then: what names its folder. Registered, so that a group
    that returns knows it.

    Attributes:
        at_s: seconds since 1970; 0 before the first step is done.
    """

    def __init__(self) -> None:
        self.at_s = 0

    def agreed(self, clock_s: int) -> None:
        """A step was done, and the groups agreed on this time in it."""
        self.at_s = self.at_s or clock_s

    def state_dict(self) -> dict[str, int]:
        """What travels."""
        return {"at_s": self.at_s}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes it over."""
        self.at_s = state["at_s"]

    @property
    def name(self) -> str:
        """As torchtitan names the folders of its runs, in UTC and to the second."""
        return time.strftime("%Y%m%d-%H%M%S", time.gmtime(self.at_s))


class LeadLogger(BaseLogger):
    """Writes the figures of the run where it is led.

    Args:
        where: the run.
        folder: where they are written, once the run has a name.
        make: makes the writers, given the folder and the first step that they replace what is there from.
    """

    def __init__(self, where: Where, folder: Callable[[], Path], make: Callable[[Path, int], BaseLogger]) -> None:
        self._where, self._folder, self._make = where, folder, make
        self._writers: BaseLogger | None = None
        self._kept: tuple[int, dict[str, Any]] | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Figures of a step; any number of times for the same one.

        Args:
            metrics: by name.
            step: number of the step, by torchtitan's count.
        """
        if not self._where.live:
            return
        if not leads(self._where):
            self.settle()
            self._kept = (step, dict(metrics))
            return
        try:
            if self._writers is None:
                self._begin(step)
            self._write(metrics, step)
        except OSError as error:  # a full disk must not end the run: the next step tries again
            logger.error(f"Fault tolerance: the figures of step {step} are not written: {error}")
            with contextlib.suppress(OSError):
                self.close()

    def settle(self) -> None:
        """Gives up the writers if this group no longer leads; when a step begins, before its reduce.

        So they are closed before another group can have done the step, and made its own.
        """
        if self._writers is not None and not self._where.lead:
            self.close()

    def close(self) -> None:
        """Whoever leads next goes on."""
        writers, self._writers = self._writers, None
        if writers is not None:
            writers.close()

    def _begin(self, step: int) -> None:
        """Takes over; writes what the one before kept to itself."""
        folder = self._folder()
        kept, self._kept = self._kept, None
        if kept is not None and not _written(folder) < kept[0] < step:
            kept = None
        self._writers = self._make(folder, step if kept is None else kept[0])
        if kept is not None:
            self._write(kept[1], kept[0])

    def _write(self, metrics: dict[str, Any], step: int) -> None:
        assert self._writers is not None
        self._writers.log(metrics, step)
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{WRITTEN}.new"
        new.write_text(str(step))
        new.replace(folder / WRITTEN)


def _written(folder: Path) -> int:
    """Up to which step figures are there; 0 if nobody says so."""
    try:
        with (folder / WRITTEN).open(encoding="utf-8") as file:
            return int(file.read(_DIGITS_MAX))
    except (FileNotFoundError, ValueError):
        return 0


def settle(writers: BaseLogger) -> None:
    """A step begins: see `LeadLogger.settle`. A rank that writes nothing has another logger."""
    if isinstance(writers, LeadLogger):
        writers.settle()


# ------------------------------------------------------------ the writers


class _TensorBoard(TensorBoardLogger):
    """torchtitan's, in a folder that others have written into, and on disk after every step: its writer may be lost."""

    def __init__(self, folder: Path, first: int) -> None:
        self.tag = None
        self.writer = SummaryWriter(str(folder), max_queue=1000, purge_step=first)
        logger.info(f"TensorBoard logging enabled. Logs will be saved at {folder}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        super().log(metrics, step)
        self.writer.flush()


def without_writers(config: Any) -> Any:
    """A copy of a `MetricsProcessor.Config` that makes no writers.

    Raises:
        UsageError: W&B is told to begin from another run, which every group that leads would do anew.
    """
    if config.enable_wandb and (fork := next((name for name in _FORKS if os.environ.get(name)), None)):
        raise UsageError(f"{fork} is not supported with fault tolerance: several groups write one W&B run in turn")
    return dataclasses.replace(config, enable_tensorboard=False, enable_wandb=False)


def lead_logger(
    processor: MetricsProcessor, config: Any, where: Where, started: Started, *, root: str, job: str, told: Any
) -> BaseLogger:
    """What takes the place of a processor's `logger`.

    Args:
        processor: built without writers.
        config: the `MetricsProcessor.Config` that was given.
        where: the run.
        started: when it began.
        root: the dump folder of all groups.
        job: the job's id.
        told: the trainer's config as a dictionary, for W&B.
    """
    if type(processor)._build_metric_logger is not MetricsProcessor._build_metric_logger:
        return LeadLogger(where, _folder(config, started, root, ""), _own(processor, config, root, told))
    rank = dist.get_rank()
    if not (config.enable_tensorboard or config.enable_wandb) or (rank != 0 and not config.save_for_all_ranks):
        return BaseLogger()
    part = f"rank_{rank}" if config.save_for_all_ranks else ""

    def make(folder: Path, first: int) -> BaseLogger:
        writers = LoggerContainer()
        if config.enable_wandb:
            run = os.environ.get("WANDB_RUN_ID") or f"{job}-{started.name}"
            if (wandb := _weights_and_biases(folder, f"{run}-{part}" if part else run, told)) is not None:
                writers.add_logger(wandb)
        if config.enable_tensorboard:
            writers.add_logger(_TensorBoard(folder, first))
        return writers

    return LeadLogger(where, _folder(config, started, root, part), make)


def _folder(config: Any, started: Started, root: str, part: str) -> Callable[[], Path]:
    return lambda: Path(root, config.save_tb_folder, started.name, part)


def _own(processor: MetricsProcessor, config: Any, root: str, told: Any) -> Callable[[Path, int], BaseLogger]:
    """A processor that makes its writers itself does so wherever the run is led, and names their folder as it likes."""

    def make(folder: Path, first: int) -> BaseLogger:
        dims = processor.parallel_dims
        return processor._build_metric_logger(
            config=config, parallel_dims=dims, dump_folder=root, pp_schedule="", config_dict=told
        )

    return make


def _weights_and_biases(folder: Path, run: str, told: Any) -> WandBLogger | None:
    """The logger of torchtitan in the W&B run of that id, begun or gone on with; None if there cannot be one.

    A run without W&B goes on, as torchtitan does without it.
    """
    with _environment(WANDB_RUN_ID=run, WANDB_RESUME="allow"):
        try:
            return WandBLogger(str(folder), config_dict=told)
        except Exception as error:  # of any kind: what W&B cannot do must not end a group
            logger.error(f"Failed to create WandB logger: {error}")
            return None


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables of the environment, for what reads them inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
