"""TensorBoard and W&B of a torchtitan run whose lead changes; the groups play in one process, with the real writers."""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.distributed import ParallelDims

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.figures import Started, lead_logger, settle, without_writers

NAME = "20261130-070000"
AT_S = 1796022000  # the same in seconds
LOSS, CHECK = "loss_metrics/global_avg_loss", "validation_metrics/loss"


pytestmark = pytest.mark.usefixtures("one_rank")


@dataclass
class Standing:
    live: bool = True
    lead: bool = False


class Group:
    """The part of a torchtitan trainer that says figures."""

    def __init__(self, root: Path, kind: type[MetricsProcessor] = MetricsProcessor, **config: Any) -> None:
        self.where, self.started = Standing(), Started()
        self.started.agreed(AT_S)
        given = kind.Config(log_freq=1, **config)
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
        self.processor = without_writers(given).build(parallel_dims=dims, dump_folder=str(root / "g0"))
        self.processor.num_flops_per_token = 1
        self.processor.logger = lead_logger(
            self.processor, given, self.where, self.started, root=str(root), job="j", told={"a": 1}
        )

    def log(self, step: int, loss: float | None = None) -> None:
        """Says the figures of a step, as the trainer does: also where there was no share."""
        settle(self.processor.logger)
        self.processor.data_loading_times.append(0.0)
        self.processor.log(step, float(step) if loss is None else loss, 0.0, 0.0)


def read(folder: Path, tag: str = LOSS) -> list[tuple[int, float]]:
    """As TensorBoard reads a folder, files in the order of their names."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


@pytest.fixture
def files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that are made within the same second get names in the order in which they were made."""
    import tensorboard.summary.writer.event_file_writer as module

    ticks = iter(range(AT_S, AT_S + 1000))

    class Clock:
        time = staticmethod(lambda: float(next(ticks)))

    monkeypatch.setattr(module, "time", Clock)


Handed = pytest.mark.usefixtures("files_in_order")


def two(root: Path, **config: Any) -> tuple[Group, Group]:
    """The group that leads, and another."""
    first, second = Group(root, **config), Group(root, **config)
    first.where.lead = True
    return first, second


def both(groups: tuple[Group, ...], steps: range) -> None:
    for step in steps:
        for group in groups:
            group.log(step)


# ------------------------------------------------------------ TensorBoard


def test_only_who_leads_makes_a_folder(tmp_path: Path) -> None:
    groups = two(tmp_path, enable_tensorboard=True)
    assert list(tmp_path.iterdir()) == []
    both(groups, range(1, 4))
    assert [path.name for path in (tmp_path / "tb").iterdir()] == [NAME]
    assert len(list((tmp_path / "tb" / NAME).glob("events.*"))) == 1
    assert read(tmp_path / "tb" / NAME) == [(1, 1.0), (2, 2.0), (3, 3.0)]  # on disk, though nobody closed it


@Handed
@pytest.mark.parametrize("written", [True, False])
def test_the_next_lead_goes_on_where_a_lost_one_stopped(tmp_path: Path, written: bool) -> None:
    """It may have written the step before, with a validation, or not."""
    first, second = two(tmp_path, enable_tensorboard=True)
    both((first, second), range(1, 5))
    if written:
        first.log(5)
        first.processor.log_validation(0.5, 5)
    second.log(5)  # and now the first is lost
    second.where.lead = True
    both((second,), range(6, 9))
    assert read(tmp_path / "tb" / NAME) == [(step, float(step)) for step in range(1, 9)]
    assert read(tmp_path / "tb" / NAME, CHECK) == ([(5, 0.5)] if written else [])


@Handed
def test_a_step_that_is_done_again_is_there_once(tmp_path: Path) -> None:
    """The lead was alone with a step, and is lost: the others do it again."""
    first, second = two(tmp_path, enable_tensorboard=True)
    both((first, second), range(1, 5))
    first.log(5, loss=-5.0)
    second.where.lead = True
    both((second,), range(5, 8))
    assert read(tmp_path / "tb" / NAME) == [(step, float(step)) for step in range(1, 8)]


@Handed
def test_the_lead_changes_hands_and_back(tmp_path: Path) -> None:
    first, second = two(tmp_path, enable_tensorboard=True)
    both((first, second), range(1, 4))
    for step in range(4, 10):
        first.where.lead, second.where.lead = step >= 7, step < 7
        first.log(step)
        second.log(step)
    assert read(tmp_path / "tb" / NAME) == [(step, float(step)) for step in range(1, 10)]


@Handed
def test_without_a_folder_in_common_the_last_step_is_said_again(tmp_path: Path) -> None:
    first, second = Group(tmp_path / "a", enable_tensorboard=True), Group(tmp_path / "b", enable_tensorboard=True)
    first.where.lead = True
    both((first, second), range(1, 4))
    second.where.lead = True
    second.log(4)
    assert read(tmp_path / "b" / "tb" / NAME) == [(3, 3.0), (4, 4.0)]


def test_a_step_that_is_replayed_is_not_written(tmp_path: Path) -> None:
    group = Group(tmp_path, enable_tensorboard=True)
    group.where.live, group.where.lead = False, True
    group.log(1)
    group.where.live = True
    group.log(2)
    assert read(tmp_path / "tb" / NAME) == [(2, 2.0)]


def test_all_ranks_write_if_so_told(tmp_path: Path) -> None:
    group = Group(tmp_path, enable_tensorboard=True, save_for_all_ranks=True)
    group.where.lead = True
    group.log(1)
    assert read(tmp_path / "tb" / NAME / "rank_0") == [(1, 1.0)]


def test_writers_of_the_users_own_are_made_where_the_run_is_led(tmp_path: Path) -> None:
    made: list[str] = []

    class Own(MetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

        def _build_metric_logger(self, *, dump_folder: str, **_: Any) -> BaseLogger:
            made.append(dump_folder)
            return BaseLogger()

    first, second = Group(tmp_path, Own), Group(tmp_path, Own)
    made.clear()  # torchtitan's constructor makes one, of no consequence
    first.where.lead = True
    both((first, second), range(1, 3))
    assert made == [str(tmp_path)]


# ------------------------------------------------------------ the name


def test_the_name_is_that_of_the_first_time_agreed_on() -> None:
    started = Started()
    started.agreed(AT_S)
    started.agreed(AT_S + 9)
    other = Started()
    other.load_state_dict(started.state_dict())
    assert started.name == other.name == NAME


# ------------------------------------------------------------ W&B


class Runs(types.ModuleType):
    """What of wandb is used; runs are kept as its server keeps them."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: Any = None
        self.told: list[dict[str, Any]] = []
        self.history: dict[str, dict[int, float]] = {}
        self.finished: list[str] = []

    def init(self, **told: Any) -> None:
        assert os.environ["WANDB_RESUME"] == "allow"
        self.told.append(told)
        self.run = told["id"]
        self.history.setdefault(told["id"], {})

    def log(self, metrics: dict[str, float], step: int) -> None:
        known = self.history[self.run]
        if step >= max(known, default=0):
            known[step] = metrics.get(LOSS, known.get(step, 0.0))

    def finish(self) -> None:
        self.finished.append(self.run)
        self.run = None


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Runs:
    module = Runs()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_FORK_FROM", "WANDB_RESUME_FROM"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_one_run_over_a_change_of_lead(tmp_path: Path, wandb: Runs) -> None:
    first, second = two(tmp_path, enable_wandb=True)
    assert wandb.told == []
    both((first, second), range(1, 4))
    second.log(4)
    second.where.lead = True  # the first is lost before it said step 4
    both((second,), range(5, 7))
    assert wandb.history == {f"j-{NAME}": {step: float(step) for step in range(1, 7)}}
    assert [told["id"] for told in wandb.told] == [f"j-{NAME}"] * 2 and wandb.told[0]["config"] == {"a": 1}
    assert not {"WANDB_RUN_ID", "WANDB_RESUME"} & set(os.environ)
    assert wandb.finished == []
    second.where.lead = False
    settle(second.processor.logger)  # a step begins that another group leads
    assert wandb.finished == [f"j-{NAME}"]


def test_the_runs_id_may_be_given(tmp_path: Path, wandb: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    group, _ = two(tmp_path, enable_wandb=True)
    group.log(1)
    assert wandb.told[0]["id"] == "mine"


def test_without_wandb_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    group, _ = two(tmp_path, enable_wandb=True, enable_tensorboard=True)
    group.log(1)
    assert "Failed to create WandB logger" in caplog.text and read(tmp_path / "tb" / NAME) == [(1, 1.0)]


def test_a_fork_of_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_FORK_FROM", "other?_step=100")
    with pytest.raises(UsageError, match="WANDB_FORK_FROM is not supported with fault tolerance"):
        without_writers(MetricsProcessor.Config(enable_wandb=True))
    without_writers(MetricsProcessor.Config(enable_tensorboard=True))
