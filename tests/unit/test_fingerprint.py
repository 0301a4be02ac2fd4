"""A fingerprint changes with every bit that matters, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightkeeper.manager.fingerprint import fingerprint, raw_bytes, settings_hash, signature


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def flip_bit(tensor: torch.Tensor) -> None:
    raw_bytes(tensor)[0] ^= 1


def test_equal_state_has_equal_fingerprints():
    assert fingerprint(*trained()) == fingerprint(*trained())
    assert len(fingerprint(*trained())) == 32
    model, optimizer = trained()
    assert fingerprint(model, optimizer) == fingerprint([model], [optimizer])


@pytest.mark.parametrize("which", ["0.weight", "1.running_mean", "1.num_batches_tracked", "2.bias"])
def test_one_flipped_bit_of_the_model_is_seen(which):
    model, optimizer = trained()
    before = fingerprint(model, optimizer)
    flip_bit(model.state_dict()[which])
    assert fingerprint(model, optimizer) != before


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_one_flipped_bit_of_the_optimizer_is_seen(key):
    model, optimizer = trained()
    before = fingerprint(model, optimizer)
    flip_bit(optimizer.state[model[0].weight][key])
    assert fingerprint(model, optimizer) != before


@pytest.mark.parametrize(
    ("key", "value"), [("lr", 0.02), ("weight_decay", 0), ("betas", (0.9, 0.99)), ("lr", torch.tensor(0.01))]
)
def test_hyper_parameters_and_their_types_are_seen(key, value):
    model, optimizer = trained()
    before = fingerprint(model, optimizer)
    optimizer.param_groups[0][key] = value
    assert fingerprint(model, optimizer) != before


def test_dtype_shape_and_name_are_seen():
    def of(tensor: torch.Tensor, name: str = "x") -> str:
        module = nn.Module()
        module.register_buffer(name, tensor)
        return fingerprint(module)

    zeros = torch.zeros(4)
    seen = [of(zeros), of(zeros.reshape(2, 2)), of(zeros.to(torch.int32)), of(zeros, "y"), of(torch.zeros(()))]
    assert len(set(seen)) == len(seen)
    assert of(torch.arange(6.0).reshape(2, 3).t()) == of(torch.arange(6.0).reshape(2, 3).t().contiguous())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn]
)
def test_any_dtype(dtype):
    module = nn.Module()
    module.register_buffer("x", torch.zeros(5).to(dtype))
    before = fingerprint(module)
    flip_bit(module.x)
    assert fingerprint(module) != before


def test_what_has_no_bits_is_refused_with_its_path():
    model, optimizer = trained()
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(TypeError, match=r"optimizer\.0\.0\.odd is an object"):
        fingerprint(model, optimizer)
    with pytest.raises(TypeError, match="sparse"):
        raw_bytes(torch.zeros(2, 2).to_sparse())


def test_signature_names_shapes_and_settings_but_no_values():
    model, optimizer = trained()
    before = signature(model, optimizer)
    assert before["0.weight"] == "float32[3, 4]" and before["2.bias"] == "bfloat16[2]"
    assert before["optimizer.0"].startswith("AdamW: 6 parameters, amsgrad=False, betas=(0.9, 0.999)")
    flip_bit(model[0].weight)
    assert signature(model, optimizer) == before
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduled = signature(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-9  # the schedule has moved on
    assert signature(model, optimizer) == scheduled


def test_the_settings_hash_sees_what_a_scheduler_sets():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = settings_hash(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert settings_hash([optimizer]) == before
    optimizer.param_groups[0]["lr"] = 0.05
    assert settings_hash(optimizer) != before
