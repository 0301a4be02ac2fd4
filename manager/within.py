"""The ranks of one replica group among themselves: who computes which part of a microbatch, and their common sums.

The gradients of a group's ranks are summed by the user's own parallelism. What is left for the runtime are the extras:
each rank contributes what it saw, and an entry holds the sum over all of them. For that the ranks have a gloo group of
the manager's own, over rendezvous keys that never leave their manager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.manager.extras import ExtrasLayout, check_exact
from lightkeeper.manager.groups import Alone, EpochGroup, GroupFailed, KeyValue, start_build
from lightkeeper.manager.progress import OWN
from lightkeeper.manager.shown import ShownGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Place:
    """Which part of every microbatch a rank computes: part `index` of `count`."""

    index: int
    count: int


class Apart(ToldError):
    """This rank lost its connection to the other ranks of its group, most likely because one of them is gone."""


class NotTogether(GroupFailed):
    """Another rank of this group cannot go on in an epoch, or knows a newer one."""


def place_of(given: tuple[int, int] | DeviceMesh | None, rank: int, ranks: int) -> Place:
    """The rank's place.

    Args:
        given: As of `Manager`.
        rank: Index of the rank in its group.
        ranks: How many there are.

    Raises:
        UsageError: it cannot be right.
    """
    if given is None:
        return Place(rank, ranks)
    if isinstance(given, tuple):
        place = Place(*given)
    else:
        coordinate = given.get_coordinate()
        if coordinate is None:
            raise UsageError(f"place: rank {rank} is not in the mesh {given}")
        index = 0
        for at, size in zip(coordinate, given.shape, strict=True):
            index = index * size + at
        place = Place(index, given.size())
    if not 0 <= place.index < place.count <= ranks:
        raise UsageError(f"place {place.index} of {place.count}: 0 <= index < count <= ranks ({ranks}) must hold")
    return place


class Within:
    """What this rank shares with the other ranks of its group.

    Args:
        place: This rank's; None for the only rank.
        group: The ranks of this group, slot by slot; None if there is only one.
        timeout_s: Bound on every exchange, in seconds.

    Raises:
        UsageError: the ranks' places do not fit together.
        Apart: a rank is gone.
    """

    def __init__(self, place: Place | None = None, group: EpochGroup | None = None, timeout_s: float = 60.0) -> None:
        self.place = place = place or Place(0, 1)
        self._group = Alone() if group is None else group
        self._timeout_s = timeout_s
        places = [Place(*one.tolist()) for one in self._gather(torch.tensor([place.index, place.count]))]
        if len({one.count for one in places}) > 1 or {one.index for one in places} != set(range(place.count)):
            told = ", ".join(f"rank {rank}: {one.index} of {one.count}" for rank, one in enumerate(places))
            raise UsageError(f"the places of this group's ranks do not cover a microbatch ({told})")
        self._speaks = places.index(place) == self._group.slot  # for all ranks of its place, which saw the same

    def most(self, number: int) -> int:
        """The highest of the ranks' numbers.

        Raises:
            Apart: a rank is gone.
        """
        return max(int(one) for one in self._gather(torch.tensor(number)))

    def together(self, epoch: int, well: bool) -> bool:
        """Whether all ranks of the group may go on in an epoch; before any of them computes anything in it.

        One rank may be told of the epoch while another's connections in it break, or be told of a later one. If the
        first computed meanwhile, with the collectives of the group's own, the second would meet it there with another
        microbatch. So all ranks come here once for every epoch that they are told of, and wait for each other.

        Args:
            epoch: Its number, as this rank was told.
            well: Whether this rank could go on in it.

        Raises:
            Apart: a rank is gone, or does not come in time.
        """
        while True:
            told = [one.tolist() for one in self._gather(torch.tensor([epoch, int(well)]))]
            newest = max(number for number, _ in told)
            if epoch < newest or not all(fine for number, fine in told if number == newest):
                return False
            if all(number == newest for number, _ in told):
                return True

    def sum(
        self, layout: ExtrasLayout, sums: Mapping[str, torch.Tensor], agreed: Mapping[str, torch.Tensor] | None = None
    ) -> Mapping[str, torch.Tensor]:
        """The extras summed over the places of the group, and rank 0's agreed ones; every rank calls it equally often.

        Args:
            layout: Which extras there are.
            sums: What this rank contributes; one that is missing counts as zero.
            agreed: What this rank gives of agreed ones.

        Raises:
            Apart: a rank is gone, or does not come in time.
            OverflowError: an int64 extra at or above 2**53.
        """
        agreed = agreed or {}
        summed = [extra for extra in layout.declared.values() if extra.kind != "before"]
        if self._group.size == 1 or not summed:
            return {**sums, **agreed}
        vector = torch.zeros(layout.user_numel, dtype=torch.float64)
        cut = {extra.name: vector[extra.offset : extra.offset + extra.numel] for extra in summed}
        for name, value in sums.items() if self._speaks else ():
            check_exact(layout.declared[name], value)
            cut[name].copy_(value.reshape(-1))
        given = {e.name: vector[e.offset + e.numel] for e in summed if e.kind == "agreed"}  # a flag after each
        for name, value in agreed.items() if self._group.slot == 0 else ():
            check_exact(layout.declared[name], value)
            cut[name].copy_(value.reshape(-1))
            given[name].fill_(1.0)
        try:
            self._group.all_reduce(vector).wait(self._timeout_s)
        except GroupFailed as error:
            raise _apart(error) from error
        return {
            name: part.reshape(layout.declared[name].shape)
            for name, part in cut.items()
            if name not in given or given[name] == 1.0
        }

    def folded(self, part: torch.Tensor) -> torch.Tensor:
        """The places' parts added up in the order of the ranks; every rank calls it equally often.

        Args:
            part: This rank's, float64, of one dimension, as long as the others'.

        Raises:
            Apart: a rank is gone, or does not come in time.
        """
        told = self._gather(torch.cat([torch.tensor([float(self._speaks)], dtype=torch.float64), part]))
        parts = [one[1:] for one in told if one[0] == 1.0]
        total = parts[0].clone()
        for more in parts[1:]:
            total += more
        return total

    def show(self, waiting: Callable[[int], AbstractContextManager[None]]) -> None:
        """Shows from now on, as `ProgressPage.waiting` does, when this rank waits for the others of its group."""
        self._group = ShownGroup(self._group, waiting, OWN)

    def close(self) -> None:
        """Lets go of the connections."""
        self._group.close()

    def _gather(self, number: torch.Tensor) -> list[torch.Tensor]:
        try:
            return self._group.all_gather(number, self._timeout_s)
        except GroupFailed as error:
            raise _apart(error) from error


def form_within(place: Place, keys: KeyValue, rank: int, ranks: int, host: str, timeout_s: float) -> Within:
    """Connects the ranks of a group; blocks until all are there.

    Args:
        place: This rank's.
        keys: Rendezvous keys of this group.
        rank: Index of this rank in it.
        ranks: Their number.
        host: Address at which the other ranks reach this node.
        timeout_s: Bound on this and on every later exchange, in seconds.

    Raises:
        UsageError: the ranks' places do not fit together.
        Apart: they do not come together.
    """
    if ranks == 1:
        return Within(place)
    build = start_build("gloo", keys, rank, ranks, timeout_s, "the group's ranks", host=host)
    try:
        return Within(place, build.wait(), timeout_s)
    except GroupFailed as error:
        raise _apart(error) from error


def _apart(error: GroupFailed) -> Apart:
    gone = "".join(f", rank {slot} is gone" for slot in error.suspects)
    return Apart(f"the ranks of this group are apart{gone}: {error}")
