"""Training states for the tests of snapshot, restore and transfer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.state.layout import Layout, layout_of
from lightkeeper.manager.state.registry import StateRegistry, leaves_in
from lightkeeper.manager.state.restore import Target
from lightkeeper.manager.state.segments import Segments, dense_bytes

RANGE_BYTES = 512


def name_of(step: int, epoch: int = 3) -> Entry:
    return Entry(Epoch(epoch, Term(1, "lh-a")), step)


def move(donor: StateRegistry, joiner: StateRegistry, range_bytes: int = RANGE_BYTES) -> Layout:
    """What a transfer does, without sockets: by way of the layout's JSON, range by range."""
    captured = donor.capture()
    layout = Layout.from_bytes(layout_of(name_of(4), captured, range_bytes).to_bytes())
    leaves = leaves_in(captured)
    target = Target(joiner, layout)
    segments = Segments(layout)
    for index in reversed(range(layout.ranges)):
        data = b"".join(
            bytes(dense_bytes(leaves[i].tensor)[at : at + n]) if i >= 0 else bytes(n)
            for i, at, n in segments.pieces(*layout.bounds(index))
        )
        at = 0
        for view in target.open(index):
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
        assert at == len(data)
        target.arrived(index)
    target.finish()
    target.verify(donor.fingerprint(range_bytes))
    return layout


class Tied(nn.Module):
    """Tied weights, a transposed parameter, a buffer that persists and one that does not, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.body = nn.Linear(16, 16).to(torch.bfloat16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.register_buffer("kept", torch.randn(3, dtype=torch.float64))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Averages:
    """A user's object with nested state and tensors of its own."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inner = {"mean": torch.randn(2000, generator=generator), "counts": [1, 2.0, (True, None)], 7: {"x": seed}}

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner, "big": 1 << 90, "nan": float("nan")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]


class Training:
    """A rank's training state: AdamW with fp32 moments of bf16 parameters, a schedule, a user's object, a tensor."""

    def __init__(self, seed: int, steps: int = 0, width: int = 16) -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        if width != 16:
            self.model.body = nn.Linear(width, 16).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (1 + seed), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.averages = Averages(seed)
        self.offset = torch.randn(9)
        self.registry = StateRegistry()
        self.registry.register("model", self.model)
        self.registry.register("optimizer", self.optimizer)
        self.registry.register("scheduler", self.scheduler)
        self.registry.register("averages", self.averages)
        self.registry.register("offset", self.offset)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self._moments_to(None)
        self.optimizer.step()
        self._moments_to(torch.float32)
        self.scheduler.step()
        self.averages.inner["mean"].mul_(0.9)
        self.model.seen += 1

    def _moments_to(self, dtype: torch.dtype | None) -> None:
        """AdamW computes bf16 parameters with bf16 moments only; the state that is copied has fp32 ones."""
        for parameter, state in self.optimizer.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(dtype or parameter.dtype)
                if dtype is not None and parameter.dtype == torch.bfloat16:
                    state[key] += 1e-7 * torch.randn(parameter.shape)

    def fingerprint(self) -> str:
        return self.registry.fingerprint(RANGE_BYTES)
