"""What torchtitan's own experiment with torchft gets wrong, and that the integration does not: a test for each.

Two groups are two sets of objects in one process, and a heal is what the transfer does, without sockets. Not here:

- 4, with checkpoints turned off there is no heal: every job of `tests/runs/test_titan_facts.py` and of
  `test_titan_faults.py` has them off, and `one_returns` in the former asserts it.
- 6 and 7, what a checkpoint holds and who writes it: `test_titan_lead.py`, from
  `test_only_who_leads_a_live_step_saves` to `test_after_a_load_rate_and_age_are_as_without_one`.
- 10, the ranks of a group: `check_titan` in `tests/runs/titan_job.py` holds every rank's own account against its place.
"""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

import torch
import torch.distributed as dist
from state_objects import move
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from lightkeeper.integrations.torchtitan import config as config_module
from lightkeeper.integrations.torchtitan import trainer as trainer_module
from lightkeeper.integrations.torchtitan.run import Progress
from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer
from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.snapshot import Snapshotter

NAME = Entry(Epoch(3, Term(1, "a")), 5)
STEPS, BEFORE = 12, 5


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[Any]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Group:
    """What of a torchtitan trainer is copied to a group that returns.

    Args:
        seed: of its weights.
        mesh: over which it is sharded.
    """

    def __init__(self, seed: int, mesh: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizers = default_adamw(lr=0.05).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=BEFORE + 3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.progress = Progress()
        self.registry = StateRegistry()
        self.registry.register("model", self.model)
        (optimizer,) = self.optimizers
        self.registry.register("optimizer", optimizer)
        self.registry.register("lr-schedulers", self.schedulers)
        self.registry.register("progress", self.progress)

    def step(self) -> None:
        """Like `train_step`: with the entry that all groups have."""
        torch.manual_seed(100 + self.progress.step)
        self.optimizers.zero_grad()
        self.model(torch.randn(4, 6)).pow(2).mean().backward()
        self.optimizers.step()
        self.schedulers.step()
        self.progress.step += 1
        self.progress.ntokens_seen += 24

    def rate(self) -> float:
        """What the optimizer steps with."""
        (optimizer,) = self.optimizers
        return float(optimizer.param_groups[0]["lr"])

    def ages(self) -> set[float]:
        """Adam's own count of steps."""
        (optimizer,) = self.optimizers
        return {float(state["step"]) for state in optimizer.state.values()}


def heal(donor: Group, joiner: Group) -> None:
    """What a transfer does."""
    move(donor.registry, joiner.registry)


@pytest.fixture
def groups(mesh: Any) -> tuple[Group, Group]:
    """One that has trained, and one that has just started again."""
    donor = Group(0, mesh)
    for _ in range(BEFORE):
        donor.step()
    return donor, Group(1, mesh)


def test_1_a_heal_while_the_donor_is_in_its_forward_pass(
    groups: tuple[Group, Group], mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is read by references to the shards: no `state_dict()` of a module, which would reshard it midway."""
    donor, _ = groups
    alone = Group(0, mesh)
    for _ in range(BEFORE):
        alone.step()

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a module's state_dict() was asked for")

    for kind in (nn.Module, type(donor.model), type(donor.model[0])):
        monkeypatch.setattr(kind, "state_dict", never)
    before = donor.registry.fingerprint()
    copying = Snapshotter(donor.registry).begin(NAME)
    copies: list[Any] = []
    handle = donor.model[1].register_forward_hook(lambda *_: copies.append(copying.wait(10)))
    torch.manual_seed(100 + BEFORE)
    donor.optimizers.zero_grad()
    donor.model(torch.randn(4, 6)).pow(2).mean().backward()
    handle.remove()
    assert copies[0].fingerprint == before
    donor.step()
    alone.step()
    assert donor.registry.fingerprint() == alone.registry.fingerprint() != before


def test_2_the_learning_rate_in_the_step_after_a_heal(groups: tuple[Group, Group]) -> None:
    donor, joiner = groups
    assert donor.rate() != joiner.rate()
    heal(donor, joiner)
    assert donor.rate() == joiner.rate()
    for _ in range(STEPS - BEFORE):  # over the end of the warm-up and down again
        donor.step()
        joiner.step()
        assert (donor.rate(), donor.schedulers.get_metrics()) == (joiner.rate(), joiner.schedulers.get_metrics())
        assert donor.registry.fingerprint() == joiner.registry.fingerprint()


class Stopped(Exception):
    """Where the test ends a step."""


class BrokenStep:
    """A step whose reduce fails for good."""

    index, live, lead = 7, True, True

    def microbatches(self) -> Iterator[int]:
        yield 0
        raise Stopped


def test_3_a_step_that_is_not_committed_moves_nothing(monkeypatch: pytest.MonkeyPatch, mesh: Any) -> None:
    """Schedule, optimizer and counts move after the inner loop, which is left when the step is committed.

    In whole jobs: every step once, with its own learning rate (`tests/runs/test_titan_facts.py`).
    """
    group, computed = Group(0, mesh), []
    trainer = FaultTolerantTrainer.__new__(FaultTolerantTrainer)
    trainer.run = SimpleNamespace(step=BrokenStep(), applied=group.step)  # type: ignore[assignment]
    trainer.optimizers, trainer.lr_schedulers = group.optimizers, group.schedulers
    trainer.step, trainer.ntokens_seen = 8, 0
    trainer.dataloader = SimpleNamespace(ended=lambda step: False)
    monkeypatch.setattr(trainer, "_microbatch", computed.append)
    before, rate = group.registry.fingerprint(), group.rate()
    with pytest.raises(Stopped):
        trainer.train_step(iter(()))
    assert computed == [0]
    assert (group.registry.fingerprint(), group.rate(), trainer.ntokens_seen) == (before, rate, 0)


def test_5_adams_count_of_steps(groups: tuple[Group, Group], mesh: Any) -> None:
    """Nothing makes optimizer state by a step of its own, neither at the start nor to receive a copy."""
    donor, joiner = groups
    (optimizer,) = Group(2, mesh).optimizers
    registry = StateRegistry()
    registry.register("optimizer", optimizer)
    registry.fingerprint()
    assert not optimizer.state
    assert donor.ages() == {float(BEFORE)} and joiner.ages() == set()
    heal(donor, joiner)
    assert joiner.ages() == {float(BEFORE)}
    joiner.step()
    assert joiner.ages() == {float(BEFORE + 1)}


def test_8_no_line_is_laid_out_by_the_logger() -> None:
    """`logger.info("%d", None)` prints a traceback: what is said is an f-string, and its numbers are there."""
    calls = 0
    for path in Path(config_module.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                assert len(node.args) == 1 and not node.keywords, f"{path.name}:{node.lineno}"
                calls += 1
    assert calls


@pytest.mark.parametrize(("loaded", "step", "ours"), [(0, 1, False), (0, 58, True), (30, 31, False), (30, 45, True)])
def test_9_time_outs_after_a_heal(monkeypatch: pytest.MonkeyPatch, loaded: int, step: int, ours: bool) -> None:
    """They are shortened after the first step that this process did, once: by torchtitan if it is the next one."""
    set_to: list[float] = []
    monkeypatch.setattr(
        trainer_module.dist_utils,
        "set_pg_timeouts",
        lambda timeout, parallel_dims: set_to.append(timeout.total_seconds()),
    )
    trainer = FaultTolerantTrainer.__new__(FaultTolerantTrainer)
    trainer.config = SimpleNamespace(comm=SimpleNamespace(train_timeout_seconds=17))  # type: ignore[assignment]
    trainer.parallel_dims = None  # type: ignore[assignment]
    trainer.step, trainer._loaded_step = step, loaded
    trainer._shorten_timeouts()
    trainer.step += 1
    trainer._shorten_timeouts()
    assert set_to == ([17.0] if ours else [])
