"""Publishes checkpoints in processes that are killed, and looks at what they leave: run as a program, without torch.

Every line on standard output is one death: what was there before it, what is there after it.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from checkpoint_made import published

from lightkeeper.checkpoint.files import check_files
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import Damaged, read_committed
from lightkeeper.checkpoint.names import MARKER, STEP_MAX

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
LIFE_S_MAX = 0.03
KEEP = 2

Note = Callable[[int], None]  # told the newest step that was published


def everything_once(folder: Folder, note: Note) -> None:
    """A new one, the same again, one over a broken one, another state over a broken one, pruning, sweeping."""
    step = folder.newest() + 1
    published(folder, step)
    note(step)
    published(folder, step, wall=101.0)
    for epoch in (1, 2):
        step += 1
        (path,) = published(folder, step)
        (path / MARKER).unlink()
        published(folder, step, epoch=epoch)
        note(step)
    folder.saving(step)
    folder.prune(KEEP)
    folder.sweep(step)


def for_ever(folder: Folder, note: Note) -> None:
    """That again and again."""
    while True:
        everything_once(folder, note)


def killed_after(folder: Folder, operations: int) -> None:
    """From now on this process dies just before its operation of that number in the folder."""
    left = operations

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and str(folder.path) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def dies(work: Callable[[], None], life_s: float | None = None) -> bool:
    """Does this in a process of its own, which is killed after a while if one is given; whether it was killed.

    That it failed by itself ends the program, behind its traceback.
    """
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if life_s is not None:
        time.sleep(life_s)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        sys.exit(f"the writer ended with {status}")
    return status != 0


def tell(folder: Folder, noted: int) -> None:
    """One line on what a death left. Whatever is committed is read whole."""
    committed, torn = [one for one in folder.listed() if one.manifest is not None], []
    for one in committed:
        try:
            check_files(one.path, read_committed(one.path))
        except Damaged as error:
            torn.append(f"{one.path.name}: {error}")
    kinds = sorted({one.kind for one in folder.entries()})
    print(json.dumps({"noted": noted, "steps": [one.step for one in committed], "torn": torn, "kinds": kinds}))


def main(path: Path, how: str, deaths: int, seed: int) -> None:
    """Kills that many times: ``each`` at every operation in turn until there is none more, ``random`` at any time."""
    folder, draw = Folder(path, "g0-1"), random.Random(seed)
    shared = mmap.mmap(-1, 8)  # what a child notes survives its death

    def note(step: int) -> None:
        shared[:8] = step.to_bytes(8, "little", signed=True)

    note(-1)
    for number in range(deaths):
        if how == "each":

            def work(number: int = number) -> None:
                killed_after(folder, number)
                everything_once(folder, note)

            killed = dies(work)
        else:
            killed = dies(lambda: for_ever(folder, note), draw.uniform(0, LIFE_S_MAX))
        if not killed:
            return
        tell(folder, int.from_bytes(shared[:8], "little", signed=True))
        folder.prune(KEEP)  # as whoever comes next does; or what is left would grow
        folder.sweep(STEP_MAX)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
