"""The gradient reducer: sums the gradients of all groups, one step after another, and holds the newest entry.

Order is everything here. All members reduce the same buckets in the same order: bucket 0, then, once bucket 0
has been reduced, bucket 1, 2, ..., and last the extras. That bucket 0 of step s+1 has been reduced proves
that every member has committed s, so only then may the buffers that hold the entry of s be filled anew;
bucket 0 itself has two buffers for that reason. `p.grad` keeps the local sum until the commit, so a reduce
that failed is repeated from it, and nothing is computed again; see `EarlyCopies` for what then becomes `p.grad`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lightkeeper.manager.buckets import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    Slot,
    as_gradient,
    local_tensor,
    plan,
)
from lightkeeper.manager.copies import EarlyCopies
from lightkeeper.manager.extras import Contributions, ExtrasLayout, Part, Total, check, pack, unpack
from lightkeeper.manager.groups import EpochGroup, GroupFailed, Note, Reduction
from lightkeeper.manager.overlap import Overlap
from lightkeeper.manager.placements import decode, encode
from lightkeeper.manager.within import Within

_DRAIN_S = 1.0  # after an abort a pending reduction ends within milliseconds; beyond this its buffer is given up


class NotTraining(GroupFailed):
    """Microbatches were computed and no gradient arrived: committing would silently lose them."""

    def __init__(self, message: str) -> None:
        super().__init__(message, local=True)


class EntryGone(LookupError):
    """There is no whole entry here: none was committed yet, or the next step has overwritten it."""


@dataclass(frozen=True)
class Outcome:
    """How a reduce ended.

    Attributes:
        kind: "reduced", or "again" if all members must call `reduce` once more, on the same group.
        ready: The epoch number that every member carried as its ready flag, or 0.
        problem: What is wrong with the entry (it must not be committed), or None.
        reduced: The user's extras, summed over all groups.
        total: The runtime's extras as reduced.
    """

    kind: Literal["reduced", "again"]
    ready: int
    problem: str | None
    reduced: dict[str, torch.Tensor]
    total: Total


class Reducer:
    """Reduces the gradients of `parameters` over one epoch's group after another.

    Args:
        parameters: Name and parameter, in the order of the model, alike in all groups; tied parameters once
            or several times, frozen ones are left out. Their hooks are registered here, so after
            `fully_shard`.
        layout: The user's extras; fixed when the first step begins.
        bucket_bytes: A bucket is full when it has at least so many bytes.
        note: Takes one line for the log.
        first_bytes: The same for the first bucket.
        settings: Gives the 16-bit hash of what the members' optimizers must have alike in a step.
        within: The ranks of this group, which sum their extras; None for a group of one rank.
        overlap: Whether gradients are what they seem when a hook fires: not where DistributedDataParallel averages
            them at the end of the backward pass.

    Raises:
        ValueError: no parameter requires a gradient.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        layout: ExtrasLayout,
        bucket_bytes: int = BUCKET_BYTES,
        note: Note = lambda line: None,
        first_bytes: int = FIRST_BUCKET_BYTES,
        settings: Callable[[], int] = lambda: 0,
        within: Within | None = None,
        overlap: bool = True,
    ) -> None:
        self._slots = _once_each(parameters)
        if not self._slots:
            raise ValueError("no parameter requires a gradient: there is nothing to reduce")
        self._layout = layout
        self._note = note
        self._settings = settings
        self._within = Within() if within is None else within
        self._flags = self._within.most(len(self._slots))  # so that all ranks' extras are summed in one order
        self._may_overlap = overlap
        self._buckets = plan(self._slots, bucket_bytes, first_bytes)
        self._bucket_of = _invert(self._buckets, len(self._slots))
        self._overlap = Overlap(self._bucket_of, len(self._buckets))
        self._placed = [0] * len(self._slots)
        self._contributions = Contributions(layout)
        self._summed: Mapping[str, torch.Tensor] = {}
        self._extras: torch.Tensor | None = None
        self._group: EpochGroup | None = None
        self._step, self._total = -1, 0
        self._microbatches: list[int] = []
        self._cleared = True
        self._again = False
        self._pending: list[Reduction] = []  # of this reduce, in order: buckets, then extras
        self._copies = EarlyCopies()
        self._failure: GroupFailed | None = None
        self._outcome: Outcome | None = None
        self._entry_whole = False
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._fired, i))
            for i, slot in enumerate(self._slots)
        ]

    # --- a step, in the order of the calls ---

    def attach(self, group: EpochGroup) -> None:
        """Reduce over `group` from now on; a group that has failed is never attached again."""
        assert not self._pending, "attach() before retry(): reductions of the last group are still known"
        self._group = group

    def begin(self, step: int, total: int) -> None:
        """Begin a step.

        Args:
            step: Its index.
            total: M, the number of microbatches of all groups together.
        """
        assert not self._pending, f"step {step} begins while step {self._step} is being reduced"
        if self._extras is None:
            self._layout.freeze(self._flags)
            device = self._buckets[0].flat.device
            self._extras = torch.zeros(self._layout.numel, dtype=torch.float64, device=device)
        if self._entry_whole:
            self._buckets[0].turn()
        self._step, self._total = step, total
        self._microbatches = []
        self._cleared = self._again = False
        self._failure = self._outcome = None
        self._contributions.clear()
        self._overlap.begin_step()

    def microbatch(self, k: int, last: bool) -> None:
        """Microbatch `k` starts; `last` if none is known to follow it in this step, so buckets may be
        launched.

        The first one of a step starts from empty gradients, whatever the user forgot.
        """
        self._clear_gradients()
        self._microbatches.append(k)
        self._overlap.begin_microbatch(last and self._group is not None and self._may_overlap)

    def contribute(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a declared extra of this step; see `Contributions.add` for shapes and errors."""
        self._contributions.add(name, value)

    def agree(self, name: str, value: torch.Tensor | float) -> None:
        """Give this member's value of an agreed extra of this step; see `Contributions.agree`."""
        self._contributions.agree(name, value)

    def keep(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take what the step's before extras were reduced to, for its entry."""
        for name, value in values.items():
            self._contributions.keep(name, value)

    def reduce(self, ready: int, timeout_s: float) -> Outcome:
        """Launch what is not launched yet, and wait for all of it.

        All ranks of a group call it equally often, whatever became of their buckets: it begins with their common sum.

        Args:
            ready: Number of the epoch this member's ranks are ready for, or 0.
            timeout_s: Bound on the wait, in seconds.

        Raises:
            NotTraining: microbatches were computed here and no gradient arrived.
            Apart: another rank of this group is gone.
            GroupFailed: the group cannot finish; also for anything that went wrong inside a hook, then with
                `local` set and the original exception as its cause.
        """
        until = time.monotonic() + timeout_s
        self._overlap.stop()
        self._summed = self._within.sum(self._layout, self._contributions.sums, self._contributions.agreed)
        self._clear_gradients()
        self._check_training()
        if self._failure is None:
            self._attempt(self._launch_rest, ready, until)
        if self._failure is not None:
            raise self._failure
        return self._finish()

    def retry(self) -> None:
        """The reduce failed: forget what was launched. The local sums are untouched."""
        until = time.monotonic() + _DRAIN_S
        for i, reduction in enumerate(self._pending):
            if not _ended(reduction, until):
                self._give_up_buffer(i)
        self._pending = []
        self._copies.drop()
        self._failure = self._outcome = None
        self._again = False

    def commit(self) -> None:
        """Copy the reduced entry into `p.grad`; a gradient that no group had becomes None."""
        assert self._outcome is not None and self._outcome.kind == "reduced", "commit() without a reduced entry"
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for bucket in self._buckets:
            for i, view in zip(bucket.members, bucket.views, strict=True):
                self._place(i, view, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._copies.drop()
        self._overlap.end_step(computed=bool(self._microbatches))
        self._entry_whole = True

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._pending = []

    # --- the entry, for a peer that missed it ---

    def entry(self) -> list[torch.Tensor]:
        """The newest committed entry: every bucket, one dimension each, then the extras (float64); not
        copied.

        It stays whole until bucket 0 of the next step has been reduced.

        Raises:
            EntryGone: there is none, or not any more.
        """
        if not self._entry_whole or self._extras is None:
            raise EntryGone(f"no whole entry is held (step {self._step})")
        # Between begin() and the next commit the current buffer of bucket 0 belongs to the next step.
        first = self._buckets[0].flat if self._outcome is not None else self._buckets[0].other
        return [first, *(bucket.flat for bucket in self._buckets[1:]), self._extras]

    def pending_buffers(self) -> list[torch.Tensor]:
        """Where a peer's entry of the current step is read to, shaped as `entry`; its own last entry is given
        up.
        """
        assert not self._pending, "a reduce is under way: call retry() first"
        self._entry_whole = False
        return self.like_entry()

    def like_entry(self) -> list[torch.Tensor]:
        """Tensors of the shapes and dtypes of an entry, once a step has begun; what they hold is nobody's business."""
        assert self._extras is not None, "no step has begun"
        return [*(bucket.flat for bucket in self._buckets), self._extras]

    def adopt(self) -> Outcome:
        """Take what was read into `pending_buffers` for the reduced entry of this step."""
        return self._read_extras(members=None)

    # --- inside ---

    def _fired(self, i: int, parameter: torch.Tensor) -> None:
        """Hook of parameter `i`. Never raises: that would leave FSDP2 silently not training."""
        del parameter
        self._overlap.fire(i)
        launched = len(self._pending)
        if self._bucket_of[i] < launched:
            self._again = True
        elif launched < len(self._buckets) and self._overlap.ready(launched) and self._failure is None:
            self._attempt(self._launch_ready)

    def _attempt(self, do: Callable[..., None], *args: Any) -> None:
        """Do it, and record what it raises, with the cause, for `reduce` to raise."""
        try:
            do(*args)
        except GroupFailed as e:
            self._failure = e
        except Exception as e:  # a bug here: recorded as one, since a hook must not raise
            self._failure = GroupFailed(f"reducing step {self._step} failed: {e!r}", local=True)
            self._failure.__cause__ = e

    def _launch_ready(self) -> None:
        while len(self._pending) < len(self._buckets) and self._overlap.ready(len(self._pending)):
            if self._pending and not self._gate_open():
                return
            self._launch(self._buckets[len(self._pending)])

    def _gate_open(self) -> bool:
        """Whether bucket 0 has been reduced, so that the last entry may be overwritten."""
        if len(self._pending) > 1:
            return True
        if not self._pending[0].done():
            return False
        self._pending[0].wait(0.0)
        return True

    def _launch_rest(self, ready: int, until: float) -> None:
        if not self._pending:
            self._launch(self._buckets[0])
        if len(self._pending) == 1:
            self._pending[0].wait(max(0.0, until - time.monotonic()))
        for bucket in self._buckets[len(self._pending) :]:
            self._launch(bucket)
        self._launch_extras(ready)
        for position, reduction in enumerate(self._pending):
            reduction.wait(max(0.0, until - time.monotonic()))
            if position < len(self._buckets):
                self._copies.take(self._buckets[position])

    def _launch(self, bucket: Bucket) -> None:
        assert self._group is not None, "no group is attached"
        if bucket.index > 0:
            self._entry_whole = False
        with torch.no_grad():
            bucket.fill([self._local_gradient(i) for i in bucket.members])
        self._pending.append(self._group.all_reduce(bucket.flat))

    def _launch_extras(self, ready: int) -> None:
        assert self._group is not None and self._extras is not None
        self._entry_whole = False
        presence = [slot.parameter.grad is not None for slot in self._slots]
        part = Part(self._step, self._microbatches, presence, ready, self._again, self._placed, self._settings())
        pack(self._layout, part, self._contributions.of_slot(self._group.slot, self._summed), self._extras)
        self._pending.append(self._group.all_reduce(self._extras))

    def _local_gradient(self, i: int) -> torch.Tensor | None:
        gradient = self._slots[i].parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise TypeError(f"the gradient of {self._slots[i].name} is {gradient.layout}: it must be dense")
        self._placed[i] = encode(self._slots[i].name, gradient, self._slots[i].parameter)
        return local_tensor(gradient)

    def _finish(self) -> Outcome:
        assert self._group is not None
        self._pending = []
        outcome = self._read_extras(members=self._group.size)
        if outcome.kind == "again":
            who = "this group" if self._again else "another group"
            self._note(
                f"step {self._step}: a gradient of {who} came after its bucket was launched: all reduce again, "
                "without overlap for the next steps"
            )
            self._again = False
            self._overlap.forget()
        return outcome

    def _read_extras(self, members: int | None) -> Outcome:
        assert self._extras is not None
        total = unpack(self._layout, self._extras)
        kind: Literal["reduced", "again"] = "again" if total.again else "reduced"
        problem = check(total, self._step, self._total, members or total.members)
        outcome = Outcome(kind, total.ready, problem, total.user, total)
        self._outcome = outcome if kind == "reduced" else None
        return outcome

    def _clear_gradients(self) -> None:
        if not self._cleared:
            for slot in self._slots:
                slot.parameter.grad = None
            self._cleared = True

    def _check_training(self) -> None:
        if not self._microbatches or self._overlap.fired_in_step:
            return
        if self._overlap.expects_firings or all(slot.parameter.grad is None for slot in self._slots):
            raise NotTraining(
                f"step {self._step}: {len(self._microbatches)} microbatches were computed and no parameter got a "
                "gradient; was the manager given the parameters before fully_shard replaced them, or did an "
                "exception interrupt a backward pass?"
            )

    def _place(self, i: int, view: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Arrange that parameter `i` has `view` as its gradient, by a copy now or in the coming foreach copy."""
        assert self._outcome is not None
        parameter = self._slots[i].parameter
        if not self._outcome.total.presence[i]:
            parameter.grad = None
            return
        local = None if parameter.grad is None else local_tensor(parameter.grad)
        copy = self._copies.swap(i, local)
        if copy is None and local is not None:
            targets.append(local)
            sources.append(view)
        else:
            placements = decode(self._outcome.total.placed[i], parameter)
            parameter.grad = as_gradient(view.clone() if copy is None else copy, parameter, placements)

    def _give_up_buffer(self, position: int) -> None:
        if position < len(self._buckets):
            self._buckets[position].replace()
        elif self._extras is not None:
            self._extras = torch.zeros_like(self._extras)


def _once_each(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[Slot]:
    slots: dict[int, Slot] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            slots.setdefault(id(parameter), Slot(name, parameter))
    return list(slots.values())


def _ended(reduction: Reduction, until: float) -> bool:
    try:
        reduction.wait(max(0.0, until - time.monotonic()))
    except GroupFailed:
        return reduction.done()
    return True


def _invert(buckets: Sequence[Bucket], parameters: int) -> list[int]:
    bucket_of = [0] * parameters
    for bucket in buckets:
        for i in bucket.members:
            bucket_of[i] = bucket.index
    return bucket_of
