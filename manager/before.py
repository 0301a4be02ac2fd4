"""Extras that are reduced when a step starts, because its first backward pass needs them: such as the number of tokens
that the loss is divided by.

Every microbatch has a place of its own in the vector that is reduced, and the parts are added up in the order of the
microbatches. So the value does not depend on who counted what. The reduce may complete on some members and not on
others; it is repeated in every epoch that does the step, and there a member that has the value gives it to the others:
somebody may have computed with it already. Only if nobody is left who has it are the parts counted and added up anew.
A value is made only in an epoch of whose members none has one, so all who have one have the same.

In a group of several ranks each counts its part of a microbatch, reduces with the same rank of the other groups, and
then the ranks add up what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from lightkeeper.errors import UsageError
from lightkeeper.manager.extras import Declared, ExtrasLayout, Values, check_exact, exact
from lightkeeper.manager.groups import EpochGroup
from lightkeeper.manager.within import Within

Part: TypeAlias = Callable[[int, int], "torch.Tensor | float"]
"""What one microbatch adds to an extra: a function of step and microbatch, alike in all groups."""

ELEMENTS_MAX = 1 << 20  # of the vector: 8 MiB
NOT_YET = -1


class CountedWrongly(RuntimeError):
    """A microbatch was counted by several members or by none: a bug."""


class BeforeExtras:
    """The before extras of one rank, and what they are in the step at hand.

    Args:
        layout: where they are declared as well.
    """

    def __init__(self, layout: ExtrasLayout) -> None:
        self._layout = layout
        self._parts_of: dict[str, Part] = {}
        self._step = self._epoch = NOT_YET
        self._parts: dict[int, torch.Tensor] = {}  # by microbatch, all extras one after the other
        self._across: torch.Tensor | None = None  # what this rank's parts, and its peers' in other groups, come to
        self._value: torch.Tensor | None = None  # what all ranks' parts come to

    def declare(self, name: str, shape: Sequence[int], dtype: torch.dtype, part: Part) -> None:
        """Add one, as `ExtrasLayout.declare`."""
        self._layout.declare(name, shape, dtype, "before")
        self._parts_of[name] = part

    def begin(self, step: int) -> None:
        """A step begins: nothing is known of it."""
        self._step, self._epoch, self._across, self._value = step, NOT_YET, None, None
        self._parts.clear()

    def due(self, step: int, epoch: int) -> bool:
        """Whether this rank has yet to reduce them for `step` with the members of `epoch`."""
        return bool(self._parts_of) and self._step == step and self._epoch != epoch

    def count(self, share: Sequence[int], seed: Callable[[int], None]) -> None:
        """Count this rank's part of these microbatches, unless it is known what all of them come to.

        Args:
            share: This rank's microbatches of the step.
            seed: Sets the random state of a microbatch.
        """
        for k in share if self._across is None else ():
            if k not in self._parts:
                seed(k)
                self._parts[k] = torch.cat([self._counted(extra, k) for extra in self._extras])

    def reduce(self, group: EpochGroup, epoch: int, total: int, timeout_s: float, device: torch.device) -> None:
        """Reduce this rank's parts with the same rank of all members of an epoch.

        Args:
            group: The epoch's group.
            epoch: Its number.
            total: Number of microbatches of the step.
            timeout_s: Bound on the wait, in seconds.
            device: Where the group reduces.

        Raises:
            GroupFailed: The group cannot finish.
            CountedWrongly: The microbatches were not counted once each.
        """
        held, table = self._places(group.size, total)
        if self._across is not None:
            held[group.slot, 0], held[group.slot, 1:] = 1.0, self._across
        else:
            for k, part in self._parts.items():
                table[k, 0], table[k, 1:] = 1.0, part
        vector = torch.cat([held.reshape(-1), table.reshape(-1)]).to(device)
        group.all_reduce(vector).wait(timeout_s)
        reduced = vector.cpu()
        held, table = reduced[: held.numel()].view_as(held), reduced[held.numel() :].view_as(table)
        having = [row[1:] for row in held if row[0] == 1.0]
        self._across = having[0].clone() if having else self._summed(table)
        self._epoch = epoch

    def reduced(self, step: int, epoch: int) -> bool:
        """Whether this rank has reduced them for `step` with the members of `epoch`."""
        return bool(self._parts_of) and (self._step, self._epoch) == (step, epoch)

    def add_up(self, within: Within) -> None:
        """Add up what the ranks of this group have reduced; once all of them have.

        Args:
            within: They.

        Raises:
            Apart: Another rank is gone.
            OverflowError: An int64 extra at or above 2**53.
        """
        assert self._across is not None
        value = within.folded(self._across)
        for extra, one in self._by_extra(value):
            check_exact(extra, one)
        self._value = value

    @property
    def values(self) -> Mapping[str, torch.Tensor] | None:
        """Name to value, in the declared shape and dtype; None before they were reduced."""
        if self._value is None:
            return None
        by_extra = self._by_extra(self._value)
        return Values({e.name: one.to(e.dtype, copy=True).reshape(e.shape) for e, one in by_extra})

    @property
    def names(self) -> tuple[str, ...]:
        """What was declared."""
        return tuple(self._parts_of)

    # --- inside ---

    @property
    def _extras(self) -> list[Declared]:
        return [self._layout.declared[name] for name in self._parts_of]

    def _by_extra(self, value: torch.Tensor) -> list[tuple[Declared, torch.Tensor]]:
        extras = self._extras
        return list(zip(extras, value.split([extra.numel for extra in extras]), strict=True))

    def _counted(self, extra: Declared, k: int) -> torch.Tensor:
        value = exact(extra, self._parts_of[extra.name](self._step, k))
        check_exact(extra, value)
        return value.reshape(-1).to(torch.float64)

    def _places(self, members: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row for each member that has the value and one for each microbatch, each with a flag before it."""
        width = 1 + sum(extra.numel for extra in self._extras)
        if (members + total) * width > ELEMENTS_MAX:
            raise UsageError(
                f"the before extras {', '.join(self._parts_of)} have {width - 1} elements, too many for {total} "
                f"microbatches and {members} groups: (groups + microbatches) * (elements + 1) is at most {ELEMENTS_MAX}"
            )
        return torch.zeros(members, width, dtype=torch.float64), torch.zeros(total, width, dtype=torch.float64)

    def _summed(self, table: torch.Tensor) -> torch.Tensor:
        wrong = [k for k, flag in enumerate(table[:, 0].tolist()) if flag != 1.0]
        if wrong:
            times = int(table[wrong[0], 0])
            raise CountedWrongly(f"step {self._step}: microbatch {wrong[0]} was counted {times} times for its extras")
        value = table[0, 1:].clone()
        for row in table[1:, 1:]:
            value += row
        return value
