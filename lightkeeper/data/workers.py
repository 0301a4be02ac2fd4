"""Worker processes that make batches, one at a time each, and what ties them to their trainer.

A worker has no part in the control plane: every socket that it inherited by fork is put out of its reach, so that
neither the manager nor a peer can take it for the trainer, and no connection stays half open for its sake. It ignores
SIGTERM and SIGINT, which are for the trainer to act on, and the kernel ends it with the trainer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as processes

from lightkeeper.data.making import Failure, Made, Recipe, Task, failure_of
from lightkeeper.manager.processes import die_with_parent

FOR_THE_TRAINER = (signal.SIGTERM, signal.SIGINT)
END_S = 0.5  # for workers to end in good order; then they are killed
JOIN_S = 5.0  # between the end of a worker's pipe and its exit code

Came = Callable[[int, Made | Failure], None]
Died = Callable[[int, int, int | None], None]


class Workers:
    """The processes, and a thread for each that takes what it has made.

    Args:
        recipe: how a batch is made.
        count: number of processes.
        context: ``fork``, ``forkserver`` or ``spawn``; all but the first need a data set that can be pickled.
        came: told the worker's number and what it made; in that worker's thread.
        died: told the worker's number, its pid and its exit code; likewise.
    """

    def __init__(self, recipe: Recipe, count: int, context: str, came: Came, died: Died) -> None:
        self._recipe, self._count = recipe, count
        self._context: Any = processes.get_context(context)
        self._came, self._died = came, died
        self._processes: dict[int, BaseProcess] = {}
        self._tasks: dict[int, Connection] = {}
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started last for each number."""
        return [process.pid for _, process in sorted(self._processes.items()) if process.pid is not None]

    def start(self, number: int) -> None:
        """Starts a worker, also in the place of one that died. On the main thread, to which the kernel ties it."""
        tasks, of_worker = self._context.Pipe(duplex=False)
        results, to_trainer = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work,
            args=(self._recipe, number, self._count, tasks, to_trainer, os.getpid()),
            name=f"lightkeeper data worker {number}",
            daemon=True,
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)  # its handlers are not for the worker
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        tasks.close()
        to_trainer.close()  # now the pipe ends with the worker
        if (old := self._tasks.get(number)) is not None:
            old.close()
        self._processes[number], self._tasks[number] = process, of_worker
        threading.Thread(
            target=self._take, args=(number, process, results), name=f"data worker {number}", daemon=True
        ).start()

    def give(self, number: int, task: Task) -> None:
        """Gives an idle worker something to make; if it is dead, `died` says so."""
        with contextlib.suppress(BrokenPipeError):
            self._tasks[number].send(task)

    def close(self) -> None:
        """Ends all workers: in good order, or after `END_S` by SIGKILL."""
        self._closed = True
        for connection in self._tasks.values():
            with contextlib.suppress(OSError):
                connection.send(None)
        until = time.monotonic() + END_S
        for process in self._processes.values():
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join(END_S)
        for connection in self._tasks.values():
            connection.close()

    def _take(self, number: int, process: BaseProcess, results: Connection) -> None:
        """Takes what one worker makes, until it ends."""
        with results:
            while not self._closed:
                try:
                    data = results.recv_bytes()
                except (EOFError, OSError):
                    break
                try:
                    made = ForkingPickler.loads(data)
                except (EOFError, OSError):  # tensors' memory is handed over by the worker itself: it is gone
                    break
                except Exception as error:  # a batch that cannot be read back: told where it is asked for
                    made = failure_of(error)
                self._came(number, made)
        if self._closed:
            return
        process.join(JOIN_S)
        if process.exitcode is None:  # it closed its pipe and lives: of no use any more
            process.kill()
            process.join(JOIN_S)
        self._died(number, process.pid or 0, process.exitcode)


# ---------------------------------------------------------------- in the worker


def _work(recipe: Recipe, worker: int, count: int, tasks: Connection, results: Connection, trainer: int) -> None:
    """Makes what is asked for until `None` is."""
    for number in FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_TRAINER)
    die_with_parent()
    parent = processes.parent_process()
    if parent is None or parent.pid != trainer or not parent.is_alive():
        return  # it died before the kernel was asked
    part_from_sockets()
    torch.set_num_threads(1)  # as torch's own workers: the trainer needs the cores
    _tell_worker_info(recipe, worker, count)
    broken: Failure | None = None
    if recipe.worker_init is not None:
        try:
            recipe.worker_init(worker)
        except Exception as error:  # the user's code: told where a batch is asked for
            broken = failure_of(error)
    while True:
        try:
            task = tasks.recv()
        except EOFError:
            return
        if task is None:
            return
        results.send_bytes(_packed(broken or recipe.make(task)))


def _packed(made: Made | Failure) -> Any:
    """Pickled; tensors are moved to shared memory, as by torch's own loader."""
    try:
        return ForkingPickler.dumps(made)
    except Exception as error:  # what collate returned cannot be sent: told where it is asked for
        return ForkingPickler.dumps(failure_of(error))


def part_from_sockets() -> int:
    """Puts every inherited socket out of this process's reach, but standard input and output; returns how many.

    Each is replaced by ``/dev/null`` under the same number, so that an object that still holds the number can neither
    use nor close a file that was opened later.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    parted = 0
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            is_socket = descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:
            continue  # the listing's own
        if is_socket:
            os.dup2(nothing, descriptor, inheritable=False)
            parted += 1
    os.close(nothing)
    return parted


def _tell_worker_info(recipe: Recipe, number: int, count: int) -> None:
    """`torch.utils.data.get_worker_info()` works here as in torch's own workers."""
    from torch.utils.data._utils import worker

    worker._worker_info = worker.WorkerInfo(id=number, num_workers=count, seed=recipe.seed, dataset=recipe.dataset)
