"""What is saved has torch's own names, comes back with the same bits and types, and is loaded by torch alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_states as states
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from lightkeeper.checkpoint.restoring import OtherState
from lightkeeper.checkpoint.writing import SaveFailed

ADAMW = lambda ps: torch.optim.AdamW(ps, lr=1e-2)  # noqa: E731
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": ADAMW,
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "plain-sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}
MODELS = {name: getattr(states, name) for name in ("plain", "compiled", "checkpointed", "bf16")} | {"tied": states.Tied}


def names_in(path: Path) -> dict[str, str]:
    """All names of a checkpoint's index, with dtype and shape of the tensors."""
    described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: f"{one.properties.dtype} {tuple(one.size)}" if hasattr(one, "properties") else "bytes"
        for name, one in described.items()
    }


def by_torch(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The names that torch gives them."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    states.quietly(lambda: dcp.save(state, checkpoint_id=path, no_dist=True))
    return names_in(path)


@pytest.mark.parametrize("kind", MODELS)
def test_names_are_those_that_torch_gives(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind]()
    optimizer = ADAMW(model.parameters())
    states.train(model, optimizer)
    states.save(tmp_path / "ours", model=model, optimizer=optimizer)
    assert names_in(tmp_path / "ours") == by_torch(tmp_path / "torchs", model, optimizer)


def test_names_under_data_parallel_are_those_that_torch_gives(tmp_path: Path) -> None:
    with states.data_parallel() as model:
        optimizer = ADAMW(model.parameters())
        states.train(model, optimizer)
        states.save(tmp_path / "ours", model=model, optimizer=optimizer)
        assert names_in(tmp_path / "ours") == by_torch(tmp_path / "torchs", model, optimizer)


@pytest.mark.parametrize("kind", MODELS)
def test_all_of_it_comes_back_in_place(tmp_path: Path, kind: str) -> None:
    comes_back(tmp_path, MODELS[kind](), MODELS[kind](), ADAMW)


def test_what_was_saved_under_data_parallel_comes_back_under_it_and_without(tmp_path: Path) -> None:
    with states.data_parallel() as first:
        second = nn.parallel.DistributedDataParallel(states.plain())
        comes_back(tmp_path / "under", first, second, ADAMW)
        bare, optimizer = states.plain(), ADAMW(first.parameters())
        states.train(first, optimizer)
        manifest = states.save(tmp_path / "ours", model=first, optimizer=optimizer)
        fresh = ADAMW(bare.parameters())
        states.load(tmp_path / "ours", manifest, model=bare, optimizer=fresh)
        assert states.fingerprint(model=bare) == states.fingerprint(model=first.module)
        assert states.fingerprint(optimizer=fresh) == states.fingerprint(optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_comes_back(tmp_path: Path, optimizer: str) -> None:
    comes_back(tmp_path, states.bf16(), states.bf16(), OPTIMIZERS[optimizer])


def comes_back(tmp_path: Path, first: nn.Module, second: nn.Module, make: Any) -> None:
    """A state is saved, and loaded into objects that have made no step yet, and into such that have."""
    optimizer = make(first.parameters())
    states.train(first, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    for part in first.modules():
        if isinstance(part, states.Counting):
            part.seen = 41
    saved = states.fingerprint(model=first, optimizer=optimizer)
    manifest = states.save(tmp_path / "ours", model=first, optimizer=optimizer)
    assert manifest.loaded
    fresh = make(second.parameters())
    held = [id(p) for p in second.parameters()]
    assert states.fingerprint(model=second, optimizer=fresh) != saved
    restored = states.load(tmp_path / "ours", manifest, model=second, optimizer=fresh)
    assert restored.compared and restored.bytes > 0
    assert states.fingerprint(model=second, optimizer=fresh) == saved
    assert [id(p) for p in second.parameters()] == held and fresh.param_groups[0]["lr"] == 0.1 + 0.2
    states.train(second, fresh, steps=2)
    assert states.fingerprint(model=second, optimizer=fresh) != saved
    states.load(tmp_path / "ours", manifest, model=second, optimizer=fresh)
    assert states.fingerprint(model=second, optimizer=fresh) == saved


class Own:
    """A state of the user's own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


OF_ALL_KINDS = {
    "tuple": (1, (2.5, None), [torch.arange(4), (torch.ones(2, 2, dtype=torch.bfloat16), "x")]),
    "int keys": {3: torch.zeros(2), 10: {2: "two", 1: "one"}},
    "numbers": [float("inf"), -0.0, 2**70, True, 1e-300, b"\x00\xff", 1 + 2j, torch.float16],
    "text with . and /": "a.b/c",
    "empty": [{}, (), [], torch.empty(0, 3)],
    "scalar": torch.tensor(7),
}


def test_what_torchs_format_would_change_comes_back_with_its_exact_types(tmp_path: Path) -> None:
    saved = states.fingerprint(own=Own(OF_ALL_KINDS))
    manifest = states.save(tmp_path / "ours", own=Own(OF_ALL_KINDS))
    back = Own({})
    assert states.load(tmp_path / "ours", manifest, own=back).compared
    assert states.fingerprint(own=back) == saved
    assert type(back.state["tuple"]) is tuple and type(back.state["tuple"][2][1]) is tuple
    assert list(back.state["int keys"][10]) == [2, 1] and back.state["numbers"] == OF_ALL_KINDS["numbers"]


def test_what_has_one_name_twice_in_torchs_format_is_told_by_it(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match=r"duplicated flatten key own\.a\.2"):
        states.save(tmp_path / "ours", own=Own({"a": {2: "two", "2": "text"}}))


def test_several_models_and_optimizers_and_a_bare_tensor(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        a, b = states.plain(), states.bf16()
        optimizers = ADAMW(a.parameters()), OPTIMIZERS["sgd"](b.parameters())
        both = nn.ModuleList([a, b])
        return {"both": both, "a": a, "b": b, "x": optimizers[0], "y": optimizers[1], "bare": torch.zeros(3)}

    one, other = make(), make()
    states.train(one["both"], one["x"], one["y"])
    one["bare"] += 2

    def named(made: dict[str, Any]) -> dict[str, Any]:
        return {
            "model_0": made["a"], "model_1": made["b"], "optimizer_0": made["x"], "optimizer_1": made["y"],
            "bare": made["bare"],
        }  # fmt: skip

    manifest = states.save(tmp_path / "ours", **named(one))
    states.load(tmp_path / "ours", manifest, **named(other))
    assert states.fingerprint(**named(other)) == states.fingerprint(**named(one))
    assert other["bare"].tolist() == [2, 2, 2]
    found = names_in(tmp_path / "ours")
    assert {"model-0.0.weight", "model-1.0.weight", "bare"} <= found.keys()
    assert {"optimizer-0.state.model-0.0.weight.exp_avg", "optimizer-1.state.model-1.0.weight.momentum_buffer"} <= set(
        found
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda: nn.Sequential(nn.Linear(8, 7), nn.BatchNorm1d(7), states.Counting(), nn.Linear(7, 3)),
            "model.0.weight",
        ),
        (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), states.Counting()), r"4 here and 6 there"),
        (lambda: states.plain().to(torch.bfloat16), "model.0.weight"),
    ],
    ids=["other-shape", "other-parts", "other-dtype"],
)
def test_another_model_is_refused_by_name_and_nothing_is_overwritten(tmp_path: Path, wrong: Any, says: str) -> None:
    model = states.plain()
    optimizer = ADAMW(model.parameters())
    states.train(model, optimizer)
    manifest = states.save(tmp_path / "ours", model=model, optimizer=optimizer)
    other = wrong()
    fresh = ADAMW(other.parameters())
    before = states.fingerprint(model=other, optimizer=fresh)
    with pytest.raises(OtherState, match=says) as told:
        states.load(tmp_path / "ours", manifest, model=other, optimizer=fresh)
    assert "\n" not in str(told.value) and str(tmp_path / "ours") in str(told.value)
    assert states.fingerprint(model=other, optimizer=fresh) == before


def test_an_optimizer_over_other_parameters_is_refused_by_name(tmp_path: Path) -> None:
    model, other = states.plain(), states.plain()
    optimizer = ADAMW(model.parameters())
    states.train(model, optimizer)
    manifest = states.save(tmp_path / "ours", model=model, optimizer=optimizer)
    turned = ADAMW(list(other.parameters())[::-1])
    with pytest.raises(OtherState, match=r"optimizer has other parameters here \(3.bias where it has 0.weight\)"):
        states.load(tmp_path / "ours", manifest, model=other, optimizer=turned)


# ------------------------------------------------------------ without this package

ALONE = """
import json, runpy, sys
import torch, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

path, whole = sys.argv[1:]
model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters())
of_model, of_optimizer = get_state_dict(model, optimizer)
state = {"model": of_model, "optimizer": of_optimizer}
dcp.load(state, checkpoint_id=path, no_dist=True)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

sys.argv = ["format_utils", "dcp_to_torch", path, whole]
runpy.run_module("torch.distributed.checkpoint.format_utils", run_name="__main__")
loaded = torch.load(whole, weights_only=False)

def told(weights, moments, groups):
    return [
        {name: weights[name].tolist() for name in sorted(weights)},
        {name: {k: v.tolist() for k, v in sorted(moments[name].items())} for name in sorted(moments)},
        [{k: v for k, v in sorted(group.items()) if k != "params"} for group in groups],
    ]

names = {id(p): name for name, p in model.named_parameters()}
moments = {names[id(p)]: values for p, values in optimizer.state.items()}
print(json.dumps([
    told(model.state_dict(), moments, optimizer.param_groups),
    told(loaded["model"], loaded["optimizer"]["state"], loaded["optimizer"]["param_groups"]),
    loaded["counter"],
    sorted(name for name in sys.modules if name.partition(".")[0] == "lightkeeper"),
]))
"""


@pytest.mark.long
def test_torch_alone_loads_it_in_place_and_as_one_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.95))
    states.train(model, optimizer)
    states.save(tmp_path / "ours", model=model, optimizer=optimizer, counter=Own({"seen": 5}))
    words = [sys.executable, "-c", ALONE, str(tmp_path / "ours"), str(tmp_path / "whole.pt")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    in_place, as_file, counter, modules = json.loads(done.stdout.splitlines()[-1])
    names = {id(p): name for name, p in model.named_parameters()}
    moments = {names[id(p)]: values for p, values in optimizer.state.items()}
    weights = model.state_dict()
    expected = [
        {name: weights[name].tolist() for name in sorted(weights)},
        {name: {k: v.tolist() for k, v in sorted(moments[name].items())} for name in sorted(moments)},
        [{k: v for k, v in sorted(group.items()) if k != "params"} for group in optimizer.param_groups],
    ]
    expected = json.loads(json.dumps(expected))
    assert in_place == expected and as_file == expected
    assert counter == {"seen": 5} and not modules
