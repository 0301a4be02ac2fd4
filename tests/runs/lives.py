"""One run in several lives: all processes of a job end, and another job begins from the same checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facts import Facts, Gold, read_trace
from harness import RUN_S_MAX, Job, names

from lightkeeper.checkpoint.files import check_files
from lightkeeper.checkpoint.folder import Folder, Listed
from lightkeeper.checkpoint.manifest import Damaged, Manifest
from lightkeeper.checkpoint.names import MARKER
from lightkeeper.events import schema

GONE_S_MAX = 60.0
MOMENTS = ("any", "saving", "publishing", "pruning")
STRIKE_S_MAX = 60.0


@dataclass(frozen=True)
class Death:
    """What a death of all processes left.

    Attributes:
        moment: at which one it came.
        kinds: of entries in the folder of checkpoints.
        committed: those that count and are whole, the newest first.
        begun: the highest step of which a save had begun, committed or not.
        noted: the highest step that an event calls committed, -1 if none does.
        done: the last step that some group has applied, -1 if there was none.
        missed: how many saves were told to have come to nothing, as one does whose forerunner is slow.
    """

    moment: str
    kinds: frozenset[str]
    committed: tuple[int, ...]
    begun: int
    noted: int
    done: int
    missed: int

    @property
    def newest(self) -> int:
        """Of those that are committed; -1 if there is none."""
        return max(self.committed, default=-1)


@dataclass
class Lives:
    """A run whose jobs come one after another.

    Attributes:
        folder: of everything.
        options: of `loops.saving`.
        settings: of the groups.
        jobs: those so far.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    each: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """Where they are."""
        return self.folder / "checkpoints"

    @property
    def job(self) -> Job:
        """The newest."""
        return self.jobs[-1]

    def prepare(self, lighthouse: Job | None = None) -> Job:
        """A further job, with a lighthouse of its own unless that of another goes on."""
        job = Job(self.folder / f"life-{len(self.jobs)}")
        self.jobs.append(job)
        job.variables["LIGHTKEEPER_REDUCTION"] = "fold"
        job.settings.update({"deal": "even", **self.settings})
        if lighthouse is None:
            job.start_lighthouse("--lease-s", "5")  # nobody is to be found by silence
        else:
            job.lighthouse, job.lighthouses = lighthouse.lighthouse, lighthouse.lighthouses
        return job

    def begin(self, groups: int = 1, lighthouse: Job | None = None, **options: Any) -> Job:
        """A further job with so many groups; they hurry once the file `hurry` is there."""
        job = self.prepare(lighthouse)
        job.settings["groups"] = groups
        for group in names(groups):
            self.start(job, group, **options)
        return job

    def start(self, job: Job, group: str, **options: Any) -> Any:
        """Starts one group of a job."""
        given = {
            "loop": "saving", "hurry": str(job.folder / "hurry"), **self.options, **self.each.get(group, {}), **options
        }  # fmt: skip
        given["checkpoints"] = {"folder": str(self.checkpoints), **given.get("checkpoints", {})}
        return job.start(group, **given)

    # ------------------------------------------------------------ deaths

    def die(self, moment: str, draw: random.Random, lighthouse: bool = True) -> Death:
        """Kills every process of the newest job at once, some time after its first step.

        Args:
            moment: one of `MOMENTS`.
            draw: gives what is random.
            lighthouse: whether that goes too.
        """
        job = self.job
        job.wait_for(schema.Committed)
        pids = self.pids(lighthouse)
        until_s, files = time.monotonic() + draw.uniform(0, 1.5), draw.randint(1, 5)
        comes = {
            "any": lambda: time.monotonic() >= until_s,
            "saving": lambda: files_being_saved(self.checkpoints) >= files,
            "publishing": lambda: any(self.checkpoints.glob(f".saving-*/{MARKER}")),
            "pruning": lambda: any(self.checkpoints.glob(".dropped-*")),
        }[moment]
        poll(comes, STRIKE_S_MAX)
        signal_all(pids, signal.SIGSTOP)
        while not comes():  # it was over before they stood still
            signal_all(pids, signal.SIGCONT)
            poll(comes, STRIKE_S_MAX)
            signal_all(pids, signal.SIGSTOP)
        self.kill(pids, lighthouse)
        return self.after(moment)

    def pids(self, lighthouse: bool = True) -> list[int]:
        """All processes of the newest job."""
        job = self.job
        pids = [int(text.split()[0]) for text in job.left_over()]
        return pids + [child.pid for child in job.lighthouses if lighthouse and child.poll() is None]

    def kill(self, pids: list[int], lighthouse: bool = True) -> None:
        """Kills them at once; returns when nothing of the newest job is left."""
        job = self.job
        signal_all(pids, signal.SIGSTOP)  # none sees another's end
        signal_all(pids, signal.SIGKILL)
        codes = job.wait()
        assert set(codes.values()) == {-signal.SIGKILL}, f"they were to be killed: {codes}"
        job.until(lambda: not job.left_over(lighthouses=lighthouse), "all are gone")
        for child in job.lighthouses if lighthouse else ():
            child.wait(GONE_S_MAX)

    def after(self, moment: str = "") -> Death:
        """What there is now. Whatever counts is read whole."""
        entries = Folder(self.checkpoints).entries()
        events = self.job.events()
        saved = [e.step for e in events if isinstance(e, schema.CheckpointSaved)]
        whole = self.committed()
        traces = [read_trace(path) for path in self.job.folder.glob("trace-*")]
        return Death(
            moment=moment,
            kinds=frozenset(one.kind for one in entries),
            committed=tuple(one.step for one in whole),
            begun=max((one.step for one in entries if one.kind in ("step", "saving")), default=-1),
            noted=max(saved, default=-1),
            done=max((step for traced in traces for step in traced.digests), default=-1),
            missed=sum(isinstance(e, schema.CheckpointFailed) for e in events),
        )

    def committed(self) -> list[Listed]:
        """The checkpoints that count, newest first; fails if one of them is not whole."""
        found = [one for one in Folder(self.checkpoints).listed() if one.manifest is not None]
        for one in found:
            assert isinstance(one.manifest, Manifest)
            try:
                check_files(one.path, one.manifest)
            except Damaged as error:
                raise AssertionError(f"{one.path} is committed, and {error}") from error
        return found

    # ------------------------------------------------------------ checks

    def check_states(self, gold: Gold, first: int = 0) -> None:
        """Every state that any process of any life had is the plain run's, bit by bit; so is what was loaded.

        Args:
            gold: the plain run.
            first: number of the first life that is looked at.
        """
        scalars = dict(map(tuple, gold.scalars))
        tallies: dict[int, str] = {}
        buffers: dict[int, set[str]] = {}
        for job in self.jobs[first:]:
            traces = {path: read_trace(path) for path in sorted(job.folder.glob("trace-*"))}
            for traced in traces.values():
                for step, statistics in traced.all("buffers"):
                    buffers.setdefault(step, set()).add(statistics)
            for path, traced in traces.items():
                for step, found in traced.digests.items():
                    assert found == gold.digests[step], f"{path}: the state after step {step} is another"
                for step, text in traced.all("scalars"):
                    assert text == scalars[step], f"{path}: step {step}: {text}"
                for begun, found, text, tally, statistics in traced.all("loaded"):
                    if begun:
                        assert found == gold.digests[begun - 1] and text == scalars[begun - 1], path
                        assert first or statistics in buffers[begun - 1], f"{path}: of another step than {begun}"
                    assert tally == begun, path
                for step, *tally in traced.all("tally"):
                    assert tallies.setdefault(step, str(tally)) == str(tally) and tally[0] == step + 1, path

    def wait_saved(self, count: int = 1, within_s: float = RUN_S_MAX) -> list[schema.CheckpointSaved]:
        """The checkpoints of the newest job, once there are so many."""

        def saved() -> list[schema.CheckpointSaved]:
            return [e for e in self.job.events() if isinstance(e, schema.CheckpointSaved)]

        self.job.until(lambda: len(saved()) >= count, f"{count} checkpoints", within_s)
        return saved()

    def finish(self, **how: Any) -> Facts:
        """The newest job's end."""
        self.job.hurry()
        return self.job.finish(**how)

    def end(self) -> None:
        """Kills whatever is left."""
        for job in self.jobs:
            job.end()


def loaded(job: Job) -> dict[str, int]:
    """Group to the steps behind the state that its newest start has loaded."""
    found = {}
    for path in sorted(job.folder.glob("trace-*")):
        for begun, *_ in read_trace(path).all("loaded"):
            found[path.name.removeprefix("trace-")] = begun
    return found


def signal_all(pids: list[int], number: int) -> None:
    """To all of them that are there yet."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def files_being_saved(folder: Path) -> int:
    """How many files the fullest folder has that is no checkpoint yet."""
    counts = [0]
    for path in folder.glob(".saving-*"):
        with contextlib.suppress(FileNotFoundError):  # it has become one
            counts.append(len(os.listdir(path)))
    return max(counts)


def poll(comes: Callable[[], bool], within_s: float = STRIKE_S_MAX) -> None:
    """Returns as soon as something is so, which may last for some milliseconds only."""
    end = time.monotonic() + within_s
    while not comes():
        assert time.monotonic() < end, "the moment did not come"
        time.sleep(0.001)
