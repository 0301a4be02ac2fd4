"""What one torchtitan group does for all of them: checkpoints and validation; the groups play in one process."""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import BaseValidator
from torchtitan.tools.profiler import Profiler

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.checkpoint import ENTRY, LeadCheckpointer, Terms
from lightkeeper.integrations.torchtitan.lead import LeadValidator, MarkedProfilerConfig, per_group_folders

TERMS = Terms(seed=7, microbatches=4, places=2)
BATCHES = 3


@dataclass
class Standing:
    """Where a group stands, as the tests like it."""

    live: bool = True
    lead: bool = True
    step: int = 0
    group: str = "g0"
    marked: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def expect(self, phase: str) -> Iterator[None]:
        self.marked.append(phase)
        yield
        self.marked.append("")


pytestmark = pytest.mark.usefixtures("one_rank")


class Group:
    """What of a torchtitan trainer is saved, on the smallest model."""

    def __init__(self, folder: Path, terms: Terms = TERMS, running: str | None = None, **checkpoint: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.optimizers = default_adamw(lr=0.1).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=100).build(
            optimizers=self.optimizers, training_steps=200
        )
        self.step = 0
        self.where = Standing()
        config = CheckpointManager.Config(**{"enable": True, "interval": 10, "keep_latest_k": 0, **checkpoint})
        self.inner = config.build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedulers,
            states={"train_state": self}, sd_adapter=None, base_folder=str(folder),
        )  # fmt: skip
        self.checkpointer = LeadCheckpointer(self.inner, self.where, terms, lambda: running)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, until: int) -> None:
        """Steps, each with a gradient of its own."""
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, float(self.step % 3) - 0.5)
            self.optimizers.step()
            self.schedulers.step()

    def save(self, until: int, **how: Any) -> bool:
        self.train(until)
        return bool(self.checkpointer.save(self.step, **how))

    def rates(self) -> list[float]:
        return [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]

    def adam_steps(self) -> set[float]:
        return {float(state["step"]) for optimizer in self.optimizers for state in optimizer.state.values()}


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").iterdir()}


# ------------------------------------------------------------ checkpoints: who writes


@pytest.mark.parametrize(("live", "lead"), [(True, False), (False, True), (False, False)])
def test_only_who_leads_a_live_step_saves(tmp_path: Path, live: bool, lead: bool) -> None:
    group = Group(tmp_path)
    group.where.live, group.where.lead = live, lead
    assert not group.save(10) and not group.save(20, last_step=True)
    assert not (tmp_path / "checkpoint").exists() and group.where.marked == []
    group.where.live = group.where.lead = True
    assert not group.save(25)  # no interval
    assert group.save(30)
    assert saved(tmp_path) == {"step-30"} and group.where.marked == ["checkpoint", ""]


def test_without_checkpoints_nothing_is_done(tmp_path: Path) -> None:
    group = Group(tmp_path, enable=False)
    assert not group.save(10) and not group.checkpointer.load() and not group.checkpointer.save_if_lost(10)
    group.checkpointer.maybe_wait_for_staging()
    group.checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_other_managers_are_refused() -> None:
    class Other(BaseCheckpointManager):
        enable = True

        def nothing(self, *_: Any) -> bool:
            return False

        _load = _save = _wait_for_saving = _maybe_wait_for_staging = _close = nothing

    with pytest.raises(UsageError, match="Other are not supported"):
        LeadCheckpointer(Other(), Standing(), TERMS, lambda: None)


def test_a_torn_save_is_not_loaded_and_the_next_one_goes_over_it(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.save(10)
    group.save(20)
    torn = tmp_path / "checkpoint" / "step-20"
    (torn / ".metadata").unlink()
    data = next(torn.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    after = Group(tmp_path)
    assert after.checkpointer.load() and after.step == 10
    (torn / "left by the one before").touch()
    assert after.save(20)
    assert {path.name for path in torn.iterdir()} == {".metadata", "__0_0.distcp"}
    third = Group(tmp_path)
    assert third.checkpointer.load() and third.step == 20
    assert torch.equal(third.model.weight, after.model.weight)


def test_an_old_marker_does_not_vouch_for_a_save_that_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from an earlier checkpoint saves its steps anew; if that breaks off, the step is torn."""
    first = Group(tmp_path)
    first.save(10)
    first.save(20)
    again = Group(tmp_path)
    assert again.checkpointer.load(10) and again.step == 10

    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(again.inner, "dcp_save", broken)
    with pytest.raises(KeyboardInterrupt):
        again.save(20)
    last = Group(tmp_path)
    assert last.checkpointer.load() and last.step == 10


def test_a_checkpoint_that_is_torn_does_not_count_among_those_kept(tmp_path: Path) -> None:
    group = Group(tmp_path, keep_latest_k=2)
    for step in (10, 20, 30):
        group.save(step)
    group.checkpointer.close()
    assert saved(tmp_path) == {"step-20", "step-30"}
    (tmp_path / "checkpoint" / "step-30" / ".metadata").unlink()  # its lead was lost while it saved
    (tmp_path / "checkpoint" / "step-5-by-hand").mkdir()
    after = Group(tmp_path, keep_latest_k=2)
    after.save(40)
    assert after.inner.purge_queue.empty()  # 20 and 40 are all that there is
    after.save(50)
    after.checkpointer.close()  # waits for what is deleted
    assert saved(tmp_path) == {"step-40", "step-50", "step-5-by-hand"}


def test_who_does_not_lead_deletes_nothing(tmp_path: Path) -> None:
    lead, other = Group(tmp_path), Group(tmp_path, keep_latest_k=2)
    other.where.lead = False
    for step in (10, 20, 30):
        lead.save(step)
        other.save(step)
    other.checkpointer.close()
    assert saved(tmp_path) == {"step-10", "step-20", "step-30"}


@pytest.mark.parametrize("lost", [False, True])
def test_a_save_under_way_when_the_lead_changes_hands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Whoever led finishes what it began, or is lost with it; the next lead writes the next interval."""
    old, new = Group(tmp_path, async_mode="async"), Group(tmp_path, async_mode="async")
    new.where.lead = False
    if lost:  # its upload never gets to the marker
        monkeypatch.setattr(old.inner, "dcp_save", lambda *_, **__: Future())
    assert old.save(10) and not new.save(10)
    value = old.model.weight.detach().clone()
    old.train(20)  # what is staged does not follow
    old.where.lead, new.where.lead = False, True
    assert not old.checkpointer.save(20) and new.save(20)
    if not lost:
        assert not old.checkpointer.save(30, last_step=True) and old.inner.save_future is None  # it has waited
    new.checkpointer.maybe_wait_for_saving()
    assert saved(tmp_path) == ({"step-20"} if lost else {"step-10", "step-20"})
    back = Group(tmp_path)
    if not lost:
        assert back.checkpointer.load(10) and torch.equal(back.model.weight, value) and back.adam_steps() == {10.0}
    assert back.checkpointer.load() and back.step == 20 and torch.equal(back.model.weight, new.model.weight)


def test_the_last_step_is_saved_anew_if_its_writer_was_lost(tmp_path: Path) -> None:
    lead, other = Group(tmp_path), Group(tmp_path)
    lead.save(30, last_step=True)
    other.train(30)
    other.where.live = other.where.lead = False  # the run is over: there is no step at hand
    assert not other.checkpointer.save_if_lost(30)  # it is whole
    (tmp_path / "checkpoint" / "step-30" / ".metadata").unlink()
    assert not lead.checkpointer.save_if_lost(30)  # it knows that it has written it
    assert other.checkpointer.save_if_lost(30)
    assert Group(tmp_path).inner._find_load_step() == 30


# ------------------------------------------------------------ checkpoints: who loads


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(TERMS, seed=8), r"its seed is 7, and here it is 8 \(debug.seed\)"),
        (replace(TERMS, microbatches=6), r"microbatches in a step is 4, and here it is 6 \(fault_tol"),
        (replace(TERMS, places=1), r"data-parallel ranks in a group is 2, and here it is 1 \("),
    ],
)
def test_another_run_is_refused_before_anything_is_loaded(tmp_path: Path, other: Terms, told: str) -> None:
    Group(tmp_path).save(10)
    wrong = Group(tmp_path, other)
    before = wrong.model.weight.detach().clone()
    with pytest.raises(UsageError, match=told):
        wrong.checkpointer.load()
    assert wrong.step == 0 and torch.equal(wrong.model.weight, before)


def test_a_checkpoint_without_an_entry_is_refused_unless_the_data_may_begin_anew(tmp_path: Path) -> None:
    plain = Group(tmp_path)
    plain.inner.states.pop(ENTRY)
    plain.train(10)
    plain.inner.save(10)
    with pytest.raises(UsageError, match="has no entry 'lightkeeper'.*exclude_from_loading lightkeeper dataloader"):
        Group(tmp_path).checkpointer.load()
    willing = Group(tmp_path, exclude_from_loading=[ENTRY, "dataloader"])
    assert willing.checkpointer.load() and torch.equal(willing.model.weight, plain.model.weight)


def test_the_entry_names_the_step(tmp_path: Path) -> None:
    Group(tmp_path).save(10)
    back = Group(tmp_path)
    assert back.checkpointer.load()
    entry = {name: int(value) for name, value in back.inner.states[ENTRY].state_dict().items()}
    assert entry == {"step": 10, "seed": 7, "microbatches": 4, "places": 2}


def test_an_initial_checkpoint_is_compared_if_it_is_more_than_a_model(tmp_path: Path) -> None:
    Group(tmp_path / "a").save(10)
    path = str(tmp_path / "a" / "checkpoint" / "step-10")
    other = replace(TERMS, seed=8)
    with pytest.raises(UsageError, match="its seed is 7"):
        Group(tmp_path / "b", other, initial_load_path=path, initial_load_model_only=False).checkpointer.load()
    assert Group(tmp_path / "b", other, initial_load_path=path).checkpointer.load()  # a model has no terms


@pytest.mark.parametrize("exclude", [[], ["optimizer"]])
def test_after_a_load_rate_and_age_are_as_without_one(tmp_path: Path, exclude: list[str]) -> None:
    group = Group(tmp_path)
    group.save(10)
    back = Group(tmp_path, exclude_from_loading=exclude)
    first = back.rates()
    assert back.checkpointer.load() and back.step == 10
    assert back.rates() == group.rates() != first
    group.train(11)
    back.train(11)
    assert back.rates() == group.rates()
    assert back.adam_steps() == ({1.0} if exclude else group.adam_steps()) and group.adam_steps() == {11.0}
    assert torch.equal(back.model.weight, group.model.weight) == (not exclude)


def test_a_group_that_returns_loads_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Group(tmp_path).save(10)
    torn = tmp_path / "checkpoint" / "step-20"
    shutil.copytree(tmp_path / "checkpoint" / "step-10", torn)
    next(torn.glob("*.distcp")).unlink()  # the others are deleting it: to load it would fail
    caplog.set_level("INFO")
    back = Group(tmp_path, running="g1")
    assert not back.checkpointer.load() and back.step == 0 and back.adam_steps() == set()
    assert "no checkpoint is loaded, since g1 trains already" in caplog.text


# ------------------------------------------------------------ folders


def test_every_group_has_a_folder_and_all_have_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Config:
        checkpoint: Any
        dump_folder: str = "out"

    monkeypatch.chdir(tmp_path)
    given = Config(CheckpointManager.Config())
    first, second = per_group_folders(given, "g0"), per_group_folders(given, "g1")
    assert (first.dump_folder, second.dump_folder) == ("out/g0", "out/g1")
    assert first.checkpoint.folder == second.checkpoint.folder == str(tmp_path / "out" / "checkpoint")
    assert (given.dump_folder, given.checkpoint.folder) == ("out", "checkpoint")
    for folder in ("/elsewhere", "s3://bucket/run"):
        assert per_group_folders(Config(CheckpointManager.Config(folder=folder)), "g0").checkpoint.folder == folder


# ------------------------------------------------------------ validation


class Counting(nn.Module):
    """Counts what passes in a buffer, in evaluation as well, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.linear(self.dropout(x))


class Validator(BaseValidator):
    """Three batches with random numbers of all kinds; writes its result down."""

    def __init__(self) -> None:
        super().__init__(config=BaseValidator.Config(freq=10))
        self.results: list[tuple[int, bool]] = []

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        for part in model_parts:
            part.eval()
        for _ in range(BATCHES):
            model_parts[0](torch.rand(2, 4) + random.random() + np.random.rand())
        self.results.append((step, model_parts[0].training))
        for part in model_parts:
            part.train()


def test_validation_leaves_no_trace() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = Counting()
    fully_shard(model.linear, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    model.dropout.eval()  # frozen by the user
    gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    where, inner = Standing(), Validator()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    validator = LeadValidator(inner, where)
    assert validator.should_validate(20) and not validator.should_validate(21)
    validator.validate([model], 20)
    assert inner.results == [(20, False)] and where.marked == ["evaluation", ""]
    assert model.training and model.linear.training and not model.dropout.training
    assert int(model.seen) == 2
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())  # else nobody finds the gradients
    after = [parameter.grad.to_local() for parameter in model.parameters()]
    assert all(torch.equal(was, now) for was, now in zip(gradients, after, strict=True))


@pytest.mark.parametrize(("live", "lead"), [(True, False), (False, True)])
def test_only_who_leads_a_live_step_validates(live: bool, lead: bool) -> None:
    inner = Validator()
    validator = LeadValidator(inner, Standing(live=live, lead=lead))
    assert not validator.should_validate(20)
    validator.validate([Counting()], 20)
    assert inner.results == []


# ------------------------------------------------------------ profiler


def test_traces_are_named_after_the_step_that_a_heal_led_to(tmp_path: Path) -> None:
    where = Standing()
    config = Profiler.Config(enable_profiling=True, profile_freq=5, profiler_warmup=1, profiler_active=1)
    marked = MarkedProfilerConfig(config, where)
    assert marked.profile_freq == 5
    with marked.build(global_step=0, base_folder=str(tmp_path)) as profiler:
        for step in range(102, 107):  # the first step here is the job's 102nd
            where.step = step
            profiler.step()
        assert where.marked == ["profile", ""] * 5
    assert [path.name for path in tmp_path.rglob("iteration_*")] == ["iteration_105"]


def test_without_profiling_no_phase_is_marked(tmp_path: Path) -> None:
    where = Standing(step=1)
    with MarkedProfilerConfig(Profiler.Config(), where).build(global_step=0, base_folder=str(tmp_path)) as profiler:
        profiler.step()
    assert where.marked == []
