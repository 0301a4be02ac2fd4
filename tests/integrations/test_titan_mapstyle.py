"""Map-style data in torchtitan: read as by it alone, over losses and returns; and what is said of a wrong one."""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

import torch
import tyro
from titan_reading import GIVEN, Bytes, job_of, reads_what_hsdp_reads, same
from torchtitan.components.loss import IGNORE_INDEX

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.data import SlotStreams
from lightkeeper.integrations.torchtitan.mapstyle import MapDataLoader

MADE: Counter[int] = Counter()


class Rows:
    """Sample i says i, and has a random number as an augmentation."""

    def __init__(self, length: int, count: int) -> None:
        self.length, self.count = length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        MADE[index] += 1
        inputs = {"input": torch.full((self.length,), index), "noise": torch.rand(2)}
        return inputs, torch.tensor([IGNORE_INDEX if n % 3 == index % 3 else n for n in range(self.length)])


def rows(*, tokenizer: Any, seq_len: int, path: str | None) -> Rows:
    assert isinstance(tokenizer, Bytes)
    return Rows(seq_len, int(path or 50))


def map_config(**more: Any) -> Any:
    return MapDataLoader.Config(**{"dataset": rows, "seed": 5, "num_workers": 0, **more})


@pytest.mark.parametrize("workers", [0, 1])
def test_map_style_data_is_read_as_by_torchtitan_alone(workers: int) -> None:
    """Over a loss, a return, and more than one pass over the data."""
    config = map_config(num_workers=workers)
    MADE.clear()
    job = job_of(config, 3, 2, groups=3)
    for _ in range(5):
        job.take_step()
    made = sum(MADE.values())
    assert made == (0 if workers else 5 * 3 * 2 * 2), (
        "each sample once, counted and read; in the worker, if there is one"
    )
    assert job.take_step({"g2": 1})
    job.join(healed=True)
    job.take_step()
    order = [batch[0]["input"][:, 0].tolist() for _, batch in sorted(job.read.items())]
    flat = [index for batch in order for index in batch]
    assert len(flat) == 7 * 12 and sorted(flat[:50]) == list(range(50)) and flat[:50] != list(range(50))
    if workers:
        for group in job.members.values():
            for loader in group.loaders:
                loader._loader.close()
    noise = {key: batch[0].pop("noise") for key, batch in job.read.items()}
    assert len({tuple(one.flatten().tolist()) for one in noise.values()}) == len(noise)
    plain = MapDataLoader.Config(dataset=without_noise, seed=5, num_workers=0)
    reads_what_hsdp_reads(job, plain)


def without_noise(**given: Any) -> Any:
    class Quiet(Rows):
        def __getitem__(self, index: int) -> Any:
            inputs, labels = super().__getitem__(index)
            return {"input": inputs["input"]}, labels

    made = rows(**given)
    return Quiet(made.length, made.count)


def test_map_style_data_that_is_read_once_ends_before_a_step_that_lacks_samples() -> None:
    job = job_of(map_config(infinite=False, dataset_path="50"), 3, 2, groups=2)  # 12 samples a step
    assert [job.take_step() for _ in range(5)] == [True] * 4 + [False] and job.step == 4
    alone = MapDataLoader.Config(dataset=rows, seed=5, num_workers=0, infinite=False, dataset_path="50")
    one = alone.build(dp_world_size=6, dp_rank=1, **GIVEN)
    assert len(list(one)) == 4 and len(list(one)) == 4, "a validator iterates again"


def test_torchtitan_alone_goes_on_after_a_checkpoint() -> None:
    first = map_config().build(dp_world_size=2, dp_rank=1, **GIVEN)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    again = map_config().build(dp_world_size=2, dp_rank=1, **GIVEN)
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == {"read": 4} and same(next(iter(again)), next(batches))


def test_a_data_set_by_name_and_what_is_wrong_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}.rows"
    config = tyro.cli(MapDataLoader.Config, default=map_config(), args=["--dataset", name, "--num-workers", "0"])
    assert config.dataset == name
    by_name = config.build(dp_world_size=1, dp_rank=0, **GIVEN)
    assert same(next(iter(by_name)), next(iter(map_config().build(dp_world_size=1, dp_rank=0, **GIVEN))))
    for wrong, says in (
        ("", "give the dotted name"),
        ("no_such_module.rows", "No module named 'no_such_module'"),
        (f"{__name__}.columns", "has no function columns"),
        (lambda **_: iter(()), "a .*iterator, has no length"),
    ):
        with pytest.raises(UsageError, match=says):
            SlotStreams.around(map_config(dataset=wrong), 2).build(dp_world_size=1, dp_rank=0, **GIVEN)
