"""An epoch as one rank sees it, made from the membership and what `Activate` says."""

from __future__ import annotations

from lightkeeper.lighthouse.messages import Activate
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager.local import Adopt, Plan


def plan_for(
    membership: Membership,
    group: str,
    step: int,
    share: tuple[int, ...],
    total: int,
    activate: Activate | None = None,
    rank: int = 0,
    planned: bool = False,
) -> Plan:
    """The plan of rank `rank` of `group`.

    Args:
        membership: the epoch's members.
        group: the group whose rank it is.
        step: the group's next step.
        share: its microbatches of that step.
        total: all microbatches of that step.
        activate: the recovery's result; None for a planned change.
        rank: the rank's index in the group.
        planned: whether the entries activate the epoch.
    """
    slot = membership.slot_of(group)
    assert slot is not None
    adopt = None
    donors = {} if activate is None else {donor.group: donor.donor for donor in activate.donors}
    if activate is not None and group in donors:
        entry = activate.entry
        assert entry is not None and entry.step == step
        donor = membership.members[membership.groups.index(donors[group])]
        term = entry.epoch.term
        adopt = Adopt(
            epoch=entry.epoch.number, term=term.number, lighthouse=term.lighthouse, step=entry.step,
            donor=donor.group, address=donor.ranks[rank],
        )  # fmt: skip
    return Plan(
        epoch=membership.epoch.number,
        term=membership.epoch.term.number,
        lighthouse=membership.epoch.term.lighthouse,
        members=membership.groups,
        slot=slot,
        step=step,
        share=share,
        total=total,
        adopt=adopt,
        cause="" if activate is None else activate.cause,
        planned=planned,
        speeds=membership.speeds,
    )
