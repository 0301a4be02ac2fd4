"""What a person or a scheduler asks of a running job: to save now, or to stop in good order.

As at a counter: whoever wants something puts a slip there, and the clerk looks once between two customers. So nothing
that is asked interrupts a step, and what is asked is answered at its end.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.checkpoint.names import SAVE, STOP
from lightkeeper.errors import UsageError
from lightkeeper.words import say

SLURM_END = "SLURM_JOB_END_TIME"  # seconds since the Unix epoch
SECONDS_MAX = 1e11  # of any time that is given: some thousand years

_Stamp = tuple[int, int, int]  # which file it is, and when it was changed


@dataclass(frozen=True)
class Asked:
    """What one poll has found.

    Attributes:
        save: who asks for a checkpoint, in a few words; empty: nobody.
        stop: who asks that the job stops; empty: nobody.
        leave: who asks that this group leaves it; empty: nobody.
        files: those that ask, by name, as they were.
    """

    save: str = ""
    stop: str = ""
    leave: str = ""
    files: tuple[tuple[str, _Stamp], ...] = ()


class Requests:
    """Found by one rank of a group, once per step.

    Files `STOP` and `SAVE` in the folder, whatever they hold; and the end of the time that there is: of the job, or of
    what Slurm gives this group, which then leaves. A time that has come asks until the job stops.

    Args:
        folder: of the checkpoints; it need not be there.
        time_limit_s: seconds that this process may run from its start on.
        end_at: seconds since the Unix epoch at which it must have ended.
        environment: with the variable `SLURM_JOB_END_TIME`, by which this group must have left; None: that of the
            process.
        tell: takes a line for whoever reads the log.
        wall: seconds since the Unix epoch.
        age_s: seconds since this process started.

    Raises:
        UsageError: a time that is none.
    """

    def __init__(
        self,
        folder: Path,
        time_limit_s: float | None = None,
        end_at: float | None = None,
        environment: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = say,
        wall: Callable[[], float] = time.time,
        age_s: Callable[[], float] | None = None,
    ) -> None:
        self._folder, self._tell = folder, tell
        self._wall, self._age_s = wall, process_age_s if age_s is None else age_s
        if time_limit_s is not None and not 0 < time_limit_s <= SECONDS_MAX:
            raise UsageError(f"time_limit_s {time_limit_s}: give seconds, more than 0")
        if end_at is not None and not self._born() < end_at <= SECONDS_MAX:
            raise UsageError(f"end_at {end_at}: give seconds since 1970 that this process begins before")
        self._time_limit_s, self._end_at = time_limit_s, end_at
        self._end = "" if end_at is None else f"the end at {_clock(end_at)}"
        self._slurm_at = self._end_of_slurm(os.environ if environment is None else environment)
        self._unheeded: dict[str, _Stamp | int] = {}  # by file: as it was when it was said that it asks for nothing
        self._lasting = self._leave = ""  # who asks until the job stops, or until this group has left

    def poll(self, margin_s: float = 0.0) -> Asked:
        """Looks once. It costs two calls of `os.stat`.

        Args:
            margin_s: seconds that are needed after it: for the step, and a save.
        """
        files = {name: stamp for name in (STOP, SAVE) if (stamp := self._look(name)) is not None}
        self._lasting = self._lasting or self._too_late(margin_s)
        if self._slurm_at is not None and self._wall() + margin_s >= self._slurm_at:
            self._leave = f"Slurm's end of its time at {_clock(self._slurm_at)}"
        return Asked(
            save=f"the file {SAVE}" if SAVE in files else "",
            stop=f"the file {STOP}" if STOP in files else self._lasting,
            leave=self._leave,
            files=tuple(files.items()),
        )

    def honoured(self, asked: Asked, names: Iterable[str] = (STOP, SAVE)) -> None:
        """What was asked is done: the files go, unless they were put there anew meanwhile, which asks again.

        A file that cannot be removed asks for nothing more until it is changed; that is said.

        Args:
            asked: what was found.
            names: of the files that are meant.
        """
        for name, stamp in asked.files:
            if name not in names:
                continue
            path = self._folder / name
            try:
                if _stamp(os.stat(path)) == stamp:
                    path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._unheeded[name] = stamp
                why = error.strerror or error
                self._tell(f"cannot remove {path}: {why}; it asks for nothing more until it is changed")

    # ------------------------------------------------------------ files

    def _look(self, name: str) -> _Stamp | None:
        """The file, if there is one that asks for something."""
        path = self._folder / name
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            self._unheeded.pop(name, None)
            return None
        except OSError as error:
            self._unheeded_once(name, error.errno or 0, f"{path} cannot be seen: {error.strerror or error}")
            return None
        stamp = _stamp(found)
        if not stat.S_ISREG(found.st_mode):
            self._unheeded_once(name, found.st_ino, f"{path} asks for nothing: it is no regular file")
            return None
        if self._unheeded.get(name) == stamp:
            return None
        self._unheeded.pop(name, None)
        return stamp

    def _unheeded_once(self, name: str, what: int, line: str) -> None:
        if self._unheeded.get(name) != what:
            self._unheeded[name] = what
            self._tell(line)

    # ------------------------------------------------------------ time

    def _too_late(self, margin_s: float) -> str:
        if self._time_limit_s is not None and self._age_s() + margin_s >= self._time_limit_s:
            return f"the time limit of {self._time_limit_s:g} s"
        if self._end_at is not None and self._wall() + margin_s >= self._end_at:
            return self._end
        return ""

    def _born(self) -> float:
        return self._wall() - self._age_s()

    def _end_of_slurm(self, environment: Mapping[str, str]) -> float | None:
        text = environment.get(SLURM_END, "")
        if not text:
            return None
        try:
            end_at = float(text)
        except ValueError:
            end_at = math.nan
        if not self._born() < end_at <= SECONDS_MAX:
            self._tell(f"{SLURM_END} is {text[:40]!r}, no time after the start of this process: no time limit follows")
            return None
        return end_at


def process_age_s() -> float:
    """Seconds since this process started, also while the machine slept; a wall clock that jumps means nothing to it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - _started_s(os.getpid())


@functools.lru_cache(maxsize=1)
def _started_s(pid: int) -> float:
    """Seconds from boot to its start (proc_pid_stat(5), field 22); the name before it may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _clock(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
