"""What a rank tells whoever reads data for it: what it will probably be dealt, and what was committed.

As a cook who lays out what the next orders are likely to need: what is laid out in vain costs a moment, and an order is
never refused because it was not foreseen. So guesses may be wrong; only `Watcher.committed` is a fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch

from lightkeeper.lighthouse.deal import deal, deal_rest
from lightkeeper.lighthouse.names import EVEN
from lightkeeper.manager import local


class Watcher:
    """Told by `Manager.watch`; what is not overridden is ignored."""

    def healed(self) -> None:
        """The state here was replaced by the members': a step that was begun is void; on the training thread."""

    def begins(self, index: int) -> None:
        """A step begins and its share is known; on the training thread."""

    def dealt(self) -> None:
        """Further microbatches of the step in progress were dealt to this group; on the training thread."""

    def feared(self) -> None:
        """A peer is suspected: `Manager.feared_share` says what may fall to this group; on any thread, so be quick."""

    def committed(self, index: int, reduced: Mapping[str, torch.Tensor]) -> None:
        """The entry of a step, computed here or by others alone, is about to be applied; on the training thread."""

    def applied(self, index: int) -> None:
        """The body of the loop has ended: the state has this step behind it; on the training thread."""

    def closing(self) -> None:
        """All steps are done, and the run is about to be closed, perhaps for another time; on the training thread."""

    def closed(self) -> None:
        """What this group holds is final: the run was closed, or the group leaves; on the training thread."""

    def keeps(self, reason: str) -> None:
        """The job ends here, and this group alone is to save its last committed state before it exits; on the training
        thread.
        """


def probable_share(plan: local.Plan, total: int) -> tuple[int, ...]:
    """What this group is dealt in a step of `total` microbatches while the plan's epoch is in force."""
    return deal(total, _speeds(plan))[plan.slot]


def feared_share(plan: local.Plan, total: int, held: Sequence[int], gone: Sequence[str]) -> tuple[int, ...]:
    """What else falls to this group if others are lost during a step.

    Args:
        plan: the epoch in which they are lost.
        total: microbatches of the step.
        held: those of the step that this group has already.
        gone: members that are suspected, together; if empty, each other member by itself.

    Returns:
        Microbatches, the most probable first.
    """
    me, speeds = plan.members[plan.slot], _speeds(plan)
    mine = [k for k in held if 0 <= k < total]
    shares = {
        m: [k for k in share if k not in mine] for m, share in zip(plan.members, deal(total, speeds), strict=True)
    }
    shares[me] = mine
    others = [member for member in plan.members if member != me]
    suspected = [member for member in gone if member in others]
    cases = [suspected] if suspected else [[member] for member in others]
    found = []
    for lost in cases:
        stay = [(m, speed) for m, speed in zip(plan.members, speeds, strict=True) if m not in lost]
        names = [name for name, _ in stay]
        found.append(deal_rest(total, {m: shares[m] for m in names}, names, [s for _, s in stay])[me][len(mine) :])
    return tuple(dict.fromkeys(k for ks in zip_longest(*found) for k in ks if k is not None))


def _speeds(plan: local.Plan) -> tuple[int, ...]:
    return plan.speeds or (EVEN,) * len(plan.members)
