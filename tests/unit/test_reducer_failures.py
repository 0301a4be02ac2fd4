"""A reduce that fails is repeated, and the entry is there for whoever missed it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from reducer_members import HALVES, Member, assert_same_bits, mlp, plain, train
from torch_workers import in_threads, local_groups

from lightkeeper.manager.groups import Alone, GroupFailed, LocalKeys, start_build
from lightkeeper.manager.reducer import EntryGone, Outcome


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
