"""`ShareLoader`: batches of a map-style data set by (step, microbatch), read ahead by worker processes."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import default_collate

from lightkeeper.data.ahead import DEATHS_MAX, Ahead, Key
from lightkeeper.data.making import Collate, Failure, Made, Recipe, Task, describe, failure_of, random_state_kept
from lightkeeper.data.sampler import DealtSampler, Schedule
from lightkeeper.data.workers import Workers
from lightkeeper.errors import ToldError, UsageError, UserCodeError
from lightkeeper.manager.exits import describe_exit
from lightkeeper.manager.watch import Watcher
from lightkeeper.words import article, say

if TYPE_CHECKING:
    from lightkeeper.manager.step import Step
    from lightkeeper.manager.trainer import Manager

SAY_EVERY_S = 10.0
STALL_S = 600.0  # that a batch may take without a manager; with one, as long as any phase of a rank
CONTEXTS = ("fork", "forkserver", "spawn")


class SampleError(UserCodeError):
    """The data set (or `collate`, or `worker_init`) raised; the message has its traceback.

    Attributes:
        index: of the sample in the data set; None if it was not one sample's fault.
        step: of the batch.
        k: microbatch of the batch.
        kind: class of the exception.
    """

    def __init__(self, failure: Failure, task: Task) -> None:
        what = "a batch" if failure.index is None else f"sample {failure.index} of the data set"
        super().__init__(f"{what} failed, for {describe(task)}: {failure.kind}: {failure.message}\n\n{failure.trace}")
        self.index, self.step, self.k, self.kind = failure.index, task.step, task.k, failure.kind


class WorkerLost(ToldError):
    """Workers die again and again."""


class DataStalled(ToldError):
    """A batch did not come in time."""


class Sampler(Protocol):
    """Which samples a microbatch holds: a pure function, such as `DealtSampler`."""

    def __call__(self, step: int, k: int) -> Any:
        """Indices into the data set."""


class ShareLoader(Watcher):
    """Batches by (step, microbatch); the own share of the next steps is made ahead.

    Which microbatches will be wanted is known of this step and guessed of later ones; when a peer is suspected, what
    may fall to this group is made too. A wrong guess costs time, never correctness: a batch that was not foreseen is
    made when it is asked for, and is the same, since its samples and their random state depend on nothing but seed,
    step, microbatch and the sample's number in it.

    Args:
        dataset: map-style: ``dataset[index]``; ``dataset.__getitems__(indices)`` is used if there.
        sampler: gives the indices of a whole microbatch.
        manager: of the loop; without one all microbatches are expected (then the sampler must be a `DealtSampler`).
        collate: makes a batch of a list of samples; torch's `default_collate` if not given.
        workers: processes; 0 makes each batch in the training loop when it is asked for.
        prefetch: batches that are there or being made at any time, at most; at least the number of workers. Two a
            worker, and 8, if not given.
        part: (index, count): of each microbatch's samples the index-th of count equal parts, for ranks of a group that
            split a microbatch. The manager's `place` if not given; (0, 1) if the sampler splits already.
        seed: of the samples' random state; the manager's if not given.
        worker_init: called with the worker's number in each worker first; connections must be opened there, for workers
            keep no socket that was opened before.
        context: how workers are started: ``fork``, or ``forkserver`` or ``spawn`` for what does not survive a fork.
        pin_memory: batches are copied to page-locked memory; needs an accelerator.
        timeout_s: how long the loop waits for a batch; ten times the outage budget if not given.

    Raises:
        UsageError: for arguments that cannot be right.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler,
        manager: Manager | None = None,
        *,
        collate: Collate = default_collate,
        workers: int = 2,
        prefetch: int | None = None,
        part: tuple[int, int] | None = None,
        seed: int | None = None,
        worker_init: Callable[[int], None] | None = None,
        context: str = "fork",
        pin_memory: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        prefetch = max(8, 2 * workers) if prefetch is None else prefetch
        _check(workers, prefetch, context, pin_memory)
        _check_fits(dataset, sampler)
        self._manager, self._sampler = manager, sampler
        self._part = _part_of(part, sampler, manager)
        self._schedule = _schedule_of(sampler, manager)
        if seed is None:
            seed = manager.seed if manager is not None else getattr(sampler, "seed", 0)
        if timeout_s is None:
            timeout_s = STALL_S if manager is None else manager.settings.timeouts.first_step_s
        self._timeout_s, self._pin_memory = timeout_s, pin_memory
        self._recipe = Recipe(dataset, collate, seed, worker_init)
        self._ahead: Ahead[Made | Failure] = Ahead(prefetch, workers)
        self._changed = threading.Condition()
        self._own: list[Key] = []
        self._later: list[Key] = []
        self._taken: set[Key] = set()
        self._kept: dict[Key, Any] = {}
        self._at = -1
        self._given: dict[int, Task] = {}  # the newest of each worker
        self._idle: set[int] = set(range(workers))
        self._dead: set[int] = set()
        self._fatal = ""
        self._closed = False
        self.workers: Workers | None = None
        if workers:
            self.workers = Workers(self._recipe, workers, context, self._came, self._died)
            for number in range(workers):
                self.workers.start(number)
            atexit.register(self.close)
        if manager is not None:
            manager.watch(self)

    # ------------------------------------------------------------ what the loop calls

    def batch(self, step: int, k: int, keep: bool = False) -> Any:
        """Microbatch `k` of a step (this rank's part of it).

        Args:
            step: index of the step.
            k: index of the microbatch.
            keep: it will be asked for again in this step, and is not made anew for that: to count its tokens before the
                step, say.

        Raises:
            SampleError: if the data set raised.
            WorkerLost: if workers died over it again and again.
            DataStalled: if it did not come in time.
        """
        if self._closed:
            raise UsageError("the loader is closed")
        key = (step, k)
        batch = self._kept.pop(key) if key in self._kept else self._made(key)
        if keep:
            self._kept[key] = batch
        return batch

    def over(self, step: Step) -> Iterator[tuple[int, Any]]:
        """``for k, batch in loader.over(step)``: the microbatches of `step.microbatches()` with their batches.

        Raises:
            UsageError: if the sampler deals this step another number of microbatches than it has.
        """
        self._check_total(step.index, step.total)
        for k in step.microbatches():
            yield k, self.batch(step.index, k)

    def close(self) -> None:
        """Ends the workers; also at the end of the process."""
        if not self._closed and self.workers is not None:
            self._closed = True
            atexit.unregister(self.close)
            self.workers.close()
        self._closed = True

    def __enter__(self) -> ShareLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ what the manager tells

    def begins(self, index: int) -> None:
        """A step begins: the membership may have changed; and what was handed out before it is wanted again in it,
        unless it was to be kept.
        """
        if self._manager is not None:
            self._check_total(index, self._manager.total(index))
        self._kept = {key: batch for key, batch in self._kept.items() if key[0] == index}
        self._taken = set(self._kept)
        self._look_ahead(index)

    def dealt(self) -> None:
        """Microbatches of somebody who is gone were dealt to this group."""
        self._look_ahead(self._at)

    def feared(self) -> None:
        """What may fall to this group is made before what it will want later.

        In a thread of its own: the sampler is the user's, and a pipe may be full, and whoever calls this has to listen.
        """
        if self.workers is not None:
            threading.Thread(target=self._expect_anew, name="data feared", daemon=True).start()

    def _check_total(self, step: int, total: int) -> None:
        """A sampler that deals out more than is asked for leaves samples that nobody reads, without a word."""
        dealt = self._schedule.of(step) if isinstance(self._schedule, Schedule) else total
        if dealt != total:
            raise UsageError(
                f"step {step} has {total} microbatches, and the loader's sampler deals {dealt}: give DealtSampler and "
                "manager.steps the same `microbatches`, or samples are left out"
            )

    def _made(self, key: Key) -> Any:
        if self.workers is None:
            with random_state_kept():
                made = self._recipe.make(self._task(key))
        else:
            made = self._await(key)
            self._taken.add(key)
            self._look_ahead(*key)
        if isinstance(made, Failure):
            raise SampleError(made, self._task(key))
        return _pinned(made.batch) if self._pin_memory else made.batch

    # ------------------------------------------------------------ reading ahead

    def _look_ahead(self, step: int, k: int = -1) -> None:
        """What is wanted is worked out anew, on the training thread."""
        if self.workers is None:
            return
        if step != self._at:
            self._taken = {key for key in self._taken if key[0] == step}
        self._at = step
        own = [(step, other) for other in self._share(step, k) if (step, other) not in self._taken]
        later: list[Key] = []
        for ahead in range(step + 1, step + 1 + self._ahead.limit):
            if len(own) + len(later) >= self._ahead.limit:
                break
            later += [(ahead, other) for other in self._share(ahead)]
        with self._changed:
            self._own, self._later = own, later
            self._expect()

    def _share(self, step: int, after: int = -1) -> tuple[int, ...]:
        if self._manager is not None:
            return self._manager.expected_share(step)
        assert self._schedule is not None
        return tuple(range(after + 1, self._schedule.of(step)))

    def _expect_anew(self) -> None:
        with self._changed:
            if not self._closed:
                self._expect()

    def _expect(self) -> None:
        """With the lock: hands the wishes on, and work to the idle."""
        manager = self._manager
        feared = () if manager is None else tuple((self._at, k) for k in manager.feared_share())
        self._ahead.expect([*self._own, *(key for key in feared if key not in self._taken), *self._later])
        self._give()

    def _give(self) -> None:
        assert self.workers is not None
        for number in sorted(self._idle):
            key = self._ahead.next_for(number)
            if key is None:
                return
            try:
                task = self._task(key)
            except Exception as error:  # the sampler's: raised again where the batch is asked for
                self._ahead.arrived(number, failure_of(error))
                continue
            self._idle.discard(number)
            self._given[number] = task
            self.workers.give(number, task)

    def _task(self, key: Key) -> Task:
        indices = [int(index) for index in self._sampler(*key)]
        index, count = self._part
        if len(indices) % count:
            raise UsageError(f"{count} ranks cannot split a microbatch of {len(indices)} samples evenly")
        size = len(indices) // count
        return Task(*key, index * size, tuple(indices[index * size : (index + 1) * size]))

    def _await(self, key: Key) -> Made | Failure:
        assert self.workers is not None
        start = time.monotonic()
        say_at = start + SAY_EVERY_S
        with self._changed:
            self._ahead.demand(key)
            while True:
                self._revive()
                self._give()
                made = self._ahead.take(key)
                if made is not None:
                    return made
                if self._fatal:
                    raise WorkerLost(self._fatal)
                now = time.monotonic()
                if now - start > self._timeout_s:
                    raise DataStalled(f"{self._standing(key)} did not come within {self._timeout_s:g} s")
                if now >= say_at:
                    say_at = now + SAY_EVERY_S
                    say(f"lightkeeper: waiting for {self._standing(key)} since {now - start:.0f} s")
                self._changed.wait(min(say_at, start + self._timeout_s + 0.01) - now)

    def _standing(self, key: Key) -> str:
        makers = [number for number, made in self._ahead.at_work.items() if made == key]
        return f"{describe(self._task(key))}, {f'made by data worker {makers[0]}' if makers else 'not begun'}"

    # ------------------------------------------------------------ what the workers tell, in their threads

    def _came(self, number: int, made: Made | Failure) -> None:
        with self._changed:
            self._ahead.arrived(number, made)
            self._idle.add(number)
            self._give()
            self._changed.notify_all()

    def _died(self, number: int, pid: int, code: int | None) -> None:
        with self._changed:
            key, too_often = self._ahead.died(number)
            self._idle.discard(number)
            self._dead.add(number)
            doing = "while it had nothing to do" if key is None else f"while it made {describe(self._given[number])}"
            line = f"data worker {number} (pid {pid}) {describe_exit(code)} {doing}"
            if too_often:
                self._fatal = f"{line}; that is {DEATHS_MAX} deaths over one batch, or too many without a batch between"
            else:
                say(f"lightkeeper: {line}; another one takes its place")
            self._changed.notify_all()

    def _revive(self) -> None:
        """Starts workers anew; on the training thread, to which the kernel ties them."""
        assert self.workers is not None
        for number in () if self._fatal else sorted(self._dead):
            self.workers.start(number)
            self._idle.add(number)
        self._dead.clear()


def _check(workers: int, prefetch: int, context: str, pin_memory: bool) -> None:
    if workers < 0:
        raise UsageError(f"workers {workers}: 0 (none) or more")
    if prefetch < max(1, workers):
        raise UsageError(f"prefetch {prefetch}: at least 1 and the number of workers ({workers})")
    if context not in CONTEXTS:
        raise UsageError(f"context {context!r}: one of {', '.join(CONTEXTS)}")
    if pin_memory and not torch.accelerator.is_available():
        raise UsageError("pin_memory needs an accelerator, and torch sees none here")


def _check_fits(dataset: Any, sampler: Sampler) -> None:
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise UsageError(f"{article(type(dataset).__name__)} has no __getitem__: StreamLoader reads iterable sources")
    if not callable(sampler):
        raise UsageError(
            f"{article(type(sampler).__name__)} cannot be asked for (step, microbatch): give a DealtSampler"
        )
    if isinstance(sampler, DealtSampler) and hasattr(dataset, "__len__") and len(dataset) != sampler.n:
        raise UsageError(f"the sampler deals {sampler.n} samples, the data set has {len(dataset)}")


def _part_of(part: tuple[int, int] | None, sampler: Sampler, manager: Manager | None) -> tuple[int, int]:
    split = getattr(sampler, "world_size", 1)
    if part is None:
        part = (0, 1) if manager is None or split > 1 else (manager.place.index, manager.place.count)
    index, count = part
    if count < 1 or not 0 <= index < count:
        raise UsageError(f"part {part}: (index, count) with 0 <= index < count")
    if split > 1 and count > 1:
        raise UsageError(
            f"the sampler splits each microbatch by {split} already: leave that to the loader, or part=(0, 1)"
        )
    return part


def _schedule_of(sampler: Sampler, manager: Manager | None) -> Any:
    if manager is None and not isinstance(sampler, DealtSampler):
        raise UsageError(
            "without a manager the sampler must be a DealtSampler, which knows how many microbatches there are"
        )
    return getattr(sampler, "schedule", None)


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]
