"""The reducer against plain training, and its traps one by one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.dirname(__file__))
from torch_workers import in_threads, local_groups

from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.groups import Alone, GroupFailed, LocalKeys, start_build
from lightkeeper.manager.randomness import seed_microbatch
from lightkeeper.manager.reducer import EntryGone, NotTraining, Outcome, Reducer

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

    def __init__(self, model: nn.Module, group, loss: Loss = mean_square, total: int = 4) -> None:
        self.model = model
        self.loss = loss
        self.total = total
        self.notes: list[str] = []
        layout = ExtrasLayout()
        layout.declare("loss")
        parameters = list(model.named_parameters(remove_duplicate=False))
        self.reducer = Reducer(parameters, layout, 3000, self.notes.append, first_bytes=200)
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


def test_failed_reduce_is_repeated_from_the_local_sums_with_one_more_microbatch():
    def disturbed() -> list[nn.Module]:
        with local_groups(3) as old:
            members = [Member(mlp(), old[i]) for i in range(2)]
            third = Member(mlp(), old[2])
            shares = ([0, 1], [2], [3])
            in_threads(
                *(
                    lambda m=m, w=w: [m.step(s, w) for s in range(3)]
                    for m, w in zip([*members, third], shares, strict=True)
                )
            )
            # Step 3: the third never puts its part in, so bucket 0 is launched from a hook and cannot end.
            for member, mine in zip(members, shares, strict=False):
                member.reducer.begin(3, 4)
                member.compute(3, mine)
                assert len(member.reducer._pending) == 1, "bucket 0 waits, and no other was filled"
            for i, member in enumerate(members):
                old[i].abort("third died")
                with pytest.raises(GroupFailed, match="third died"):
                    member.reducer.reduce(0, 20.0)
                member.reducer.retry()
        with local_groups(2) as new:
            for member, group in zip(members, new, strict=True):
                member.reducer.attach(group)

            def finish(i: int) -> None:
                if i == 1:
                    members[i].compute(3, [3])  # the orphan
                members[i].reduce()
                members[i].reducer.commit()
                members[i].optimizer.step()
                members[i].step(4, [[0, 1], [2, 3]][i])

            in_threads(lambda: finish(0), lambda: finish(1))
        return [member.model for member in members]

    def undisturbed() -> list[nn.Module]:
        members = [Member(mlp(), Alone()) for _ in range(2)]
        with local_groups(3) as old:
            three = [*members, Member(mlp(), old[2])]
            for member, group in zip(three, old, strict=True):
                member.reducer.attach(group)
            shares = ([0, 1], [2], [3])
            train(three, shares, range(3))
        with local_groups(2) as new:
            for member, group in zip(members, new, strict=True):
                member.reducer.attach(group)
            train(members, ([0, 1], [2, 3]), (3, 4))
        return [member.model for member in members]

    broken, whole = disturbed(), undisturbed()
    assert_same_bits(broken[0], broken[1])
    assert_same_bits(broken[0], whole[0])


def test_error_inside_a_hook_surfaces_in_reduce_and_never_in_backward():
    member = Member(mlp(), Alone())
    for step in range(2):
        member.step(step, range(4))

    class Broken(Alone):
        def all_reduce(self, tensor):
            raise ZeroDivisionError("a bug")

    member.reducer.attach(Broken())
    member.reducer.begin(2, 4)
    member.compute(2, range(4))  # does not raise
    with pytest.raises(GroupFailed, match="a bug") as failed:
        member.reducer.reduce(0, 1.0)
    assert failed.value.local and isinstance(failed.value.__cause__, ZeroDivisionError)
    member.reducer.retry()
    member.reducer.attach(Alone())
    member.reduce()
    member.reducer.commit()
    member.optimizer.step()
    assert_same_bits(member.model, plain(mlp(), 3))


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


def test_entry_stays_whole_until_bucket_0_of_the_next_step_is_reduced():
    with local_groups(2) as groups:
        members = [Member(mlp(), group) for group in groups]
        with pytest.raises(EntryGone):
            members[0].reducer.entry()
        train(members, HALVES, range(3))
        member = members[0]
        entry = member.reducer.entry()
        kept = [tensor.clone() for tensor in entry]
        gradients = torch.cat([p.grad.reshape(-1) for p in member.model.parameters()]).sort().values
        assert torch.equal(torch.cat(kept[:-1]).sort().values, gradients)
        for p in member.model.parameters():
            p.grad.mul_(0.5)  # the user clips
        # Step 3: bucket 0 is launched from a hook; the other member is still on its way.
        member.reducer.begin(3, 4)
        member.compute(3, [0, 2])
        assert len(member.reducer._pending) == 1
        assert all(torch.equal(a, b) for a, b in zip(member.reducer.entry(), kept, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(entry, kept, strict=True))

        def other() -> None:
            members[1].step(3, [1, 3])

        in_threads(other, lambda: members[0].reduce())
        with pytest.raises(EntryGone):
            member.reducer.entry()
        member.reducer.commit()
        assert all(torch.equal(a, b) for a, b in zip(member.reducer.entry(), members[1].reducer.entry(), strict=True))


def test_a_missed_entry_is_adopted_from_a_peer():
    with local_groups(2) as groups:
        donor, behind = (Member(mlp(), group) for group in groups)
        in_threads(lambda: donor.step(0, [0, 2]), lambda: behind.step(0, [1, 3]))

        def miss() -> Outcome:
            behind.reducer.begin(1, 4)
            behind.compute(1, [1, 3])
            return behind.reduce()

        in_threads(lambda: donor.step(1, [0, 2]), miss)
    behind.reducer.retry()  # reduced, but the vote said "recover"
    local = [p.grad.clone() for p in behind.model.parameters()]
    for target, source in zip(behind.reducer.pending_buffers(), donor.reducer.entry(), strict=True):
        target.copy_(source)
    assert all(torch.equal(p.grad, g) for p, g in zip(behind.model.parameters(), local, strict=True))
    outcome = behind.reducer.adopt()
    assert outcome.kind == "reduced" and outcome.problem is None
    behind.reducer.commit()
    behind.optimizer.step()
    assert_same_bits(behind.model, donor.model)


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


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_sharded_parameters(mesh):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    member = Member(model, Alone())
    launched = [member.step(step, range(4)) for step in range(5)]
    assert launched[-1] > 0
    for a, b in zip(model.parameters(), plain(mlp(), 5).parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b)


def test_fsdp2_follower_makes_gradients_of_the_right_kind(mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with local_groups(2) as groups:
        models = [mlp(), mlp()]
        for model in models:
            fully_shard(model, mesh=mesh)
        members = [Member(model, group) for model, group in zip(models, groups, strict=True)]
        in_threads(lambda: members[0].step(0, range(4)), lambda: members[1].step(0, []))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(b.grad, DTensor) and b.grad.placements == a.grad.placements
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_hook_registered_before_fully_shard_is_refused(mesh):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    member = Member(model, Alone())
    fully_shard(model, mesh=mesh)
    member.reducer.begin(0, 4)
    member.compute(0, range(4))
    with pytest.raises(NotTraining, match="before fully_shard"):
        member.reducer.reduce(0, 1.0)


def test_buffer_of_a_reduction_that_will_not_end_is_given_up():
    class Never(Alone):
        def all_reduce(self, tensor):
            class Pending:
                def done(self) -> bool:
                    return False

                def wait(self, timeout_s: float) -> None:
                    raise GroupFailed("still there")

            return Pending()

    member = Member(mlp(), Never())
    member.reducer.begin(0, 4)
    member.compute(0, range(4))
    with pytest.raises(GroupFailed, match="still there"):
        member.reducer.reduce(0, 0.01)
    written = member.reducer._buckets[0].flat
    member.reducer.retry()
    assert member.reducer._buckets[0].flat.data_ptr() != written.data_ptr()
    member.reducer.attach(start_build("gloo", LocalKeys(), 0, 1, 1.0, "x").wait())
    member.reduce()
    member.reducer.commit()
