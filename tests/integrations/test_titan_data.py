"""torchtitan's data in replica groups: what is read, by whom and how often; the groups play in one process."""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

import json
import os
import pickle
import random
import re
import socket
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

import datasets
import torch
import torch.distributed.checkpoint as dcp
import torchtitan.components.dataloader as titan_dataloader
from titan_groups import Job
from titan_reading import GIVEN, job_of, reads_what_hsdp_reads
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from lightkeeper.data.states import packed
from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan import data
from lightkeeper.integrations.torchtitan.config import FaultTolerance
from lightkeeper.integrations.torchtitan.data import SlotStreams

NAME = "tiny texts"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A data set of 120 short and a few long texts; nobody asks the network about it."""
    offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    folder = tmp_path_factory.mktemp("texts")
    chance = random.Random(3)
    lengths = [chance.choice([5, 20, 60, 90, 700]) for _ in range(120)]
    lines = [json.dumps({"text": "".join(chance.choices("abcdefgh ", k=n))}) for n in lengths]
    (folder / "tiny.jsonl").write_text("\n".join(lines))
    DATASETS[NAME] = DatasetConfig(
        path=str(folder / "tiny.jsonl"),
        loader=lambda path: datasets.load_dataset(
            "json", data_files=path, split="train", cache_dir=str(folder / "cache")
        ),
        sample_processor=lambda sample: sample["text"],
    )
    yield
    del DATASETS[NAME]
    datasets.config.HF_HUB_OFFLINE = offline


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Batches that were taken from loaders, by their data-parallel rank."""
    counted: Counter[int] = Counter()
    real = data._LoaderStream.__iter__

    def counting(stream: Any) -> Iterator[Any]:
        for item in real(stream):
            counted[getattr(stream._loader, "dp_rank", 0)] += 1
            yield item

    monkeypatch.setattr(data._LoaderStream, "__iter__", counting)
    return counted


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that unpickles fails."""

    def refuse(_: bytes) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(titan_dataloader.pickle, "loads", refuse)


def texts_config(**more: Any) -> Any:
    return HuggingFaceTextDataLoader.Config(dataset=NAME, **more)


# ------------------------------------------------------------ torchtitan's own loaders


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (texts_config, 2),
        (lambda: InterleavedHuggingFaceTextDataLoader.Config(
            sources=[HFDataSource(dataset=NAME, weight=2.0), HFDataSource(dataset=NAME)]), 1),
    ],
    ids=["texts", "interleaved"],
)  # fmt: skip
def test_over_losses_and_returns_no_batch_is_lost_or_read_twice(
    make: Any, places: int, texts: None, reads: Counter[int], no_pickles: None
) -> None:
    config = make()
    job = job_of(config, 3, places, groups=3)
    for _ in range(12):
        job.take_step()
    clean = sum(reads.values())
    assert clean == 12 * 3 * places
    assert job.take_step({"g1": 0})  # it had counted its tokens
    job.join(healed=True)
    job.take_step()
    assert job.take_step({"g0": 1, "g2": 0})
    job.take_step()
    job.join(healed=True)
    job.take_step()
    assert job.step == 17 and list(job.members) == ["g3", "g4"]
    again = sum(reads.values()) - 17 * 3 * places
    assert again <= (1 + 2) * places, "what the lost had read of a step, and nothing before it"
    reads_what_hsdp_reads(job, config)


def test_a_loader_with_workers_is_read_alike_and_its_workers_hold_no_connection(texts: None, no_pickles: None) -> None:
    ours, peers = socket.socketpair()
    config = texts_config(num_workers=2)
    job = job_of(config, 2, 1, groups=2)
    groups = list(job.members.values())
    for _ in range(4):
        job.take_step()
    workers = [
        worker
        for group in job.members.values()
        for reader in group.loaders[0]._open._readers.values()
        for worker in reader.stream._loader._iterator._workers
    ]
    assert len(workers) == 4
    mine = os.fstat(ours.fileno()).st_ino
    for worker in workers:
        links = [os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")]
        assert f"socket:[{mine}]" not in links and worker.is_alive()
    ours.close()
    peers.settimeout(10)
    assert peers.recv(1) == b"", "nobody else holds it open"
    peers.close()
    assert job.take_step({"g0": 0})
    job.take_step()
    reads_what_hsdp_reads(job, texts_config(num_workers=2))
    for group in groups:  # now, not in a garbage collection, where torch waits 5 s for each worker
        group.loaders[0]._open._readers.clear()
    assert not any(worker.is_alive() for worker in workers)


def test_a_state_that_is_too_large_makes_an_heir_slower_and_says_what_to_give(
    texts: None, reads: Counter[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a long text has no room in the entry."""
    config = texts_config()
    stream = data._LoaderStream(config.build(dp_world_size=2, dp_rank=0, **{**GIVEN, "snapshot_every_n_steps": 1}))
    room = statistics.median(len(packed(stream.state_dict())) for _ in zip(range(30), stream, strict=False))
    monkeypatch.setattr(SlotStreams, "_state_bytes", lambda _: int(room))
    reads.clear()
    job = job_of(config, 2, 1, groups=2)
    for _ in range(40):
        job.take_step()
        at = job.members["g0"].ranks[0].registered["stream-states-at"]
        if job.step > 8 and int((job.step - at).max()) >= 3:
            break
    behind = int((job.step - at).sum())
    said = re.findall(r"slot \d's stream does not travel: it has (\d+) bytes .*--fault_tolerance.stream_state_kb (\d+)",
                      capsys.readouterr().err)  # fmt: skip
    assert behind >= 3 and said and all(int(size) > room and int(kb) == -(-int(size) // 1024) for size, kb in said)
    before = sum(reads.values())
    job.join(healed=True)
    assert job.take_step({"g0": 0, "g1": 0})
    assert sum(reads.values()) - before == 2 + 2 + behind, "counted by who was lost, and read on by who inherits"
    reads_what_hsdp_reads(job, config)


@pytest.mark.parametrize("state_kb", [0, 16])
def test_what_an_heir_reads_is_decided_by_an_option(
    state_kb: int, texts: None, reads: Counter[int], capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(texts_config(), 2, 1, groups=2, state_kb=state_kb)
    for _ in range(10):
        job.take_step()
    job.join(healed=True)
    before = sum(reads.values())
    assert job.take_step({"g0": 0, "g1": 0})
    assert sum(reads.values()) - before == 2 + 2 + (0 if state_kb else 2 * 10)
    assert FaultTolerance(enable=False).stream_state_kb == 16
    with pytest.raises(UsageError, match="fault_tolerance.stream_state_kb is -1: 0 .none travels. to 1024"):
        SlotStreams.around(texts_config(), 2, -1)


def test_with_many_streams_their_states_take_turns(texts: None) -> None:
    """8 ranks a group and 64 microbatches: an entry has room for one state in so many, and is half a MiB."""
    config = SlotStreams.around(texts_config(), 64, 16)
    job = Job(lambda places, place: config.build(dp_world_size=places, dp_rank=place, **GIVEN), 64, 8, 1)
    columns, words = job.members["g0"].ranks[0].shapes["stream states"]
    assert columns == 23 and words * 6 >= 16 << 10 and columns * words <= data.STATES_NUMEL_MAX


class Overriding(HuggingFaceTextDataLoader):
    """A loader of somebody's, with a note beside torchtitan's pickle."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        pass

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": 1}


def test_a_pickle_never_travels(texts: None, no_pickles: None, capsys: pytest.CaptureFixture[str]) -> None:
    config = Overriding.Config(dataset=NAME)
    job = job_of(config, 2, 1, groups=2)
    said = capsys.readouterr().err
    assert (
        said.count("the states of Overriding do not travel, since it has a state_dict of its own around a pickle") == 2
    )
    assert "stream states" not in job.members["g0"].ranks[0].shapes
    for _ in range(3):
        job.take_step()
    assert job.take_step({"g0": 0})
    reads_what_hsdp_reads(job, config)


# ------------------------------------------------------------ anybody's loaders


class Numbers(BaseDataLoader):
    """Batch n of rank r holds n and r; it may end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        ends: int = 1 << 60

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.config, self.dp_rank, self.world, self.size, self.n = config, dp_rank, dp_world_size, local_batch_size, 0

    def __iter__(self) -> Iterator[Any]:
        while self.n < self.config.ends + self.dp_rank:
            labels = torch.full((self.size, 4), self.n)
            labels[0, 0] = IGNORE_INDEX if self.dp_rank else 7
            self.n += 1
            yield {"input": torch.full((self.size, 4), self.dp_rank)}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n = state_dict["n"]


def test_only_loaders_that_are_read_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    real = Numbers.__init__

    def building(self: Any, config: Any, *, dp_rank: int, **more: Any) -> None:
        built.append(dp_rank)
        real(self, config, dp_rank=dp_rank, **more)

    monkeypatch.setattr(Numbers, "__init__", building)
    job = job_of(Numbers.Config(), 4, 2, groups=2)
    assert built == []
    job.take_step()
    job.take_step()
    assert sorted(built) == list(range(8)), "each once, by one of the groups"
    assert job.tokens == [8 * 8 - 7] * 2


@pytest.mark.parametrize("lost", [False, True])
def test_data_that_ends_cancels_the_same_step_everywhere(lost: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 of 8 has five batches, rank 1 has six, and so on."""
    job = job_of(Numbers.Config(ends=5), 4, 2, groups=2)
    assert all(job.take_step() for _ in range(4))
    assert job.take_step({"g0": 0} if lost else None)
    assert not job.take_step() and job.step == 5
    told = [line for line in capsys.readouterr().err.splitlines() if "the data ends" in line]
    line = "lightkeeper: the data ends before step 5: 1 of 8 parts of its microbatches have no batch; 5 steps were done"
    assert told == [line] * (2 if lost else 4), "each rank, the manager of each"
    reads_what_hsdp_reads(job, Numbers.Config(ends=5))


def test_a_loader_is_not_iterated_over() -> None:
    with pytest.raises(TypeError, match="asked for batches by step and microbatch"):
        next(iter(SlotStreams.around(Numbers.Config(), 2).build(dp_world_size=1, dp_rank=0, **GIVEN)))


# ------------------------------------------------------------ disk


@pytest.mark.parametrize("groups", [1, 3])
def test_a_checkpoint_is_gone_on_from_by_any_number_of_groups(
    groups: int, texts: None, reads: Counter[int], tmp_path: Path
) -> None:
    config = texts_config()
    job = job_of(config, 3, 2, groups=2)
    for _ in range(9):
        job.take_step()
    for place, loader in enumerate(job.members["g1"].loaders):
        dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / str(place), no_dist=True)
    reads.clear()

    def build(places: int, place: int) -> Any:
        fresh = SlotStreams.around(config, 3, 16).build(dp_world_size=places, dp_rank=place, **GIVEN)
        dcp.load({"dataloader": fresh}, checkpoint_id=tmp_path / str(place), no_dist=True)
        return fresh

    after = Job(build, 3, 2, groups)
    after.read, after.tokens, after.step = job.read, job.tokens, 9
    for group in after.members.values():
        for rank in group.ranks:
            rank.page.step = 9
    for _ in range(4):
        after.take_step()
    assert sum(reads.values()) == 4 * 3 * 2, "none before the ninth is read again"
    reads_what_hsdp_reads(after, config)


def test_a_checkpoint_of_other_microbatches_is_refused(tmp_path: Path) -> None:
    job = job_of(Numbers.Config(), 4, 1, groups=1)
    job.take_step()
    saved = job.members["g0"].loaders[0].state_dict()
    assert [type(value) for value in saved.values()] == [bytes] and b"pickle" not in saved["place_0"]
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(saved["place_0"])
    other = SlotStreams.around(Numbers.Config(), 6).build(dp_world_size=1, dp_rank=0, **GIVEN)
    other.load_state_dict(saved)
    with pytest.raises(UsageError, match="of 4 slots .microbatches of a step., and here there are 6"):
        job_of(Numbers.Config(), 6, 1, groups=1).members["g0"].loaders[0].load_state_dict(saved)
    empty = SlotStreams.around(Numbers.Config(), 4).build(dp_world_size=1, dp_rank=0, **GIVEN)
    empty.load_state_dict({})  # torchtitan gives what it has
