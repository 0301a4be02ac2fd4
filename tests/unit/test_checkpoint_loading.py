"""A checkpoint is really loaded, without a process group; whatever torch makes of a broken one is one line."""

from __future__ import annotations

import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch_workers import save_sharded, start_member

from lightkeeper.checkpoint.loading import load_fresh
from lightkeeper.checkpoint.manifest import Damaged


def state() -> dict[str, Any]:
    """Of all kinds that there are: dtypes, shapes, and what is no tensor."""
    torch.manual_seed(5)
    return {
        "weight": torch.randn(64, 3),
        "half": torch.randn(5).to(torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
        "plain": {"step": 3, "lr": 0.1, "name": "x"},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step-00000003"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def why(path: Path) -> str:
    with pytest.raises(Damaged) as told:
        load_fresh(path)
    text = str(told.value)
    assert len(text) <= 250 and text.isprintable()
    return text


def test_it_is_loaded_bit_by_bit_and_nothing_is_warned_of(saved: Path, recwarn: pytest.WarningsRecorder) -> None:
    loaded = load_fresh(saved)
    plain = {name: loaded.pop(f"plain.{name}") for name in ("step", "lr", "name")}
    expected = state()
    assert plain == expected.pop("plain") and set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    assert not [one for one in recwarn if "torch.distributed is disabled" in str(one.message)]


@pytest.mark.long
def test_what_several_ranks_wrote_is_loaded_whole_by_one_process(tmp_path: Path) -> None:
    members = [start_member(save_sharded, tmp_path, rank, 3) for rank in range(3)]
    for process, pipe in members:
        assert pipe.poll(60) and pipe.recv() == "saved"
        process.join(20)
    path = tmp_path / "step-00000001"
    loaded = load_fresh(path)
    assert set(loaded) == {"spread", "alike"} and torch.equal(loaded["alike"], torch.ones(2))
    assert torch.equal(loaded["spread"], torch.arange(21.0).reshape(7, 3))
    (path / "__2_0.distcp").unlink()
    assert "__2_0.distcp" in why(path)


def test_an_index_that_is_torn_anywhere_is_told(copy: Path) -> None:
    index = copy / ".metadata"
    data = index.read_bytes()
    draw = random.Random(4)
    for length in [0, 1, 2, len(data) - 1, *(draw.randrange(len(data)) for _ in range(30))]:
        index.write_bytes(data[:length])
        assert why(copy).startswith("torch cannot load it: ")
    index.write_bytes(b"not a pickle\nat all")
    why(copy)
    index.write_bytes(pickle.dumps({"another": "thing"}))
    why(copy)
    index.unlink()
    assert "FileNotFoundError" in why(copy)


def test_data_that_is_torn_is_told(copy: Path) -> None:
    data = copy / "__0_0.distcp"
    size = data.stat().st_size
    for length in (size // 2, 10, 0):
        data.write_bytes(data.read_bytes()[:length])
        assert why(copy).startswith("torch cannot load it: ")
    data.unlink()
    assert "FileNotFoundError" in why(copy) and "__0_0.distcp" in why(copy)


def test_a_part_that_the_index_lacks_is_no_uninitialised_memory(copy: Path) -> None:
    metadata = FileSystemReader(copy).read_metadata()
    described = metadata.state_dict_metadata["weight"]
    described.size = torch.Size([65, 3])  # type: ignore[union-attr]
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    assert why(copy) == "its index has 192 of 195 elements of weight"


def test_ctrl_c_stays_what_it_is(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **words: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_fresh(saved)
