"""Replica groups in one process, for loaders: what a `Manager` is to them, and a job that deals, loses and takes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightkeeper.lighthouse.deal import deal, deal_rest
from lightkeeper.manager.settings import Settings
from lightkeeper.manager.within import Place


class Rank:
    """One rank's manager, as far as a loader knows it."""

    def __init__(self, place: Place, microbatches: int, seed: int = 0) -> None:
        self.place, self.steady_total, self.seed = place, microbatches, seed
        self.page = type("Page", (), {"step": 0})()
        self.settings = Settings()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.befores: dict[str, Callable[[int, int], Any]] = {}
        self.registered: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.watchers: list[Any] = []
        self.share: Sequence[int] = ()

    def total(self, step: int) -> int:
        return self.steady_total

    def extra(self, name: str, shape: Sequence[int] = (), dtype: Any = None, before: Any = None) -> None:
        if before is None:
            self.shapes[name] = tuple(shape)
        else:
            self.befores[name] = before

    def register(self, name: str, obj: torch.Tensor) -> None:
        self.registered[name] = obj

    def watch(self, watcher: Any) -> None:
        self.watchers.append(watcher)

    def contribute(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = self.sums.get(name, torch.zeros(self.shapes[name], dtype=torch.int64)) + value

    def expected_share(self, step: int) -> tuple[int, ...]:
        return tuple(self.share)

    def feared_share(self) -> tuple[int, ...]:
        return ()


@dataclass
class Step:
    """As the trainer's loop sees it."""

    index: int
    before: Mapping[str, Any]
    live: bool = True


@dataclass
class Group:
    """Its ranks, and the loader of each."""

    ranks: list[Rank]
    loaders: list[Any]


class Job:
    """Groups whose loaders are built and bound as by the trainer.

    Args:
        build: given (places, place), a loader that is not bound yet.
        microbatches: of a step.
        places: ranks of a group.
        groups: at the start.
    """

    def __init__(self, build: Callable[[int, int], Any], microbatches: int, places: int, groups: int) -> None:
        self._build, self.microbatches, self.places = build, microbatches, places
        self.members: dict[str, Group] = {}
        self.step, self.born = 0, 0
        self.read: dict[tuple[int, int, int], Any] = {}
        self.tokens: list[int] = []
        for _ in range(groups):
            self.join()

    def join(self, healed: bool = False) -> Group:
        ranks = [Rank(Place(index, self.places), self.microbatches) for index in range(self.places)]
        loaders = [self._build(self.places, rank.place.index) for rank in ranks]
        for rank, loader in zip(ranks, loaders, strict=True):
            loader.bind(rank)
            rank.page.step = self.step
        if healed:
            donor = next(iter(self.members.values()))
            for rank, other in zip(ranks, donor.ranks, strict=True):
                for name, tensor in other.registered.items():
                    rank.registered[name].copy_(tensor)
        group = self.members[f"g{self.born}"] = Group(ranks, loaders)
        self.born += 1
        return group

    def take_step(self, lost: Mapping[str, int] | None = None) -> bool:
        """One step; groups in `lost` die when they have read so many of their microbatches (0: all were counted).

        Returns:
            False if the data ends before it.
        """
        index, lost = self.step, lost or {}
        held = dict(zip(self.members, deal(self.microbatches, [1] * len(self.members)), strict=True))
        before = {"tokens": 0, "data ended": 0}
        for name, group in self.members.items():
            for rank, loader in zip(group.ranks, group.loaders, strict=True):
                rank.share = held[name]
                for k in held[name]:
                    before["tokens"] += loader.tokens(index, k)
                    before["data ended"] += rank.befores["data ended"](index, k)
                for watcher in rank.watchers:
                    watcher.begins(index)
        ended = [loader.ended(Step(index, before)) for g in self.members.values() for loader in g.loaders]
        assert len(set(ended)) == 1, "all alike"
        if ended[0]:
            return False
        self.tokens.append(before["tokens"])
        taken: dict[str, dict[tuple[int, int], Any]] = {name: {} for name in self.members}
        for name in self.members:
            self._read(name, held[name][: lost.get(name)], taken)
        for name in lost:
            del self.members[name], taken[name]
        if lost:
            kept = {name: held[name] for name in self.members}
            held = deal_rest(self.microbatches, kept, list(self.members))
            for name in self.members:
                self._read(name, [k for k in held[name] if (k, 0) not in taken[name]], taken)
        self._commit(taken)
        return True

    def _read(self, name: str, share: Sequence[int], taken: dict[str, dict[tuple[int, int], Any]]) -> None:
        for rank, loader in zip(self.members[name].ranks, self.members[name].loaders, strict=True):
            for k in share:
                taken[name][k, rank.place.index] = loader.batch(self.step, k)
                assert loader.reading_s() >= 0.0

    def _commit(self, taken: dict[str, dict[tuple[int, int], Any]]) -> None:
        for batches in taken.values():
            for (k, place), batch in batches.items():
                assert (self.step, k, place) not in self.read, "read twice"
                self.read[self.step, k, place] = batch
        ranks = [rank for group in self.members.values() for rank in group.ranks]
        reduced = {
            name: sum((r.sums[name] for r in ranks if name in r.sums), torch.zeros(shape, dtype=torch.int64))
            for name, shape in ranks[0].shapes.items()
        }
        for rank in ranks:
            for watcher in rank.watchers:
                watcher.committed(self.step, reduced)
            rank.sums = {}
            rank.page.step = self.step + 1
        self.step += 1
