"""Groups' loops around a reducer, and plain training to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch_workers import in_threads

from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.reducer import Outcome, Reducer

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch(step: int, k: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + k))


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Member:
    """One group's loop, with small buckets so that there are several."""

    def __init__(
        self, model: nn.Module, group, loss: Loss = mean_square, total: int = 4, kind: type[Reducer] = Reducer
    ) -> None:
        self.model = model
        self.loss = loss
        self.total = total
        self.notes: list[str] = []
        layout = ExtrasLayout()
        layout.declare("loss")
        parameters = list(model.named_parameters(remove_duplicate=False))
        self.reducer = kind(parameters, layout, 3000, self.notes.append, first_bytes=200)
        self.reducer.attach(group)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def compute(self, step: int, mine: Sequence[int], last: bool = True) -> None:
        for k in mine:
            self.reducer.microbatch(k, last and k == mine[-1])
            loss = self.loss(self.model, batch(step, k)) / self.total
            loss.backward()
            self.reducer.contribute("loss", loss)

    def reduce(self, ready: int = 0) -> Outcome:
        outcome = self.reducer.reduce(ready, 20.0)
        while outcome.kind == "again":
            outcome = self.reducer.reduce(ready, 20.0)
        assert outcome.problem is None
        return outcome

    def step(self, step: int, mine: Sequence[int]) -> int:
        """Does one step; how many buckets were launched while the backward pass ran."""
        self.reducer.begin(step, self.total)
        self.compute(step, mine)
        launched = len(self.reducer._pending)
        self.reduce()
        self.reducer.commit()
        self.optimizer.step()
        return launched


def plain(model: nn.Module, steps: int, total: int = 4, loss: Loss = mean_square) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(total):
            (loss(model, batch(step, k)) / total).backward()
        optimizer.step()
    return model


def assert_same_bits(one: nn.Module, two: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name


def assert_close(one: nn.Module, two: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def train(members: Sequence[Member], shares: Sequence[Sequence[int]], steps: Sequence[int]) -> list[list[int]]:
    """All members at the same time; per member and step how many buckets were launched in the backward pass."""
    calls = [
        lambda member=member, mine=mine: [member.step(step, mine) for step in steps]
        for member, mine in zip(members, shares, strict=True)
    ]
    return in_threads(*calls)


HALVES = ([0, 2], [1, 3])
