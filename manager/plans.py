"""An epoch as one rank sees it, made from the membership and what `Activate` says."""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.lighthouse.messages import Activate
from lightkeeper.lighthouse.names import Membership
from lightkeeper.manager.local import Adopt, Plan

NAMED_MAX = 8  # in a line that every member writes


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


def change_in_words(known: Membership, planned: Membership, step: int, why: str = "") -> str:
    """Who came, left or was promoted by a planned change, in one line; empty if nobody did.

    Args:
        known: the epoch before it.
        planned: the epoch that is in force now.
        step: its first step.
        why: those who left did.
    """
    left = [name for name in known.groups if planned.slot_of(name) is None]
    came = [name for name in planned.groups if known.slot_of(name) is None and name not in planned.spares]
    stood = [name for name in known.spares if planned.slot_of(name) is not None and name not in planned.spares]
    idle = [name for name in planned.spares if name not in known.spares]
    said = [f"{_few(left)} left before step {step}{f' ({why})' if why else ''}"] if left else []
    for names, what in ((came, "a member"), (stood, "no spare any more"), (idle, "a spare")):
        if names:
            said.append(f"{_few(names)} {'is' if len(names) == 1 else 'are each'} {what} from step {step} on")
    return f"{'; '.join(said)}; going on with {_few(planned.groups)} (epoch {planned.epoch.number})" if said else ""


def _few(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
