"""Which batches are read ahead, in which order, and which of them are dropped: a pure machine, no processes.

As a waiter's tray: it holds so many glasses and no more, what is asked for now goes to the front, and what nobody will
drink any more is put back. A batch has a key, (step, microbatch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = tuple[int, int]
T = TypeVar("T")

DEATHS_MAX = 3  # over one batch; and of each worker, as many as there are, without any batch between


@dataclass
class Ahead(Generic[T]):
    """Batches that are there, being made, and wished for.

    Attributes:
        limit: batches that are there or being made, at most; one more while the training loop waits for one that was
            not foreseen, and besides those that it no longer waits for, until their workers are done with them.
        workers: how many there are.
        wishes: what will be wanted, the most urgent first.
        ready: what is there.
        at_work: worker to the batch that it makes.
        demanded: what the training loop waits for now.
    """

    limit: int
    workers: int = 1
    wishes: list[Key] = field(default_factory=list)
    ready: dict[Key, T] = field(default_factory=dict)
    at_work: dict[int, Key] = field(default_factory=dict)
    demanded: Key | None = None
    _deaths_over: dict[Key, int] = field(default_factory=dict)
    _deaths_in_a_row: int = 0

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"prefetch must be at least 1, got {self.limit}")

    def expect(self, wishes: Sequence[Key]) -> list[Key]:
        """What will be wanted from now on, the most urgent first; returns what was there in vain and is dropped.

        What a worker makes in vain is dropped when it comes: nobody is interrupted.
        """
        self.wishes = list(dict.fromkeys(wishes))[: self.limit]
        wanted = {*self.wishes, self.demanded}
        dropped = [key for key in self.ready if key not in wanted]
        for key in dropped:
            del self.ready[key]
        return dropped

    def demand(self, key: Key) -> None:
        """The training loop waits for this batch, and no longer for another one."""
        if self.demanded is not None and self.demanded != key and self.demanded not in self.wishes:
            self.ready.pop(self.demanded, None)
        self.demanded = key

    def take(self, key: Key) -> T | None:
        """The batch, which is forgotten here; None if it is not there yet."""
        found = self.ready.pop(key, None)
        if found is None:
            return None
        self.demanded = None
        self.wishes = [wish for wish in self.wishes if wish != key]
        return found

    def next_for(self, worker: int) -> Key | None:
        """What an idle worker is to make now, if anything."""
        assert worker not in self.at_work, f"worker {worker} makes {self.at_work[worker]} still"
        there = {*self.ready, *self.at_work.values()}
        urgent = self.demanded
        if urgent is not None and urgent not in there:
            self.at_work[worker] = urgent
            return urgent
        if len(self.ready) + len(self.at_work) >= self.limit:
            return None
        for key in self.wishes:
            if key not in there:
                self.at_work[worker] = key
                return key
        return None

    def arrived(self, worker: int, batch: T) -> bool:
        """A worker has made its batch; returns whether it is kept."""
        key = self.at_work.pop(worker)
        self._deaths_in_a_row = 0
        if key != self.demanded and key not in self.wishes:
            return False
        self.ready[key] = batch
        return True

    def died(self, worker: int) -> tuple[Key | None, bool]:
        """A worker has died.

        Returns:
            What it was making, to be made anew if it is still wanted; and whether this happens too often to go on.
        """
        key = self.at_work.pop(worker, None)
        self._deaths_in_a_row += 1
        over = 0
        if key is not None:
            over = self._deaths_over[key] = self._deaths_over.get(key, 0) + 1
            while len(self._deaths_over) > self.limit:
                self._deaths_over.pop(next(iter(self._deaths_over)))
        return key, over >= DEATHS_MAX or self._deaths_in_a_row >= DEATHS_MAX * self.workers
