"""The reducer against plain training, and its traps one by one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from reducer_members import (
    HALVES,
    Loss,
    Member,
    assert_close,
    assert_same_bits,
    batch,
    mean_square,
    mlp,
    plain,
    train,
)
from torch_workers import in_threads, local_groups

from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.groups import Alone
from lightkeeper.manager.randomness import seed_microbatch
from lightkeeper.manager.reducer import NotTraining, Outcome, Reducer


def run_pair(make: Callable[[], nn.Module], steps: int, loss: Loss = mean_square) -> tuple[list[Member], list[int]]:
    """Two members train and must agree with each other to the bit and with plain training closely."""
    with local_groups(2) as groups:
        members = [Member(make(), group, loss) for group in groups]
        launched = in_threads(
            *(lambda m=m, i=i: [m.step(s, [i, i + 2]) for s in range(steps)] for i, m in enumerate(members))
        )
    assert_same_bits(members[0].model, members[1].model)
    assert_close(members[0].model, plain(make(), steps, loss=loss))
    return members, launched[0]


def test_overlap_starts_after_two_steps_and_bits_agree():
    members, launched = run_pair(mlp, 6)
    assert len(members[0].reducer._buckets) >= 3
    assert launched[:2] == [0, 0]
    assert all(count > 0 for count in launched[2:])
    assert not members[0].notes


def test_one_member_is_bit_equal_to_the_plain_loop_with_dropout():
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 4))

    calls = {"count": 0}

    def seeded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seed_microbatch(7, calls["count"], 0, 0)
        calls["count"] += 1
        return mean_square(model, x)

    member = Member(make(), Alone(), seeded)
    for step in range(5):
        member.step(step, range(4))
    calls["count"] = 0
    assert_same_bits(member.model, plain(make(), 5, loss=seeded))


def test_chunked_loss_fires_hooks_several_times():
    def chunked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = model[:4](x)
        leaf = hidden.detach().requires_grad_()
        pieces = [model[4](piece).square().mean() / 4 / 4 for piece in leaf.chunk(4)]
        for piece in pieces:
            piece.backward()  # the last layer's hooks fire four times
        return (hidden * leaf.grad).sum() * 4  # the caller divides by 4 microbatches

    members, launched = run_pair(mlp, 5, chunked)
    assert launched[-1] > 0 and not members[0].notes


def test_reentrant_checkpoint():
    def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in (model[:2], model[2:4], model[4:]):
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()

    members, launched = run_pair(mlp, 5, checkpointed)
    assert launched[-1] > 0 and not members[0].notes


def test_unused_parameter_keeps_no_gradient():
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    before = Partly().unused.weight.clone()
    members, _ = run_pair(Partly, 5)
    for member in members:
        assert member.model.unused.weight.grad is None
        assert torch.equal(member.model.unused.weight, before)  # a zero gradient would have decayed it
        assert member.model.unused.weight not in member.optimizer.state


def test_parameter_used_by_one_member_only_gets_its_gradient_everywhere():
    def sometimes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return mean_square(model if x[0, 0] > 0 else model[:2], x)

    run_pair(mlp, 6, sometimes)


def test_tied_weights_are_reduced_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
            self.outer.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x).tanh())

    members, _ = run_pair(Tied, 5)
    assert sum(bucket.flat.numel() for bucket in members[0].reducer._buckets) == 16 * 16 + 2 * 16


def test_late_firing_makes_all_reduce_again_with_the_right_sum():
    def late(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model, x)
        if late.on:
            (loss / 4).backward()  # fires every hook once more than learnt, before the caller's backward
            loss = mean_square(model, x)
        return loss

    late.on = False
    with local_groups(2) as groups:
        members = [Member(mlp(), group, late) for group in groups]

        def run(i: int) -> list[int]:
            counts = [members[i].step(s, [i, i + 2]) for s in range(3)]
            barrier.wait()
            late.on = True
            counts.append(members[i].step(3, [i, i + 2]))
            barrier.wait()
            late.on = False
            counts.extend(members[i].step(s, [i, i + 2]) for s in range(4, 10))
            return counts

        barrier = threading.Barrier(2)
        launched = in_threads(lambda: run(0), lambda: run(1))[0]
    assert_same_bits(members[0].model, members[1].model)
    twice = mlp()
    optimizer = torch.optim.AdamW(twice.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        for k in range(4):
            for _ in range(2 if step == 3 else 1):
                (mean_square(twice, batch(step, k)) / 4).backward()
        optimizer.step()
    assert_close(members[0].model, twice)
    assert launched[2] > 0 and launched[3] > 0
    assert launched[4:8] == [0] * 4 and launched[8] > 0  # off, learnt anew with a longer look, on again
    assert "reduce again" in members[0].notes[0] and len(members[0].notes) == 1


def test_fewer_firings_are_learnt_without_reducing_again():
    def fewer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return mean_square(model[:2] if fewer.on else model, x)

    fewer.on = False
    with local_groups(2) as groups:
        members = [Member(mlp(), group, fewer) for group in groups]
        train(members, HALVES, range(3))
        fewer.on = True
        launched = train(members, HALVES, range(3, 7))[0]
    assert launched[0] == 0 and launched[-1] > 0
    assert not members[0].notes


def test_members_without_a_share_follow():
    with local_groups(2) as groups:
        members = [Member(mlp(), group) for group in groups]
        shares = (range(4), [])
        train(members, shares, range(5))
    assert_same_bits(members[0].model, members[1].model)
    assert_same_bits(members[0].model, plain(mlp(), 5))


def test_leftover_gradients_do_not_count():
    member = Member(mlp(), Alone())
    for parameter in member.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    for step in range(3):  # and never zero_grad()
        member.step(step, range(4))
    assert_same_bits(member.model, plain(mlp(), 3))


def test_wrong_microbatches_are_named_and_the_ready_flag_needs_all():
    with local_groups(2) as groups:
        members = [Member(mlp(), group) for group in groups]

        def run(i: int, step: int, mine: Sequence[int], ready: int) -> Outcome:
            members[i].reducer.begin(step, 4)
            members[i].compute(step, mine)
            outcome = members[i].reducer.reduce(ready, 20.0)
            members[i].reducer.commit()
            return outcome

        first = in_threads(lambda: run(0, 0, [0, 1], 0), lambda: run(1, 0, [1, 3], 0))
        second = in_threads(lambda: run(0, 1, [0, 1], 5), lambda: run(1, 1, [2, 3], 0))
        third = in_threads(lambda: run(0, 2, [0, 1], 5), lambda: run(1, 2, [2, 3], 5))
        fourth = in_threads(lambda: run(0, 3, [0, 1], 5), lambda: run(1, 4, [2, 3], 5))
    assert {o.problem for o in first} == {"step 0: 4 microbatches were summed, but not each of them exactly once"}
    assert [o.ready for o in second] == [0, 0] and [o.problem for o in second] == [None, None]
    assert [o.ready for o in third] == [5, 5]
    assert "different steps" in (fourth[0].problem or "")


def test_backward_that_trains_nothing_is_refused():
    member = Member(mlp(), Alone())
    for step in range(3):
        member.step(step, range(4))
    member.reducer.begin(3, 4)
    for k in range(4):
        member.reducer.microbatch(k, k == 3)  # and no backward reaches the parameters
    with pytest.raises(NotTraining, match="no parameter got a gradient") as failed:
        member.reducer.reduce(0, 1.0)
    assert failed.value.local


def test_close_removes_the_hooks():
    member = Member(mlp(), Alone())
    member.step(0, range(4))
    member.reducer.close()
    mean_square(member.model, batch(0, 0)).backward()
    assert all(not (p._post_accumulate_grad_hooks or {}) for p in member.model.parameters())


def test_nothing_to_reduce_is_refused():
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        Reducer([], ExtrasLayout())
