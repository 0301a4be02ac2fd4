"""How this rank was started, where `lightkeeper launch` did not: what torchrun, srun or a script of one's own says.

Any of these gives its ranks RANK and WORLD_SIZE, most also say which ranks share a node. What they do not say is that
they are gone: torchrun's ranks outlive it if it is killed, without the store over which they met, and would hold the
group's name against the one that is started next. So a rank of torchrun's ends with it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightkeeper.errors import UsageError
from lightkeeper.manager import exits
from lightkeeper.manager.processes import die_with_parent
from lightkeeper.manager.settings import PREFIX, Settings
from lightkeeper.words import counted, say

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_TOLD_BY = {"ranks": "WORLD_SIZE", "nnodes": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK"}


@dataclass(frozen=True)
class Launched:
    """What a launcher says of this rank and its group.

    Attributes:
        rank: index in the group.
        ranks: their number.
        nnodes: nodes that they run on, as many on each.
        node_rank: which of them this is.
    """

    rank: int = 0
    ranks: int = 1
    nnodes: int = 1
    node_rank: int = 0

    @property
    def node_leader(self) -> int:
        """The first rank of this node."""
        return self.node_rank * (self.ranks // self.nnodes)

    @property
    def node_followers(self) -> range:
        """The other ranks of this node."""
        return range(self.node_leader + 1, self.node_leader + self.ranks // self.nnodes)


def read_launched(environment: Mapping[str, str], process_group: tuple[int, int] | None = None) -> Launched:
    """What the environment, or torch's default process group, says; one rank alone if neither says anything.

    Args:
        environment: variables of this process.
        process_group: rank and size of the default process group, if there is one.

    Raises:
        UsageError: the two contradict each other, or one of them itself.
    """
    rank, ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if process_group is not None:
        for name, said, is_so in (("RANK", rank, process_group[0]), ("WORLD_SIZE", ranks, process_group[1])):
            if said not in (None, is_so):
                raise UsageError(f"{name} is {said}, and in torch's default process group it is {is_so}")
        rank, ranks = process_group
    rank, ranks = rank or 0, 1 if ranks is None else ranks
    if not 0 <= rank < ranks:
        raise UsageError(f"RANK is {rank}, and WORLD_SIZE {ranks}: 0 <= RANK < WORLD_SIZE must hold")
    per_node = _number(environment, "LOCAL_WORLD_SIZE") or ranks
    if per_node < 1 or ranks % per_node:
        raise UsageError(f"LOCAL_WORLD_SIZE is {per_node}, and WORLD_SIZE {ranks}: each node has as many ranks")
    launched = Launched(rank, ranks, ranks // per_node, rank // per_node)
    for name, is_so in (("GROUP_RANK", launched.node_rank), ("LOCAL_RANK", rank % per_node)):
        if (said := _number(environment, name)) not in (None, is_so):
            raise UsageError(
                f"{name} is {said}, but rank {rank} with {counted(per_node, 'rank')} on a node (LOCAL_WORLD_SIZE) has "
                f"{is_so}: ranks count node by node"
            )
    return launched


def settings_of(settings: Settings, launched: Launched, environment: Mapping[str, str]) -> Settings:
    """The group's settings with its launcher's word on ranks and nodes.

    Args:
        settings: what the group was told.
        launched: what its launcher says.
        environment: from which the settings were read.

    Raises:
        UsageError: the group was told otherwise.
    """
    found = {name: getattr(launched, name) for name in _TOLD_BY}
    for field in dataclasses.fields(Settings):
        told = getattr(settings, field.name)
        given = told != field.default or PREFIX + field.name.upper() in environment
        if field.name in found and given and told != found[field.name]:
            raise UsageError(
                f"{field.name} is {told} ({PREFIX}{field.name.upper()}), and what started this rank makes it "
                f"{found[field.name]} ({_TOLD_BY[field.name]}): leave it out, or use `lightkeeper launch`"
            )
    return dataclasses.replace(settings, **found)


def end_with_torchrun(environment: Mapping[str, str]) -> int | None:
    """From now on this rank is killed when torchrun ends, if that started it.

    Returns:
        torchrun's pid; None if this rank was started by something else, which may well end before it.
    """
    if TORCHRUN_VARIABLE not in environment:
        return None
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        say(f"lightkeeper: torchrun (pid {parent}) is gone; this rank ends with it")
        os._exit(exits.ORPHANED)
    return parent


def _number(environment: Mapping[str, str], name: str) -> int | None:
    raw = environment.get(name)
    if raw is None:
        return None
    try:
        return int(raw)
    except ValueError as error:
        raise UsageError(f"{name}={raw!r} is not a number") from error
